"""What a JSON document has too much of is told from its bytes, as from the decoded document."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.protocol.json_bounds import (
    MAX_CONTAINERS,
    MAX_JSON_LEVELS,
    MAX_STRINGS,
    MAX_VALUES,
    Excess,
    excess_of,
)


def depth(value: object) -> int:
    if isinstance(value, dict | list):
        return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)
    return 0


documents = st.recursive(
    st.none() | st.text(alphabet='[]{}"\\\n\u00e9ab'),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(alphabet='[}"\\'), inside, max_size=3),
    max_leaves=40,
)


@given(documents, st.integers(0, 8), st.booleans(), st.integers(1, 12), st.sampled_from([None, 0, 3]))
def test_the_depth_is_that_of_the_decoded_document(
    document: object, levels: int, as_ascii: bool, part: int, indent: int | None
) -> None:
    raw = json.dumps(document, ensure_ascii=as_ascii, indent=indent).encode()
    assert (excess_of(raw, levels, part) is Excess.LEVELS) == (depth(document) > levels)


@pytest.mark.parametrize(("many", "is_too_many"), [
    (b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"[]]", False),
    (b"[" + b"[]," * (MAX_CONTAINERS - 1) + b"[]]", True),
    (b"[" + b'"",' * (MAX_STRINGS - 1) + b'""]', False),
    (b"[" + b'"",' * MAX_STRINGS + b'""]', True),
    (b"[" + b"1," * MAX_VALUES + b"1]", False),
    (b"[" + b"1," * (MAX_VALUES + 1) + b"1]", True),
], ids=lambda value: str(value) if isinstance(value, bool) else value[:4].decode())  # fmt: skip
def test_the_bounds_on_values_are_exact(many: bytes, is_too_many: bool) -> None:
    assert (excess_of(many, MAX_JSON_LEVELS) is Excess.VALUES) == is_too_many
