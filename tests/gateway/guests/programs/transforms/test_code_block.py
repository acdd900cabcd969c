"""Fenced code blocks as models write them, and as CommonMark nests them."""

from __future__ import annotations

import pytest

from plait.gateway.guests.programs.transforms.code_block import fenced_blocks
from tests.gateway.guests.programs.transforms.chains import applied, refusal


@pytest.mark.parametrize(
    ("spec", "text", "code"),
    [
        ("code_block", "```\nx = 1\n```", "x = 1"),
        ("code_block(python)", "Sure!\n\n```python\nx = 1\n\nprint(x)\n```\n\nIt prints 1.", "x = 1\n\nprint(x)"),
        ("code_block", "```python\na\n```\n```js\nb\n```", "a"),
        ("code_block(js)", "```python\na\n```\n```js\nb\n```", "b"),
        ("code_block(py, python)", '```Python title="a.py"\na\n```', "a"),
        ("code_block", "~~~sh\nls\n~~~", "ls"),
        ("code_block", "````md\n```python\nx\n```\n````", "```python\nx\n```"),
        ("code_block(python)", "````md\n```python\ninner\n```\n````\n```python\nouter\n```", "outer"),
        ("code_block", "```\na\n````", "a"),
        ("code_block", "```\na\n~~~\nb\n```", "a\n~~~\nb"),
        ("code_block", "```\na\n``` not the end\nb\n```", "a\n``` not the end\nb"),
        ("code_block", "```x = 1```\n```\na\n```", "a"),
        ("code_block", "~~~ `a` ~b~\na\n~~~", "a"),
        ("code_block", "1. Do this:\n   ```python\n   if x:\n       y\n\n  z\n   ```\n", "if x:\n    y\n\nz"),
        ("code_block", "```\n```", ""),
        ("code_block", "```\n\n```", ""),
        ("code_block", "```python\r\na\r\nb\r\n```\r\n", "a\r\nb"),
        ("code_block", "```\na\n```   \n", "a"),
    ],
)
def test_the_code_is_taken_without_its_fences(spec: str, text: str, code: str) -> None:
    assert applied(spec, text) == code


@pytest.mark.parametrize(
    ("spec", "text", "reason"),
    [
        ("code_block", "x = 1", "there is no code block"),
        ("code_block", "Use `x` or ``` for fences", "there is no code block"),
        (
            "code_block(python)",
            "x\n```js\na\n```\n```\nb\n```",
            "python, only js at line 2, column 1, one without a language",
        ),
        ("code_block(rust)", "```a\n```\n" * 9, "rust, only a at line 1, column 1"),
        ("code_block", "Here:\n```python\nx = (", "line 2, column 1 is not closed; was the text cut off?"),
        ("code_block", "````\na\n```", "is not closed"),
    ],
)
def test_a_text_without_the_block_is_refused(spec: str, text: str, reason: str) -> None:
    assert reason in refusal(spec, text)


def test_blocks_know_where_they_are() -> None:
    text = "a\n```json\n{}\n```\n  ~~~\n"
    first, last = fenced_blocks(text)
    assert (first.language, text[first.start : first.end], first.closed) == ("json", "{}\n", True)
    assert (last.language, last.indent, text[last.start : last.end], last.closed) == ("", "  ", "", False)
