"""The transform that extracts JSON from a text: the whole value, or the values that a path selects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from plait.gateway.transforms.json_path import compile_path, select
from plait.gateway.transforms.json_text import dump_json, find_json
from plait.gateway.transforms.step import Parameter, Step


@dataclass(frozen=True, slots=True)
class Json(Step):
    """The JSON value in a text, as compact JSON; with a path, the selected value or values.

    A path of only names and indexes selects one value; if that is a text, the result has no quotes. The result of any
    other path is a JSON array of any length.
    """

    name: ClassVar[str] = "json"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("path", required=False),)

    path: str | None = None

    def __post_init__(self) -> None:
        if self.path is not None:
            compile_path(self.path)

    def convert(self, text: str) -> Iterator[str]:
        """Fails if there is no valid JSON, if there is more than one value, or if a path to one value finds none."""
        document = find_json(text)
        if self.path is None:
            yield dump_json(document)
            return
        query = compile_path(self.path)
        values = select(query, document)
        if query.singular_query():
            yield values[0] if isinstance(values[0], str) else dump_json(values[0])
            return
        yield "["
        for position, value in enumerate(values):
            yield f",{dump_json(value)}" if position else dump_json(value)
        yield "]"
