"""What the tests of transforms share: shorthands, and strategies for specifications and texts."""

from __future__ import annotations

import json

import pytest
from hypothesis import strategies as st

from plait.gateway.guests.programs.transforms import Transform, TransformError, TransformSpecError, parse

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=60)
"""Lone surrogates too, which no encoder takes."""

TEXT = st.text(max_size=20)

# What models write, and what transforms look for, in any order.
FRAGMENTS = st.lists(
    st.sampled_from(
        [
            *("```", "~~~~", "```json", "```python", "\n", " ", "\t", '"', "\\", "'", ",", "."),
            *("{", "}", "[", "]", ":", '{"a": [1, {"b": null}]}', '"a"', "1", "-1,234", "1e9", "NaN", "\\ud800"),
            *(
                "<a>",
                "</a>",
                "<a/>",
                "<a ",
                ">",
                "- x",
                "1. x",
                "* * *",
                "yes",
                "No",
                "red",
                "{{value}}",
                "é",
                "\ud800",
            ),
        ]
    ),
    max_size=12,
).map("".join)

_WORD = st.from_regex(r"[a-z]{1,5}", fullmatch=True)

PATHS = st.sampled_from(
    [
        *("$", "$.a", "$.a[1].b", "$[0]", "$['a b']", "$.*", "$..b", "$..*", "$[-1]", "$[1:]", "$['a','b']"),
        *("$.a[?@.b == null]", "$..[?@.b || @ > 0]", "$[?length(@) > 1 && count(@.b) == 0]", "$[?@.a < $.a]"),
    ]
)

PATTERNS = st.sampled_from(["a", r"(\d+)", r"(a)|b", "(?P<x>.)(?P<y>.)?", "", "(?s)(.*)x", "^\\s*$"])

ENTRIES = st.one_of(
    st.sampled_from([{"name": "strip"}, {"name": "integer"}, {"name": "code_block"}, {"name": "json"}]),
    st.sampled_from([{"name": "boolean"}, {"name": "boolean", "true": "ja", "false": "nein"}]),
    st.builds(lambda languages: {"name": "code_block", "languages": languages}, st.lists(_WORD, min_size=1)),
    st.builds(lambda path: {"name": "json", "path": path}, PATHS),
    st.builds(lambda pattern: {"name": "regex", "pattern": pattern, "group": 0}, PATTERNS),
    st.just({"name": "regex", "pattern": "(?P<x>.)(?P<y>b)?", "group": "*"}),
    st.builds(lambda style: {"name": "list", "style": style}, st.sampled_from(["comma", "numbered", "bulleted"])),
    st.builds(lambda tag: {"name": "xml", "tag": tag}, _WORD),
    st.builds(
        lambda options, ignore_case: {"name": "enum", "options": options, "ignore_case": ignore_case},
        st.lists(TEXT.map(str.strip).filter(bool), min_size=1, max_size=4, unique_by=str.casefold),
        st.booleans(),
    ),
    st.builds(lambda before, after: {"name": "template", "text": f"{before}{{{{value}}}}{after}"}, TEXT, TEXT),
)


def written(entry: dict[str, object]) -> str:
    """A step with its parameters by name, but for lists."""
    given = list[str]()
    for name, value in entry.items():
        if isinstance(value, list):
            given += map(json.dumps, value)
        elif name != "name":
            given.append(f"{name}={json.dumps(value if isinstance(value, bool) else str(value))}")
    return f"{entry['name']}({', '.join(given)})"


CHAINS = st.lists(ENTRIES.map(written), min_size=1, max_size=4).map(" | ".join).map(parse)
"""Valid chains of all transforms, with any texts where a parameter takes any."""


def applied(spec: str, text: str) -> str:
    return parse(spec).apply(text)


def refusal(spec: str, text: str) -> str:
    """Why the text is not taken."""
    with pytest.raises(TransformError) as caught:
        parse(spec).apply(text)
    assert caught.value.text == text
    assert caught.value.status == 422
    return caught.value.reason


def outcome(chain: Transform, text: str) -> str | TransformError:
    """What comes of a text; anything else that is raised fails the test."""
    try:
        return chain.apply(text)
    except TransformError as error:
        return error


def parsed(spec: str) -> Transform | TransformSpecError:
    """What comes of a specification; anything else that is raised fails the test."""
    try:
        return parse(spec)
    except TransformSpecError as error:
        return error
