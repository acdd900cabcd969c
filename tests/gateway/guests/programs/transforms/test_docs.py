"""Every example of docs/transforms.md does what the page says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from plait.gateway.guests.programs.transforms import TransformError, TransformSpecError, parse
from plait.gateway.guests.programs.transforms.binding import STEPS
from tests.source_tree import ROOT

PAGE = (ROOT / "docs" / "transforms.md").read_text(encoding="utf-8")


def examples() -> Iterator[dict[str, str]]:
    """The fields of each example: examples are separated by blank lines, fields are lines of `name: value`."""
    for block in re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for example in block.strip().split("\n\n"):
            yield {name: value.strip() for name, _, value in (line.partition(":") for line in example.split("\n"))}


EXAMPLES = list(examples())


@pytest.mark.parametrize("example", EXAMPLES, ids=[example["spec"] for example in EXAMPLES])
def test_an_example_holds(example: dict[str, str]) -> None:
    match example:
        case {"spec": spec, "text": text, "result": result}:
            assert parse(spec).apply(json.loads(text)) == json.loads(result)
        case {"spec": spec, "text": text, "refused": reason}:
            with pytest.raises(TransformError, match=re.escape(reason)):
                parse(spec).apply(json.loads(text))
        case {"spec": spec, "fault": fault}:
            with pytest.raises(TransformSpecError, match=re.escape(fault)):
                parse(spec)
        case _:
            pytest.fail("an example is a spec and a fault, or a spec, a text and a result or why it is refused")


def test_every_transform_has_a_section_with_examples() -> None:
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    for name in STEPS:
        assert f"spec:   {name}" in sections[name]
        assert f"[`{name}`](#{name})" in PAGE


def test_what_is_named_for_each_output_parser_is_a_specification() -> None:
    table = PAGE.partition("## Coming from LangChain")[2]
    named = [
        name
        for _, right in re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
        for name in re.findall("`(.*?)`", right)
    ]
    assert len(named) > 10
    for spec in named:
        if spec != "response_format":
            parse(spec)
