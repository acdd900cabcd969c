"""What JSONPath is offered without: whatever could take more than linear time."""

from __future__ import annotations

import json

import pytest

from plait.gateway.guests.programs.transforms import TransformSpecError, parse


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("", "invalid"),
        ("items", "invalid"),
        ("$.", "invalid"),
        ("$[01]", "invalid"),
        ("$ .a ", "invalid"),
        ("$[9007199254740993]", "out of range"),
        ("$[?@.a == 1e999]", "cannot be read"),
        (f"$[?{'!' * 900}@.a]", "cannot be read"),
        (f"$[?{'(' * 40}@.a{')' * 40}]", "too many parentheses"),
        (f"$[?{'!' * 40}@.a]", "too many conditions"),
        (f"$[?{' && '.join(['@.a'] * 40)}]", "too many conditions"),
        (f"${'.a' * 600}", "1,201 characters"),
        ("$[?match(@.a, 'x')]", "'match' is not defined"),
        ("$[?search(@.a, '(a+)+')]", "'search' is not defined"),
        ("$..a..b", "a second .."),
        ("$[0,0]", "several selectors"),
        ("$[*,0]", "several selectors"),
        ("$['a','a']", "several selectors"),
        ("$[0,-1]", "several selectors"),
        ("$[?@..a]", "in a filter"),
        ("$[?@.*]", "in a filter"),
        ("$[?@[?@.a]]", "in a filter"),
        ("$[?count($..*) > 1]", "in a filter"),
        ("$[?@.a == 1 || count(@[1:]) == 0]", "in a filter"),
    ],
)
def test_a_path_that_is_not_offered_is_refused_when_it_is_read(path: str, found: str) -> None:
    with pytest.raises(TransformSpecError) as caught:
        parse(f"json({json.dumps(path)})")
    assert found in caught.value.found


@pytest.mark.parametrize(
    "path", ["$", "$..*", "$.a..b[*].c", "$['a','b']", "$[::2]", "$[?@.a]", "$[?!@.a && (@.b == 'x' || @.c >= $.d)]"]
)
def test_the_rest_of_the_standard_is_offered(path: str) -> None:
    assert str(parse(f"json({json.dumps(path)})")).startswith("json(")
