"""`strip` and `template`."""

from __future__ import annotations

import pytest

from tests.gateway.guests.programs.transforms.chains import applied


@pytest.mark.parametrize(
    ("text", "stripped"),
    [("\n\n Paris. \n", "Paris."), ("Paris", "Paris"), ("", ""), (" \t\n", ""), ("\u3000a b\u00a0", "a b")],
)
def test_strip_takes_white_space_from_both_ends(text: str, stripped: str) -> None:
    assert applied("strip", text) == stripped


@pytest.mark.parametrize(
    ("spec", "text", "result"),
    [
        ("template({{value}})", "x", "x"),
        ("template('{{value}} and {{value}}')", "x", "x and x"),
        ("template('{{value}}')", "{{value}}", "{{value}}"),
        (
            "template('{{ value }} {{other}} {value} {% if %} {{value}}')",
            "x",
            "{{ value }} {{other}} {value} {% if %} x",
        ),
        ("template('{{{value}}}')", "x", "{{{value}}}".replace("{{value}}", "x")),
        (r'template("Summary:\n{{value}}\n")', r"a\nb", "Summary:\na\\nb\n"),
    ],
)
def test_a_template_is_literal_but_for_the_value(spec: str, text: str, result: str) -> None:
    assert applied(spec, text) == result
