"""Every transform finishes on long texts that make naive ones take quadratic or exponential time."""

from __future__ import annotations

import json

import pytest

from plait.gateway.guests.programs.transforms import MAX_RESULT_BYTES, TransformError, parse
from tests.gateway.guests.programs.transforms.chains import outcome

N = 200_000

TEXTS = {
    "brackets": "[" * N,
    "braces": '{"a":' * (N // 5),
    "array": f"[{'[1],' * (N // 4)}0]",
    "deep array": "[" * 60 + f"1{',[1]' * (N // 4)}" + "]" * 60,
    "long key": json.dumps({"k" * (N // 2): [0] * (N // 6)}),
    "quotes": '"' * N,
    "escaped quotes": r"\"" * (N // 2),
    "unclosed string": '["' + r"\"" * (N // 2),
    "open tags": "<a>" * (N // 3),
    "tags cut off": "<a " * (N // 3),
    "closing tags": "</a>" * (N // 4),
    "fences": "```py\n" * (N // 6),
    "backticks": "`" * N + "x`",
    "blank lines": "\n" * N,
    "spaces": " " * N + "x",
    "tabs and a fence": "\t" * N + "```",
    "digits": "1" * N,
    "groups of digits": "1,234" * (N // 5),
    "points": "." * N,
    "signs": "-" * N,
    "commas": "," * N,
    "bullets": "- " * (N // 2),
    "one letter": "a" * N,
    "words": "yes no " * (N // 7),
}

SPECS = [
    *("strip", "code_block", "code_block(py)", "json", "json($)", "json($[0])", "json($..a)", "json($..*)"),
    *("json('$..[?@.a == 1 || @ == $[0]]')", "list(comma)", "list(numbered)", "list(bulleted)", "xml(a)"),
    *("boolean", "integer", "enum(a, b, ignore_case=true)", "template('{{value}}{{value}}{{value}}')"),
    *("regex('(a+)+$')", "regex('(a|a)*b')", r"regex('^(\s*\S*)*$')", "regex('(.*)(.*)(.*)(.*)x', 1)"),
    *("regex('(?:a?){200}a{200}')", "regex('(x+x+)+y')"),
]


@pytest.mark.parametrize("spec", SPECS)
def test_long_texts_are_answered(spec: str) -> None:
    chain = parse(spec)
    for name, text in TEXTS.items():
        result = outcome(chain, text)
        if isinstance(result, TransformError):
            assert result.text == text, name
        else:
            assert len(result) <= MAX_RESULT_BYTES, name


def test_many_steps_and_many_options() -> None:
    chain = parse(" | ".join(["strip"] * 15) + f" | enum({', '.join(map(str, range(2000)))})")
    assert chain.apply(" " * N + "1999") == "1999"
