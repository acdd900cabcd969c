"""Lists as models write them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.guests.programs.transforms.chains import applied, refusal


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("red, green,blue", ["red", "green", "blue"]),
        ("red", ["red"]),
        (' "a, b", c d ,"say ""hi"""  \n ', ["a, b", "c d", 'say "hi"']),
        ("a, b,\nc, d\r\n", ["a", "b", "c", "d"]),
        ("a,,b,", ["a", "b"]),
        ("Äpfel, 梨", ["Äpfel", "梨"]),
        ('5" nails, hammer', ['5" nails', "hammer"]),
        ('"a\nb", c', ["a\nb", "c"]),
    ],
)
def test_items_between_commas(text: str, items: list[str]) -> None:
    assert applied("list(comma)", text) == json.dumps(items, ensure_ascii=False, separators=(",", ":"))


@given(st.lists(st.text(st.characters(exclude_categories=("C", "Z")), min_size=1), min_size=1))
def test_quoted_items_come_back(items: list[str]) -> None:
    text = ", ".join('"' + item.replace('"', '""') + '"' for item in items)
    assert json.loads(applied("list(comma)", text)) == items


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("1. foo\n\n2. bar\n\n3. baz", ["foo", "bar", "baz"]),
        ("Here are three:\n1) foo\n 2)  bar \n10. baz\nHope it helps!", ["foo", "bar", "baz"]),
        ("1. **Bold**: in 2024. Really.\n   more\n2. b", ["**Bold**: in 2024. Really.", "b"]),
        ("1. a\r\n2. b\r\n", ["a", "b"]),
        ("1.\n2. b\n3.c", ["b"]),
    ],
)
def test_items_behind_numbers(text: str, items: list[str]) -> None:
    assert json.loads(applied("list(numbered)", text)) == items


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("- foo\n- bar\n- baz", ["foo", "bar", "baz"]),
        ("Sure:\n\n* foo\n\t+ bar\n  - [ ] baz\n\nDone.", ["foo", "bar", "[ ] baz"]),
        ("- a\n---\n* * *\n- - -\n- b", ["a", "b"]),
        ("**Bold**\n* x\n-y\n- -", ["x", "-"]),
    ],
)
def test_items_behind_bullets(text: str, items: list[str]) -> None:
    assert json.loads(applied("list(bulleted)", text)) == items


@pytest.mark.parametrize(
    ("style", "text", "reason"),
    [
        ("comma", " \n", "the text is empty"),
        ("comma", 'a, "b', "not a comma-separated list (unexpected end of data)"),
        ("comma", '"a" b, c', "not a comma-separated list"),
        ("comma", "a\rb", "not a comma-separated list"),
        ("comma", "x" * 200_000, "field larger than field limit"),
        ("numbered", "- a\n- b", 'no line begins with a number such as "1." or "1)"'),
        ("numbered", "In 2024. it was", "no line begins with a number"),
        ("bulleted", "1. a\n---", "no line begins with -, * or +"),
    ],
)
def test_a_text_without_such_a_list_is_refused(style: str, text: str, reason: str) -> None:
    assert reason in refusal(f"list({style})", text)
