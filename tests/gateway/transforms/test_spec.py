"""The language of specifications: what it means, its canonical form, and what is said about mistakes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import CallerError
from plait.gateway.transforms import Transform, TransformSpecError, parse
from tests.gateway.transforms.chains import ANY_TEXT, CHAINS, parsed


def fault(spec: str | list[object]) -> TransformSpecError:
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


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        (["strip"], "strip"),
        (["strip | json", "list(comma)"], "strip | json | list(comma)"),
        ([{"name": "strip"}, "integer"], "strip | integer"),
        ([{"name": "regex", "pattern": "(a)(b)", "group": 2}], 'regex("(a)(b)", 2)'),
        ([{"name": "code_block", "languages": ["python", "py"]}], "code_block(python, py)"),
        ([{"name": "code_block", "languages": None}], "code_block"),
        ([{"name": "enum", "options": ["a", "b, c", 3], "ignore_case": True}], 'enum(a, "b, c", 3, ignore_case=true)'),
        ([{"name": "enum", "options": "a", "ignore_case": False}], "enum(a)"),
    ],
)
def test_a_list_says_the_same_as_a_text(spec: list[object], same: str) -> None:
    assert parse(spec) == parse(same)


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


ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT, lambda inner: st.lists(inner, max_size=3)
)
NAMES = st.sampled_from(
    ["strip", "code_block", "json", "regex", "list", "xml", "boolean", "integer", "enum", "template", "name", "x"]
)
PARAMETERS = st.sampled_from(
    ["languages", "path", "pattern", "group", "style", "tag", "true", "false", "options", "ignore_case", "text", "x"]
)


@given(st.lists(st.dictionaries(PARAMETERS, ARGUMENTS, max_size=3) | ARGUMENTS, max_size=2), NAMES)
def test_no_list_is_worse_than_a_fault(entries: list[object], name: str) -> None:
    named = [{"name": name, **entry} if isinstance(entry, dict) else entry for entry in entries]
    result = parsed(named)
    if isinstance(result, TransformSpecError):
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
    assert (error.position, error.nearest, error.entry) == (position, nearest, None)
    assert expected in error.expected
    assert f"character {position + 1}:" in error.message
    assert error.expected in error.message
    assert nearest is None or f"did you mean {nearest}?" in error.message


@pytest.mark.parametrize(
    ("spec", "entry", "position", "expected"),
    [
        (["strip", "strip | x"], 1, 8, "one of"),
        (["strip", 3], 1, 0, "a text, or an object"),
        ([{"pattern": "a"}], 0, 0, 'the "name" of a transform'),
        ([{"name": ["strip"]}], 0, 0, 'the "name" of a transform'),
        ([{"name": "list"}], 0, 0, "style"),
        ([{"name": "strip", "chars": "x"}], 0, 0, "none"),
        ([{"name": "regex", "pattern": ["a"]}], 0, 0, "text"),
        ([{"name": "regex", "pattern": True}], 0, 0, "text"),
        ([{"name": "enum", "options": []}], 0, 0, "a text or a list of texts"),
        ([{"name": "enum", "options": ["a"], "ignore_case": 1}], 0, 0, "true or false"),
        ([{"name": "enum", "options": [["a"]]}], 0, 0, "text"),
        ([{"name": "enum", "options": list(map(str, range(10_000)))}], 0, 0, "16,384 at most"),
        ([{"name": "template", "text": "{{value}}" * 2000}], 0, 0, "16,384 at most"),
    ],
)
def test_a_fault_in_a_list_says_which_entry(spec: list[object], entry: int, position: int, expected: str) -> None:
    error = fault(spec)
    assert (error.entry, error.position) == (entry, position)
    assert f"entry {entry + 1}, " in error.message
    assert expected in error.expected


def test_a_list_has_one_to_sixteen_transforms() -> None:
    assert "at least one" in fault([]).expected
    assert "16 at most" in fault(["strip"] * 17).expected
    assert "16 at most" in fault(["strip | strip"] * 9).expected
    assert len(parse(["strip"] * 16).steps) == 16
