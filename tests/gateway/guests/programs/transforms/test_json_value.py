"""JSON in texts as models write it, and what paths find in it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.guests.programs.transforms.json_value import MAX_DEPTH
from tests.gateway.guests.programs.transforms.chains import applied, refusal

DOCUMENT = """{
  "items": [
    {"name": "apple", "price": 1.5, "tags": ["red", "round"]},
    {"name": "pear", "price": 2, "tags": []}
  ],
  "total": 3.5, "paid": true, "note": null, "größe": "groß"
}"""

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ('{"a": 1}', '{"a":1}'),
        (' [1, 2.50, "x y"]\n', '[1,2.5,"x y"]'),
        ('"text"', '"text"'),
        ("true", "true"),
        (r'{"a": "\u00e9\n"}', r'{"a":"é\n"}'),
        ('```json\n{"a": 1}\n```', '{"a":1}'),
        ("```\n[1]\n```", "[1]"),
        ('Here you are:\n\n```json\n{"a": "[x]"}\n```\n\nNote [1]: {b} is left out.', '{"a":"[x]"}'),
        ('```python\nx = {}\n```\n```JSON\n{"a": 1}\n```\n```\nnone\n```', '{"a":1}'),
        ('```json\n{"a": 1}', '{"a":1}'),
        ('Sure! {"a": "}"} Anything else?', '{"a":"}"}'),
        ('{"a": 1}\n\nHope this helps!', '{"a":1}'),
        ("The list is [1, [2]].", "[1,[2]]"),
        ('{"code": "```py\\nx\\n```"}', '{"code":"```py\\nx\\n```"}'),
        ('{"a": 1, "a": 2}', '{"a":2}'),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, "[" * MAX_DEPTH + "]" * MAX_DEPTH),
        ('["' + "[" * 100 + '"]', '["' + "[" * 100 + '"]'),
        ("[12345678901234567890123]", "[12345678901234567890123]"),
    ],
)
def test_json_is_found_and_made_compact(text: str, result: str) -> None:
    assert applied("json", text) == result


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is no JSON object or array"),
        ("The answer is 42.", "there is no JSON object or array"),
        ('{"a": 1,\n "b": }', "line 2, column 7, near"),
        ("{'a': 1}", "in double quotes at line 1, column 2"),
        ('{"a": 1', "line 1, column 8"),
        ('Well:\n```json\n{"a": 1\n "b": 2}\n```', "line 4, column 2"),
        ('```json\n{"a": 1}\n{"b": 2}\n```', "more text follows the JSON value at line 3, column 1"),
        ("```json\n1\n```\n```json\n2\n```", "which of the 2 code blocks is meant? Put code_block(json) before"),
        ("```\n1\n```\n```\n2\n```", "Put code_block before"),
        ('{"a": 1} {"a": 2}', "the one at line 1, column 1 or the one at line 1, column 10"),
        ("Use [x] here: {}", "line 1, column 6"),
        ('{"a": NaN}', "NaN is not a JSON value"),
        ("[-Infinity]", "-Infinity is not a JSON value"),
        ("[1e999]", "too large: 1e999"),
        (f"[{'1' * 5000}]", "an integer of thousands of digits"),
        ('["a\nb"]', "line 1, column 4"),
        ("[" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} objects and arrays within each other at line 1, column 65"),
    ],
)
def test_a_text_without_one_valid_value_is_refused(text: str, reason: str) -> None:
    assert reason in refusal("json", text)


@given(VALUES)
def test_any_json_is_itself(value: object) -> None:
    assert json.loads(applied("json", json.dumps(value, indent=1))) == value
    assert json.loads(applied("json", f"Here:\n~~~json\n{json.dumps(value)}\n~~~\n[ok]")) == value


@pytest.mark.parametrize(
    ("path", "result"),
    [
        ("$.items[0].name", "apple"),
        ("$.items[-1].price", "2"),
        ("$.total", "3.5"),
        ("$.paid", "true"),
        ("$.note", "null"),
        ("$.größe", "groß"),
        ("$['größe']", "groß"),
        ("$.items[1]", '{"name":"pear","price":2,"tags":[]}'),
        ("$.items[*].name", '["apple","pear"]'),
        ("$..tags", '[["red","round"],[]]'),
        ("$.items[1:]['name','price']", '["pear",2]'),
        ("$.items[?@.price > 1.7 && length(@.tags) == 0].name", '["pear"]'),
        ("$.items[?@.price < $.total].name", '["apple","pear"]'),
        ("$.items[?count(@.tags) == 1 && value(@.name) != 'pear'].name", '["apple"]'),
        ("$.items[?@.price > 100]", "[]"),
        ("$.missing[*]", "[]"),
    ],
)
def test_a_path_takes_what_it_leads_to(path: str, result: str) -> None:
    assert applied(f'json("{path}")', DOCUMENT) == result
    assert applied(f'json("{path}")', f"Sure!\n```json\n{DOCUMENT}\n```") == result


def test_the_path_of_the_whole_takes_the_quotes_off_a_text() -> None:
    assert applied("json($)", '"text"') == "text"
    assert applied("json", '"text"') == '"text"'


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("$.itms", 'ends at $, which is an object with "items", "total", "paid", "note", "größe"'),
        ("$.items[2].name", "ends at $['items'], which is an array of 2"),
        ("$.items[0].name.first", "ends at $['items'][0]['name'], which is neither an object nor an array"),
    ],
)
def test_a_path_to_nothing_says_where_it_ends(path: str, reason: str) -> None:
    assert reason in refusal(f"json({path})", DOCUMENT)


def test_an_object_of_many_keys_is_not_listed_whole() -> None:
    assert refusal("json($.x)", json.dumps({str(key): 0 for key in range(1000)})).endswith('"9" and more')
    assert "an empty object" in refusal("json($.x)", "{}")
