"""The changed objectives of calls on their way to an engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import CallerError
from plait.backends.protocol.call_annotations import MAX_HANDLE, AnnotationReader, EngineAnnotations
from plait.backends.protocol.call_objectives import MAX_BODY_BYTES, MAX_CHANGES, encode_changes, read_changes
from plait.policy.types import Objective, Slo

milliseconds = st.none() | st.integers(1, 10**9).map(lambda ms: ms / 1e3)
times = st.tuples(milliseconds, milliseconds, milliseconds)
slos = st.builds(
    lambda given, said: Slo(*given)._replace(is_deduced=said) if any(given) else None, times, st.booleans()
)
changes = st.builds(
    EngineAnnotations,
    slo=slos,
    objective=st.none() | st.sampled_from(Objective),
    handle=st.text(min_size=1, max_size=MAX_HANDLE),
)


@given(st.lists(changes, max_size=5))
def test_what_is_written_is_read(written: list[EngineAnnotations]) -> None:
    body = encode_changes(written)
    assert list(read_changes(body, AnnotationReader())) == written
    assert len(body) < MAX_BODY_BYTES


def test_a_bad_objective_is_as_if_it_were_not_there() -> None:
    reader = AnnotationReader()
    body = b'[{"plait_handle":"h","plait_ttft_ms":-1,"plait_tpot_ms":40}]'
    assert list(read_changes(body, reader)) == [EngineAnnotations(slo=Slo(tpot_s=0.04), handle="h")]
    assert reader.ignored == {"plait_ttft_ms": 1}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "list of objects"),
        (b"{}", "list of objects"),
        (b'["h"]', "list of objects"),
        (b"\xff", "list of objects"),
        (b"[" * 100_000, "list of objects"),
        (b'[{"plait_ttft_ms":1}]', "handle"),
        (b'[{"plait_handle":7}]', "handle"),
        (b'[{"plait_handle":"%b"}]' % (b"h" * (MAX_HANDLE + 1)), "handle"),
        (b"[%b]" % b",".join([b'{"plait_handle":"h"}'] * (MAX_CHANGES + 1)), "at most 1024"),
    ],
)
def test_a_body_that_is_none_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(CallerError, match=says):
        read_changes(body, AnnotationReader())
