"""The one integer in a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.guests.programs.transforms.chains import applied, refusal


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        ("42", "42"),
        ("The answer is 42.", "42"),
        ("42. So it is **42**!", "42"),
        ("-7", "-7"),
        ("\u22127 degrees", "-7"),
        ("+7", "7"),
        ("-0", "0"),
        ("007", "7"),
        ("It costs $1,234,567.", "1234567"),
        ("-$1,000", "-1000"),
        ("1_000 and 1'000 and 1\u202f000 and 1000", "1000"),
        ("score=8/8", "8"),
        (r"\boxed{12}", "12"),
        ("80%", "80"),
        ("x86 gets it in the 2nd try (v1.2): 7", "7"),
        ("GPT-4", "4"),
        ("- 5", "5"),
        ("No.5", "5"),
        ("um...5", "5"),
        ("共有5个", "5"),
        ("1" * 10_000, "1" * 10_000),
    ],
)
def test_the_integer_is_found(text: str, integer: str) -> None:
    assert applied("integer", text) == integer


@given(st.integers())
def test_integers_as_python_writes_them(number: int) -> None:
    assert applied("integer", f"I count {number:,} of them.") == str(number)
    assert applied("integer", f"{number}") == str(number)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is no separate integer"),
        ("forty-two", "there is no separate integer"),
        ("2nd of x86 and 5kg", "there is no separate integer"),
        ("v1.2.3", "there is no separate integer"),
        ("3 or 4", "which of 2 integers is meant: 3, 4?"),
        ("10-20", "which of 2 integers is meant: 10, 20?"),
        ("7/10", "which of 2 integers is meant: 7, 10?"),
        ("5 or -5", "which of 2 integers is meant: 5, -5?"),
        ("1 2 3 4 5 6 7", "which of 7 integers is meant: 1, 2, 3, 4, 5 ...?"),
        ("4.5", '"4.5" is not an integer'),
        ("about .5", '".5" is not an integer'),
        ("7.0", '"7.0" is not an integer'),
        ("1.000", '"1.000" is not an integer'),
        ("1,23", '"1,23" is not an integer'),
        ("1,234'567", "is not an integer"),
        ("5, not 4.5", '"4.5" is not an integer'),
    ],
)
def test_no_integer_or_several_are_refused(text: str, reason: str) -> None:
    assert reason in refusal("integer", text)
