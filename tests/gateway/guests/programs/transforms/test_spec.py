"""The language of specifications: what it means, its canonical form, and what is said about mistakes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from plait.backends.errors import CallerError
from plait.gateway.guests.programs.transforms import Transform, TransformSpecError, parse
from tests.gateway.guests.programs.transforms.chains import ANY_TEXT, CHAINS, parsed


def fault(spec: str) -> TransformSpecError:
    with pytest.raises(TransformSpecError) as caught:
        parse(spec)
    assert isinstance(caught.value, CallerError)
    assert isinstance(caught.value, ValueError)
    assert caught.value.message in json.loads(caught.value.body())["error"]["message"]
    return caught.value


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("strip", "strip"),
        ("  strip ( ) ", "strip"),
        ("strip|integer", "strip | integer"),
        ("code_block( Python , py )", "code_block(python, py)"),
        ("json($.items[0].name)", "json($.items[0].name)"),
        ("json(\"$['a b']\")", "json(\"$['a b']\")"),
        (r'regex("score: (\\d+)", 1)', r'regex("score: (\\d+)", 1)'),
        (r"regex('score: (\d+)')", r'regex("score: (\\d+)")'),
        ("regex(group=1, pattern='(a)')", 'regex("(a)", 1)'),
        ("list(comma)", "list(comma)"),
        ("boolean(ja, nein)", "boolean(ja, nein)"),
        ("enum(red, dark green, ignore_case=true)", "enum(red, dark green, ignore_case=true)"),
        ("enum(red, ignore_case = false)", "enum(red)"),
        ("enum(options=red)", "enum(red)"),
        ("enum(a!b)", 'enum("a!b")'),
        ('enum("a, b", \'it is "c"\')', r'enum("a, b", "it is \"c\"")'),
        (r'enum("\u0434\u0430", нет)', "enum(да, нет)"),
        ("template('a | b: {{value}}') | strip", 'template("a | b: {{value}}") | strip'),
        ('template("{{value}}\n")', r'template("{{value}}\n")'),
        ("xml\t(answer)\n|\nstrip", "xml(answer) | strip"),
    ],
)
def test_the_canonical_form_says_the_same(spec: str, canonical: str) -> None:
    assert str(parse(spec)) == canonical
    assert parse(canonical) == parse(spec)
    assert hash(parse(canonical)) == hash(parse(spec))


@given(CHAINS)
def test_every_chain_survives_being_written_and_read(chain: Transform) -> None:
    assert parse(str(chain)) == chain
    assert str(parse(str(chain))) == str(chain)


@given(ANY_TEXT)
def test_no_text_is_worse_than_a_fault(spec: str) -> None:
    result = parsed(spec)
    if isinstance(result, TransformSpecError):
        assert 0 <= result.position <= len(spec)
        assert result.body()
    else:
        assert parse(str(result)) == result


@pytest.mark.parametrize(
    ("spec", "position", "expected", "nearest"),
    [
        ("", 0, "one of strip, code_block", None),
        ("strip |", 7, "one of strip, code_block", None),
        ("strip | jsn", 8, "one of strip, code_block", "json"),
        ("codeblock(python)", 0, "one of", "code_block"),
        ("strip json", 6, '"|"', None),
        ("strip)", 5, '"|"', None),
        ("enum(", 5, "a value", None),
        ("enum(red", 8, 'a comma or ")"', None),
        ("enum(red,)", 9, "a value", None),
        ("enum(red, , blue)", 10, "a value", None),
        ("enum(red (dark))", 9, "quotes", None),
        ("enum(don't)", 8, "quotes", None),
        ("enum('red' or)", 11, 'a comma or ")"', None),
        ("enum('red)", 5, "' after the value", None),
        ('enum("red)', 5, "a string as JSON has it", None),
        (r'regex("\d")', 7, "between single quotes", None),
        ("strip(left)", 6, "none", None),
        ("xml(a, b)", 7, "1 at most", None),
        ("xml()", 5, "tag", None),
        ("list(bullet)", 5, "comma, numbered or bulleted", "bulleted"),
        ("enum(a, ignorecase=true)", 19, "options or ignore_case", "ignore_case"),
        ("enum(a, ignore_case=yes)", 20, "true or false", None),
        ("regex(a, pattern=b)", 17, "each parameter once", None),
        ('regex("(")', 6, "RE2's syntax", None),
        (r"regex('(a)\1')", 6, "no backreferences", None),
        ("regex('(a)(b)')", 0, "a number from 0 to 2", None),
        ("regex('(?P<x>a)(b)', y)", 21, "x or *", None),
        ("regex(a, 1)", 9, "a number from 0 to 0", None),
        ("regex('(a)', *)", 13, "(?P<name>...)", None),
        ("json(name)", 5, "RFC 9535", None),
        ("xml(<answer>)", 4, "without < and >", None),
        ("boolean(yes)", 0, "one for true and one for false", None),
        ("boolean(yes, YES)", 13, "a different word", None),
        ("boolean(yes, no way)", 13, "one word", None),
        ("enum(a, A, ignore_case=true)", 5, "each option once", None),
        ("enum(' a')", 5, "white space", None),
        ("template(Summary)", 9, "{{value}}", None),
        ("code_block('')", 11, "one word", None),
        ('enum("\\ud800")', 5, "Unicode", None),
        (" | ".join(["strip"] * 17), 0, "16 at most", None),
        (f"enum({'a' * 20_000})", 0, "16,384 at most", None),
        (f"enum('{chr(92) * 16_000}')", 0, "16,384 at most", None),
    ],
)
def test_a_fault_says_where_and_what_belongs_there(
    spec: str, position: int, expected: str, nearest: str | None
) -> None:
    error = fault(spec)
    assert (error.position, error.nearest) == (position, nearest)
    assert expected in error.expected
    assert f"character {position + 1}:" in error.message
    assert error.expected in error.message
    assert nearest is None or f"did you mean {nearest}?" in error.message


def test_a_chain_has_sixteen_transforms_at_most() -> None:
    assert len(parse(" | ".join(["strip"] * 16)).steps) == 16
