"""Small mappings against a dict."""

from __future__ import annotations

from collections.abc import Mapping
from sys import getsizeof

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.prefix.small_mapping import EMPTY, SingleEntry, with_entry, without_entry

KEYS = st.sampled_from("abc")


@given(st.lists(st.tuples(KEYS, st.integers() | st.none()), max_size=20))
def test_it_has_the_entries_that_a_dict_would_have(steps: list[tuple[str, int | None]]) -> None:
    mapping: Mapping[str, int] = EMPTY
    expected: dict[str, int] = {}
    for key, value in steps:
        if value is not None:
            mapping, expected[key] = with_entry(mapping, key, value), value
        elif key in expected:
            mapping = without_entry(mapping, key)
            del expected[key]
        else:
            with pytest.raises(KeyError):
                without_entry(mapping, key)
        assert dict(mapping) == expected
        assert (len(mapping), list(mapping)) == (len(expected), list(expected))
        assert list(mapping.items()) == list(expected.items())
        assert list(mapping.values()) == list(expected.values())
        for one in "abc":
            assert (one in mapping, mapping.get(one)) == (one in expected, expected.get(one))
        assert isinstance(mapping, dict) == (len(expected) > 1)


def test_one_entry_is_smaller_than_a_dict_and_reads_like_one() -> None:
    single = SingleEntry("a", 1)
    assert getsizeof(single) < getsizeof({})
    assert repr(single) == "{'a': 1}"
    assert (single["a"], single.get("b", 2)) == (1, 2)
    with pytest.raises(KeyError):
        single["b"]
    assert not EMPTY
