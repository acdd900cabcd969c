"""Conditions as clients write them, and the values that meet them."""

from __future__ import annotations

import pytest

from plait.backends.errors import CallerError
from plait.gateway.calls.annotations import read_annotations
from plait.gateway.calls.condition import Condition, read_condition
from plait.gateway.guests.programs.core.held_call import with_condition


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ('verdict == "yes"', Condition("verdict", "==", "yes")),
        ('verdict=="yes"', Condition("verdict", "==", "yes")),
        (' _v1  !=  "" ', Condition("_v1", "!=", "")),
        ('review contains "LGTM, \\"really\\""', Condition("review", "contains", 'LGTM, "really"')),
        ('review contains"\\u00e4"', Condition("review", "contains", "ä")),
        ('contains contains "=="', Condition("contains", "contains", "==")),
    ],
)
def test_a_condition_is_read(raw: str, expected: Condition) -> None:
    assert read_condition(raw) == expected
    assert read_condition(str(expected)) == expected


@pytest.mark.parametrize(
    "raw",
    [
        *(
            "",
            "verdict",
            'verdict = "yes"',
            "verdict == yes",
            "verdict == 'yes'",
            'verdict == "yes',
            '"yes" == verdict',
        ),
        *('1a == "x"', 'a b == "x"', 'verdictcontains "x"', 'v contains ""', 'v contains " "', 'v == "x" and w == "y"'),
        *('v == "\\x"', 'v == "\\ud800"', 'v == "a\nb"', f'{"v" * 65} == "x"', None, 1, True, {"v": "x"}, ["v"]),
    ],
)
def test_what_is_no_condition_is_refused(raw: object) -> None:
    assert read_condition(raw) is None


@pytest.mark.parametrize(
    ("condition", "met", "unmet"),
    [
        ('v == "yes"', ["yes", " yes\n"], ["", "Yes", "yes.", "y es"]),
        ('v == " yes "', ["yes"], ["no"]),
        ('v == ""', ["", " \n"], ["x"]),
        ('v != "yes"', ["", "no"], ["yes", "\tyes"]),
        ('v contains " a b "', ["a b", "xa by"], ["ab", "a  b", ""]),
    ],
)
def test_values_are_compared_without_the_white_space_around_them(
    condition: str, met: list[str], unmet: list[str]
) -> None:
    read = read_condition(condition)
    assert read is not None
    assert [read.holds(value) for value in met] == [True] * len(met)
    assert [read.holds(value) for value in unmet] == [False] * len(unmet)


def test_a_long_text_is_shown_short() -> None:
    assert str(Condition("v", "==", "x" * 81)) == f'v == "{"x" * 80}..."'


def test_its_variable_is_one_of_those_that_the_call_waits_for() -> None:
    when = Condition("v", "==", "x")
    assert with_condition(("a",), None) == ("a",)
    assert with_condition(("a",), when) == ("a", "v")
    assert with_condition(("v", "a"), when) == ("v", "a")


def test_it_is_an_annotation() -> None:
    headers = [(b"plait-session", b"s"), (b"plait-when", b'verdict == "yes"')]
    expected = Condition("verdict", "==", "yes")
    assert read_annotations(headers, None).when == expected
    assert read_annotations((), {"when": 'verdict == "yes"'}).when == expected
    with pytest.raises(CallerError) as caught:
        read_annotations([(b"plait-when", b"verdict = yes")], None)
    assert caught.value.param == "plait-when"
    assert 'it must be NAME == "TEXT"' in caught.value.message
