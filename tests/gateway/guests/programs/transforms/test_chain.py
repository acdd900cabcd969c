"""Chains: one step after another, what a failure says, and the limit on results."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from plait.backends.errors import PlaitError
from plait.gateway.guests.programs.transforms import MAX_RESULT_BYTES, Transform, TransformError, parse
from tests.gateway.guests.programs.transforms.chains import ANY_TEXT, CHAINS, FRAGMENTS, applied, outcome, refusal


def test_each_step_takes_what_the_one_before_made() -> None:
    completion = 'I would say:\n\n```json\n{"answer": " <n>1,200</n> "}\n```'
    assert (
        applied("code_block(json) | json($.answer) | xml(n) | integer | template('n={{value}}')", completion)
        == "n=1200"
    )


def test_a_failure_names_the_step_the_reason_and_the_text() -> None:
    with pytest.raises(TransformError) as caught:
        parse("strip | xml(n) | integer | strip").apply("  <n>twelve</n> ")
    error = caught.value
    assert isinstance(error, PlaitError)
    assert (error.step, error.reason, error.text) == (
        "integer",
        "there is no separate integer",
        "twelve",
    )
    assert error.message == 'transform integer: there is no separate integer; the text was "twelve"'
    assert json.loads(error.body())["error"]["code"] == "transform_failed"


def test_the_message_has_the_beginning_of_a_long_text() -> None:
    text = "line\n" * 100_000
    with pytest.raises(TransformError) as caught:
        parse(f"template('{'x' * 5000}{{{{value}}}}') | json").apply(text)
    assert len(caught.value.message) < 700
    assert caught.value.text.endswith(text)
    with pytest.raises(TransformError, match="the text was") as caught:
        parse(f"enum({'x' * 5000})").apply(text)
    assert len(caught.value.message) < 1000
    assert "\n" not in caught.value.message


@given(CHAINS, ANY_TEXT | FRAGMENTS)
def test_no_text_is_worse_than_a_transform_error(chain: Transform, text: str) -> None:
    result = outcome(chain, text)
    if isinstance(result, TransformError):
        assert json.loads(result.body())["error"]["message"].startswith("transform ")
        assert result.step in str(chain)
    else:
        assert result == chain.apply(text)
        assert result.encode() is not None, "no lone surrogates"


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    assert "half of a surrogate pair" in refusal("strip", "a\ud800")
    assert "half of a surrogate pair" in refusal("json", r'{"a": "\ud800"}')
    assert applied("json", r'["\ud83d\ude00"]') == '["😀"]'


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("template('{{value}}{{value}}')", "x" * (MAX_RESULT_BYTES // 2 + 1)),
        (f"template('{'{{value}}' * 1500}')", "é" * 100_000),
        (" | ".join(["template('{{value}}{{value}}')"] * 16), "x" * 64),
        ("strip", "x" * (MAX_RESULT_BYTES + 1)),
        ("json('$..*')", "[" * 60 + f'"{"x" * 50_000}"' + "]" * 60),
    ],
)
def test_no_result_exceeds_the_limit(spec: str, text: str) -> None:
    with pytest.raises(TransformError, match="the result is longer than 1,048,576 bytes"):
        parse(spec).apply(text)


def test_the_limit_counts_bytes_and_can_be_set() -> None:
    assert parse("strip").apply(" éé ", max_bytes=4) == "éé"
    with pytest.raises(TransformError, match="longer than 3 bytes"):
        parse("strip").apply("éé", max_bytes=3)
    assert parse("xml(a)").apply("<a>1</a>" + "x" * 1000, max_bytes=1) == "1", (
        "what is taken out of a text may be short"
    )
