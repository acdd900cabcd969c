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


def deepest(raw: bytes) -> int:
    """The depth of a document that may be no JSON, byte by byte."""
    depth = most = 0
    in_string = escaped = False
    for byte in raw:
        if in_string and (escaped or byte == ord("\\")):
            escaped = not escaped
        elif byte == ord('"'):
            in_string = not in_string
        elif not in_string:
            depth += (byte in b"[{") - (byte in b"]}")
            most = max(most, depth)
    return most


@given(st.text(alphabet='[[]]{}"\\a,\u00e9', max_size=60), st.integers(0, 4), st.integers(1, 12))
def test_nor_need_the_document_be_json(text: str, levels: int, part: int) -> None:
    assert (excess_of(text.encode(), levels, part) is Excess.LEVELS) == (deepest(text.encode()) > levels)


@pytest.mark.parametrize("levels", [MAX_JSON_LEVELS, MAX_JSON_LEVELS + 1])
@pytest.mark.parametrize("text", ["", "[" * 20_000, '{"a": [\\"' * 2_000], ids=["empty", "brackets", "JSON"])
def test_a_long_document_may_be_as_deep_as_allowed(levels: int, text: str) -> None:
    deep = json.loads("[" * (levels - 2) + "]" * (levels - 2))
    raw = json.dumps({"texts": [text] * 10, "many": [{"a": []}] * MAX_JSON_LEVELS, "deep": [deep]}).encode()
    assert (excess_of(raw, MAX_JSON_LEVELS) is Excess.LEVELS) == (levels > MAX_JSON_LEVELS)


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
