"""What stands between tags."""

from __future__ import annotations

import pytest

from tests.gateway.guests.programs.transforms.chains import applied, refusal


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("<answer>42</answer>", "42"),
        ("I think <b>so</b>.\n<answer>\n42 < 43 & more\n</answer> Done.", "\n42 < 43 & more\n"),
        ('<answer id="1" lang=en>a</answer>', "a"),
        ("<answer>a</answer><answer>b</answer>", "a"),
        ("<answer>a<answer>b</answer>c</answer> d</answer>", "a<answer>b</answer>c"),
        ("<answer>a<answer/>b</answer>", "a<answer/>b"),
        ("<answer/> <answer>b</answer>", ""),
        ("<answer></answer>", ""),
        ("</answer> <answer>a</answer >", "a"),
        ("<answers>x</answers><answer\n>a</answer>", "a"),
        ("<answer>a<b>&lt;</answer>", "a<b>&lt;"),
    ],
)
def test_the_first_tag_gives_what_is_inside(text: str, inside: str) -> None:
    assert applied("xml(answer)", text) == inside


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("42", "there is no <answer>"),
        ("<Answer>42</Answer>", "there is no <answer>"),
        ("</answer>", "there is no <answer>"),
        ("So:\n <answer>42", "<answer> at line 2, column 2 is not closed by </answer>"),
        ("<answer>a<answer>b</answer>", "line 1, column 1 is not closed"),
    ],
)
def test_a_text_without_the_tag_is_refused(text: str, reason: str) -> None:
    assert reason in refusal("xml(answer)", text)


def test_a_name_may_have_what_xml_allows() -> None:
    assert applied("xml(ns:a.b-c_1)", "<ns:a.b-c_1>x</ns:a.b-c_1>") == "x"
    assert applied("xml(größe)", "<größe>x</größe>") == "x"
