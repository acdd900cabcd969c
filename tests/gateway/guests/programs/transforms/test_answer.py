"""Answers out of a few that are possible."""

from __future__ import annotations

import pytest

from tests.gateway.guests.programs.transforms.chains import applied, refusal


@pytest.mark.parametrize(
    ("spec", "text", "result"),
    [
        ("boolean", "YES", "true"),
        ("boolean", "Yes, because it is so. Yes!", "true"),
        ("boolean", "**True**", "true"),
        ("boolean", "no.", "false"),
        ("boolean", "Answer: false\n", "false"),
        ("boolean", "I know nothing of this. Yes", "true"),
        ("boolean(ja, nein)", "JA!", "true"),
        ("boolean(ja, nein)", "Nein, yes ist Englisch", "false"),
        ("boolean(да, нет)", "Нет.", "false"),
        ("boolean(1, 0)", "It is 1", "true"),
    ],
)
def test_words_say_true_or_false(spec: str, text: str, result: str) -> None:
    assert applied(spec, text) == result


@pytest.mark.parametrize(
    ("spec", "text", "reason"),
    [
        ("boolean", "yes and no", '"no" and "yes" occur in the text'),
        ("boolean", "True. No doubt", '"no" and "true" occur in the text'),
        ("boolean", "maybe", 'none of "false", "no", "true", "yes" occurs in the text'),
        ("boolean", "yesterday I knew nothing", "none of"),
        ("boolean(ja, nein)", "yes", 'none of "ja", "nein"'),
    ],
)
def test_neither_or_both_is_refused(spec: str, text: str, reason: str) -> None:
    assert reason in refusal(spec, text)


@pytest.mark.parametrize(
    ("spec", "text", "result"),
    [
        ("enum(red, green)", "green", "green"),
        ("enum(red, green)", "\n red  ", "red"),
        ("enum(red, dark green, ignore_case=true)", "Dark Green\n", "dark green"),
        ("enum(Straße, ignore_case=true)", "STRASSE", "Straße"),
        ('enum("a, b", c)', "a, b", "a, b"),
    ],
)
def test_the_option_is_given_as_it_was_written(spec: str, text: str, result: str) -> None:
    assert applied(spec, text) == result


@pytest.mark.parametrize("text", ["Green", "green.", "it is green", "", "red green"])
def test_anything_else_is_refused(text: str) -> None:
    assert refusal("enum(red, green)", text) == "the text is none of red, green"
