import json
import math
from collections.abc import Mapping

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plait.backends.errors import CallerError
from plait.gateway.calls.annotations import NO_ANNOTATIONS, Annotations, OutputVariable, read_annotations
from plait.policy.types import Objective, Slo


def read(body: Mapping[str, object] | None = None, **headers: str) -> Annotations:
    """Reads headers written as keyword arguments: `plait_session="s"` is `plait-session: s`."""
    pairs = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return read_annotations([(b"content-type", b"application/json"), *pairs], body)


def refusal(body: Mapping[str, object] | None = None, **headers: str) -> CallerError:
    with pytest.raises(CallerError) as caught:
        read(body, **headers)
    assert caught.value.status == 400
    assert json.loads(caught.value.body())["error"]["param"] == caught.value.param
    return caught.value


@pytest.mark.parametrize("body", [None, {}, {"session": None}])
def test_no_annotation_is_a_shared_constant(body: Mapping[str, object] | None) -> None:
    assert read(body) is NO_ANNOTATIONS
    assert read(body, x_slo_other="1") is NO_ANNOTATIONS
    assert Annotations(slo=Slo(None, None, None)) == NO_ANNOTATIONS


def test_every_header_is_read() -> None:
    assert read(
        plait_session="app-1:run.7",
        plait_inputs="task, code ,_x,task",
        plait_output="review; transform=code_block",
        plait_objective="latency",
        plait_slo_ttft_ms="250",
        plait_slo_tpot_ms="37.5",
        plait_slo_jct_ms="1e4",
        plait_priority="-3",
    ) == Annotations(
        session="app-1:run.7",
        inputs=("task", "code", "_x"),
        output=OutputVariable("review", "code_block"),
        slo=Slo(ttft_s=0.25, tpot_s=0.0375, jct_s=10.0),
        objective=Objective.LATENCY,
        priority=-3,
    )


def test_the_body_has_the_same_keys_with_json_values() -> None:
    body = {
        "session": "s",
        "inputs": ["a", "b"],
        "output": "c",
        "objective": "throughput",
        "slo_ttft_ms": 250,
        "slo_tpot_ms": 37.5,
        "slo_jct_ms": "10000",
        "priority": 2**31 - 1,
    }
    assert read(body) == Annotations(
        session="s",
        inputs=("a", "b"),
        output=OutputVariable("c"),
        slo=Slo(0.25, 0.0375, 10.0),
        objective=Objective.THROUGHPUT,
        priority=2**31 - 1,
    )
    assert read({"inputs": "a,b"}).inputs == ("a", "b")


def test_a_key_of_the_body_may_have_a_headers_hyphens() -> None:
    assert read({"slo-ttft-ms": 250, "session-objective": "latency"}) == read(
        {"slo_ttft_ms": 250, "session_objective": "latency"}
    )
    assert refusal({"slo-ttft-ms": 250, "slo_ttft_ms": 300}).param == "plait.slo-ttft-ms"
    assert refusal(plait_slo_ttft__ms="1").message.endswith("did you mean plait-slo-ttft-ms?")


def test_the_inference_gateways_headers_are_understood() -> None:
    assert read(x_slo_ttft_ms="100", x_slo_tpot_ms="20").slo == Slo(ttft_s=0.1, tpot_s=0.02)
    assert read(x_llm_d_slo_ttft_ms="100", x_llm_d_slo_tpot_ms="20").slo == Slo(ttft_s=0.1, tpot_s=0.02)
    assert read(x_llm_d_slo_ttft_ms="100", x_slo_ttft_ms="100.0").slo == Slo(ttft_s=0.1)
    assert read(x_llm_d_slo_jct_ms="100") == NO_ANNOTATIONS
    assert refusal(x_slo_ttft_ms="soon").param == "x-slo-ttft-ms"
    assert refusal(x_llm_d_slo_ttft_ms="soon").param == "x-llm-d-slo-ttft-ms"


def test_places_that_agree_may_repeat_each_other() -> None:
    assert read({"slo_ttft_ms": 250.0}, plait_slo_ttft_ms="250", x_slo_ttft_ms="2.5e2").slo == Slo(ttft_s=0.25)


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        (
            {"slo_ttft_ms": 300},
            {"plait_slo_ttft_ms": "250"},
            'plait-slo-ttft-ms is "250" but plait.slo_ttft_ms is 300; give one of them, or equal values',
        ),
        (
            None,
            {"x_slo_ttft_ms": "1", "plait_slo_ttft_ms": "2"},
            'x-slo-ttft-ms is "1" but plait-slo-ttft-ms is "2"; give one of them, or equal values',
        ),
        (
            {"inputs": ["b", "a"]},
            {"plait_inputs": "a,b"},
            'plait-inputs is "a,b" but plait.inputs is an array; give one of them, or equal values',
        ),
    ],
)
def test_places_that_disagree_are_both_named(
    body: Mapping[str, object] | None, headers: Mapping[str, str], message: str
) -> None:
    assert refusal(body, **headers).message == message


def test_a_header_sent_twice_has_to_agree_with_itself() -> None:
    once = (b"plait-priority", b"1")
    assert read_annotations([once, once], None).priority == 1
    with pytest.raises(CallerError, match='plait-priority is "1" but plait-priority is "2"'):
        read_annotations([once, (b"plait-priority", b"2")], None)


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    error = refusal(plait_sesion="s")
    assert (error.message, error.param) == (
        'unknown annotation "plait-sesion"; did you mean plait-session?',
        "plait-sesion",
    )
    error = refusal({"slo_tft_ms": None})
    assert (error.message, error.param) == (
        'unknown annotation "plait.slo_tft_ms"; did you mean plait.slo_ttft_ms?',
        "plait.slo_tft_ms",
    )
    assert "the known annotations are plait-session, plait-inputs, " in refusal(plait_="x").message


BAD_VALUES: list[tuple[str, object]] = [
    ("session", ""),
    ("session", "a b"),
    ("session", "a" * 129),
    ("session", "é"),
    ("session", 7),
    ("inputs", ""),
    ("inputs", "a,,b"),
    ("inputs", "a b"),
    ("inputs", "1a"),
    ("inputs", "a" * 65),
    ("inputs", ["a", 1]),
    ("inputs", ["a,b"]),
    ("inputs", {"a": 1}),
    ("output", ""),
    ("output", "a,b"),
    ("output", "a;"),
    ("output", "a; transform"),
    ("output", "a; transform="),
    ("output", "a; transfrom=code_block"),
    ("output", ["a"]),
    ("objective", "Latency"),
    ("objective", "speed"),
    ("objective", 1),
    ("slo-ttft-ms", "0"),
    ("slo-ttft-ms", "-5"),
    ("slo-ttft-ms", "nan"),
    ("slo-ttft-ms", "inf"),
    ("slo-ttft-ms", "1e999"),
    ("slo-ttft-ms", "1e-999"),
    ("slo-ttft-ms", "250ms"),
    ("slo-ttft-ms", "1_000"),
    ("slo-tpot-ms", 0),
    ("slo-tpot-ms", 5e-324),
    ("slo-tpot-ms", math.inf),
    ("slo-tpot-ms", math.nan),
    ("slo-tpot-ms", 10**400),
    ("slo-jct-ms", True),
    ("slo-jct-ms", [1]),
    ("slo-jct-ms", "\u0661\u0660"),
    ("priority", "1.0"),
    ("priority", 1.0),
    ("priority", False),
    ("priority", 2**31),
    ("priority", -(2**31) - 1),
    ("priority", str(2**31)),
    ("priority", "9" * 5000),
    ("priority", 1 << 20_000),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES, ids=[f"{key}-{i}" for i, (key, _) in enumerate(BAD_VALUES)])
def test_a_bad_value_is_refused_by_name(key: str, value: object) -> None:
    error = refusal({key: value})
    assert error.param == f"plait.{key}"
    assert error.message.startswith(f"plait.{key} is ")
    assert "; it must be " in error.message
    if isinstance(value, str):
        raw = value.encode()
        with pytest.raises(CallerError, match=f"^plait-{key} is "):
            read_annotations([(f"plait-{key}".encode(), raw)], None)


def test_a_refusal_shows_the_value_and_what_is_accepted() -> None:
    assert refusal(plait_slo_ttft_ms="soon").message == (
        'plait-slo-ttft-ms is "soon"; it must be a number of milliseconds above 0'
    )
    assert refusal(plait_objective="speed").message == 'plait-objective is "speed"; it must be latency or throughput'
    assert len(refusal(plait_session="x" * 10_000).message) < 200


def test_a_transform_is_kept_as_it_is_written() -> None:
    assert read(plait_output=" code ;transform = regex:a=b; (c) ").output == OutputVariable("code", "regex:a=b; (c)")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("code; truncated=fail", OutputVariable("code", None, True)),
        ("code; truncated = keep", OutputVariable("code")),
        ("code;truncated=fail;transform=strip", OutputVariable("code", "strip", True)),
        ("code; transform=regex:a; truncated=fail", OutputVariable("code", "regex:a; truncated=fail")),
        ("code; truncated=maybe", None),
        ("code; truncated=fail; truncated=fail", None),
        ("code; truncated", None),
        ("code; truncated=fail;", None),
        ("code;", None),
        ("; truncated=fail", None),
    ],
)
def test_what_becomes_of_a_text_that_was_cut(text: str, expected: OutputVariable | None) -> None:
    if expected is None:
        assert refusal(plait_output=text).param == "plait-output"
    else:
        assert read(plait_output=text).output == expected


KEYS = ["session", "inputs", "output", "objective", "slo-ttft-ms", "slo-tpot-ms", "slo-jct-ms", "priority"]
header_names = st.one_of(
    st.sampled_from([f"plait-{key}".encode() for key in KEYS] + [b"x-slo-ttft-ms", b"x-slo-tpot-ms"]),
    st.binary(max_size=12).map(b"plait-".__add__),
    st.binary(max_size=12),
)
header_values = st.one_of(st.binary(max_size=20), st.from_regex(rb"[-+0-9.eE;=, a-z]*", fullmatch=True))


def parses_or_refuses(headers: list[tuple[bytes, bytes]], body: dict[str, object] | None) -> None:
    try:
        annotations = read_annotations(headers, body)
    except CallerError as error:
        refused = json.loads(error.body())["error"]
        assert refused["param"], "a refusal names what is wrong"
        return
    for seconds in (annotations.slo.ttft_s, annotations.slo.tpot_s, annotations.slo.jct_s):
        assert seconds is None or 0 < seconds < math.inf
    assert -(2**31) <= annotations.priority < 2**31


@given(st.lists(st.tuples(header_names, header_values), max_size=4))
@example([(b"plait-priority", b"+0"), (b"plait-priority", b"0")])
def test_any_header_is_read_or_refused(headers: list[tuple[bytes, bytes]]) -> None:
    parses_or_refuses(headers, None)


any_text = st.text(st.characters(), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(KEYS) | any_text, json_values, max_size=3))
@example({"\ud800": 1})
@example({"session": "\udfff"})
def test_any_body_is_read_or_refused(body: dict[str, object]) -> None:
    parses_or_refuses([], body)
