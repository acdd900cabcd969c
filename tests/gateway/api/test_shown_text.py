"""What a stream shows of a text that begins anew, against the texts themselves."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.guests.programs.awaited_variable import ShownText, TextChangedError
from plait.gateway.guests.programs.core.held_call import GrowingText

TEXTS = st.text("ab", max_size=6)


def pieces(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]


@given(st.lists(st.tuples(TEXTS, st.lists(st.integers(0, 6), max_size=3)), min_size=1, max_size=4))
def test_what_is_shown_is_the_value_or_it_is_said_that_it_is_not(tellings: list[tuple[str, list[int]]]) -> None:
    """Each telling begins the text anew; the last one is the value."""
    shown, seen, changed = ShownText(), "", False
    value = tellings[-1][0]
    try:
        for text, cuts in tellings:
            growing = GrowingText()
            for piece in pieces(text, cuts):
                growing.add(piece)
                seen += shown.new_text(growing)
        seen += shown.rest(value)
    except TextChangedError:
        changed = True
    texts = [text for text, _ in tellings]
    agree = all(one.startswith(other) or other.startswith(one) for one in texts for other in texts)
    assert changed == (not agree or len(value) < max(map(len, texts)))
    if not changed:
        assert seen == value


def told(*pieces: str) -> GrowingText:
    text = GrowingText()
    for piece in pieces:
        text.add(piece)
    return text


def test_a_text_that_comes_once_goes_through() -> None:
    shown, text = ShownText(), told("one")
    assert shown.new_text(text) == "one"
    text.add(" two")
    assert (shown.new_text(text), shown.new_text(text), shown.rest("one two")) == (" two", "", "")


def test_a_value_that_nothing_was_shown_of_is_all_news() -> None:
    assert ShownText().rest("whole") == "whole"


def test_a_text_that_has_changed_shows_nothing_of_it() -> None:
    shown = ShownText()
    shown.new_text(told("one"))
    seen = ""
    with suppress(TextChangedError):
        seen = shown.new_text(told("other"))
    assert seen == ""
