"""Regular expressions: which group is taken, and that no pattern takes longer than linear time."""

from __future__ import annotations

import json

import pytest

from plait.gateway.guests.programs.transforms import TransformSpecError, parse
from tests.gateway.guests.programs.transforms.chains import applied, refusal


@pytest.mark.parametrize(
    ("spec", "text", "result"),
    [
        (r"regex('\d+')", "about 12 or 13", "12"),
        (r"regex('score: (\d+)')", "My score: 8/10", "8"),
        (r"regex('score: (\d+)', 0)", "My score: 8/10", "score: 8"),
        (r"regex('(\d+)/(\d+)', 2)", "My score: 8/10", "10"),
        (r"regex('(?P<score>\d+)/(?P<of>\d+)', of)", "My score: 8/10", "10"),
        (r"regex('(?P<score>\d+)(?:/(?P<of>\d+))?', *)", "My score: 8/10", '{"score":"8","of":"10"}'),
        (r"regex('(?P<score>\d+)(?:/(?P<of>\d+))?', *)", "My score: 8", '{"score":"8","of":null}'),
        ("regex('(?s)Thought: (.*?)Action:')", "Thought: a\nb\nAction: c", "a\nb\n"),
        ("regex('(?m)^Final: (.*)$')", "x\nFinal: yes\nz", "yes"),
        ("regex('(?i)größe: (.)')", "😀 GRÖßE: é", "é"),
        ("regex('')", "abc", ""),
        ("regex('(a*)')", "b", ""),
    ],
)
def test_the_first_match_gives_the_group(spec: str, text: str, result: str) -> None:
    assert applied(spec, text) == result


@pytest.mark.parametrize(
    ("spec", "text", "reason"),
    [
        (r"regex('\d+')", "none", "the pattern matches nowhere"),
        ("regex('a.b')", "a\nb", "the pattern matches nowhere"),
        ("regex('(a)|b', 1)", "b", "group 1 takes no part"),
        ("regex('(?P<x>a)|b', x)", "b", "group x takes no part"),
        ("regex('(?s).{200}.{200}(x)')", "a" * 200_000, "longer than the"),
    ],
)
def test_a_text_that_does_not_match_is_refused(spec: str, text: str, reason: str) -> None:
    assert reason in refusal(spec, text)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a)\1",
        "a(?=b)",
        "(?<!a)b",
        "(?>a)",
        "a{2000}",
        r"((\pL{1,50}){1,20}){1,20}",
        "(" * 2000 + ")" * 2000,
        "()" * 21,
    ],
)
def test_what_linear_time_does_not_allow_is_refused_when_it_is_read(pattern: str) -> None:
    with pytest.raises(TransformSpecError):
        parse(f"regex({json.dumps(pattern)}, 0)")


def test_the_engine_keeps_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TransformSpecError):
        parse("regex('(')")
    assert capfd.readouterr() == ("", "")
