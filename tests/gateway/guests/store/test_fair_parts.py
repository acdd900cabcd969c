"""How gateways share a number of something: by what each wants, and all of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.admission.shares import fair_parts


@pytest.mark.parametrize(
    ("whole", "wanted", "parts"),
    [
        (6, [6], [6]),
        (6, [100, 0, 0], [6, 0, 0]),
        (6, [100, 1], [5, 1]),
        (10, [100, 100, 100], [3, 3, 4]),
        (100, [10, 5], [53, 47]),
        (0, [3, 4], [0, 0]),
        (2, [5, 5, 5], [0, 1, 1]),
    ],
)
def test_by_hand(whole: int, wanted: list[int], parts: list[int]) -> None:
    assert fair_parts(whole, wanted) == parts


@given(st.integers(0, 10_000), st.lists(st.integers(0, 5_000), min_size=1, max_size=20))
def test_nobody_gets_more_than_it_wants_while_another_lacks_something(whole: int, wanted: list[int]) -> None:
    parts = fair_parts(whole, wanted)
    assert sum(parts) == whole
    assert all(part >= 0 for part in parts)
    lacking = [part for part, want in zip(parts, wanted, strict=True) if part < want]
    if lacking:
        assert all(part <= want for part, want in zip(parts, wanted, strict=True))
        assert max(parts) <= min(lacking) + 1, "who lacks something has as much as anybody, up to one"
