"""Growing texts against strings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.guests.programs.core.held_call import PIECES_PER_BLOCK, GrowingText


@given(st.lists(st.text("aé\U0001f600", max_size=4)), st.lists(st.integers(0, 40)), st.sampled_from([0, 700, 2_000]))
def test_it_is_the_pieces_from_wherever_one_reads(pieces: list[str], starts: list[int], more: int) -> None:
    text = GrowingText()
    told = [*["x"] * more, *pieces]
    for piece in told:
        text.add(piece)
    whole = "".join(told)
    assert (str(text), text.characters, text.size_bytes) == (whole, len(whole), len(whole.encode()))
    assert all(text.since(at) == whole[at:] for start in starts for at in (start, more + start))


def test_many_short_pieces_are_joined() -> None:
    text = GrowingText()
    for _ in range(10 * PIECES_PER_BLOCK + 5):
        text.add("ab")
    assert (len(text._blocks), len(text._pieces)) == (10, 5)
