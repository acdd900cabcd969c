"""The shared prefixes of the comparison's calls: long documents and tool lists, built-in or of LooGLE and ToolBench."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from plait.lab.simulation.builtin_prompts import catalogues, manuals

Kind = Literal["document", "tools"]

LOOGLE_FILES = "loogle/*.jsonl"
TOOLBENCH_FILES = "toolbench/toolev_*.json"
"""The files of a traces folder."""

OUTPUT_TOKENS: dict[Kind, tuple[int, float]] = {"document": (16, 9.9), "tools": (43, 16.0)}
"""Mean and standard deviation of a call's output length in LooGLE and ToolBench (Preble, table 1)."""

_SYSTEM: dict[Kind, str] = {
    "document": "You answer questions about a document. Answer briefly and only from the document.",
    "tools": "You solve the user's task with the functions you are given. Call one function at a time, with the "
    "arguments its description asks for, and say so when no function fits the task.",
}


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The subject of repeated questions: a document, which is text, or a list of tools.

    Its calls share the prefix `messages_for("")`, rendered with `tools`.
    """

    name: str
    kind: Kind
    text: str
    tools: tuple[dict[str, Any], ...]
    questions: tuple[str, ...]
    mean_output_tokens: int

    def __post_init__(self) -> None:
        if not self.questions:
            raise ValueError(f"nothing is asked about {self.name}: a shared prefix needs at least one question")

    def messages_for(self, question: str) -> list[dict[str, str]]:
        """The chat messages that ask `question`, shared part first."""
        content = f"{self.text}\n\nQuestion: {question}" if self.text else question
        return [{"role": "system", "content": _SYSTEM[self.kind]}, {"role": "user", "content": content}]


def load_prefixes(traces: Path | None) -> list[SharedPrefix]:
    """The shared prefixes of a folder with `loogle/*.jsonl` and `toolbench/toolev_*.json`; for None, the built-in ones.

    Raises ValueError if the folder lacks one of the data sets, or if a file does not have the data set's format.
    """
    if traces is None:
        return _builtin()
    documents, tool_lists = sorted(traces.glob(LOOGLE_FILES)), sorted(traces.glob(TOOLBENCH_FILES))
    missing = [name for name, found in ((LOOGLE_FILES, documents), (TOOLBENCH_FILES, tool_lists)) if not found]
    if missing:
        raise ValueError(f"{traces} holds no file {' and no file '.join(missing)}: pass the folder that holds them")
    return [*_loogle(documents), *_toolbench(tool_lists)]


def _document(name: str, text: str, questions: Sequence[str]) -> SharedPrefix:
    return SharedPrefix(name, "document", text, (), tuple(questions), OUTPUT_TOKENS["document"][0])


def _tool_list(name: str, tools: Sequence[dict[str, Any]], questions: Sequence[str]) -> SharedPrefix:
    return SharedPrefix(name, "tools", "", tuple(tools), tuple(questions), OUTPUT_TOKENS["tools"][0])


def _builtin() -> list[SharedPrefix]:
    return [
        *(_document(manual.title, manual.text, manual.questions) for manual in manuals()),
        *(_tool_list(catalogue.title, catalogue.tools, catalogue.questions) for catalogue in catalogues()),
    ]


class _LongDocument(msgspec.Struct):
    """A line of a LooGLE file; `qa_pairs` is a Python literal: a list of dicts with the question under Q."""

    input: str
    title: str
    qa_pairs: str


class _Parameters(msgspec.Struct):
    """ToolBench's parameters: nearly JSON Schema. They have `optional` beside `required`; `optional` is not read."""

    properties: dict[str, dict[str, Any]] = {}
    required: list[str] = []


class _Function(msgspec.Struct):
    name: str
    description: str
    parameters: _Parameters


class _ToolQuery(msgspec.Struct):
    """An entry of a ToolBench evaluation set."""

    query: str
    available_tools: list[_Function]


_LOOGLE_LINE = msgspec.json.Decoder(_LongDocument)
_TOOLBENCH_FILE = msgspec.json.Decoder(dict[str, _ToolQuery])
_JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})


def _loogle(paths: Sequence[Path]) -> Iterator[SharedPrefix]:
    """The documents of LooGLE files. A document that occurs several times is one document with all its questions."""
    questions: dict[tuple[str, str], dict[str, None]] = {}
    for path in paths:
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                row = _LOOGLE_LINE.decode(line)
                asked = [str(pair["Q"]).strip() for pair in ast.literal_eval(row.qa_pairs)]
            except (ValueError, SyntaxError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: not a document with questions ({error})") from error
            questions.setdefault((row.title, row.input), {}).update(dict.fromkeys(asked))
    for number, ((title, text), asked_once) in enumerate(questions.items(), start=1):
        if asked_once:
            yield _document(f"loogle {number}: {title}", text, list(asked_once))


def _toolbench(paths: Sequence[Path]) -> Iterator[SharedPrefix]:
    """The tool lists of ToolBench files. Entries with equal lists are one prefix with all their queries."""
    lists: dict[bytes, tuple[str, list[dict[str, Any]], dict[str, None]]] = {}
    for path in paths:
        try:
            entries = _TOOLBENCH_FILE.decode(path.read_bytes())
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}: not a set of queries with their tools ({error})") from error
        for entry_id, entry in entries.items():
            by_name = {function.name: function for function in entry.available_tools}  # names must be unique
            tools = [_openai_tool(function) for function in by_name.values()]
            name = f"{path.stem} {entry_id}"
            _, _, queries = lists.setdefault(msgspec.json.encode(tools), (name, tools, {}))
            queries[entry.query.strip()] = None
    return (_tool_list(name, tools, list(queries)) for name, tools, queries in lists.values() if tools)


def _openai_tool(function: _Function) -> dict[str, Any]:
    """A ToolBench function as an element of OpenAI's `tools` array."""
    properties = {name: _json_schema(schema) for name, schema in function.parameters.properties.items()}
    required = [name for name in function.parameters.required if name in properties]
    parameters = {"type": "object", "properties": properties, "required": required}
    tool = {"name": function.name, "description": function.description, "parameters": parameters}
    return {"type": "function", "function": tool}


def _json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A ToolBench property without the keys that JSON Schema does not know; `example_value` becomes `examples`."""
    kept: dict[str, Any] = {key: schema[key] for key in ("type", "description", "enum") if key in schema}
    if kept.get("type") not in _JSON_TYPES:
        kept.pop("type", None)
    if "example_value" in schema:
        kept["examples"] = [schema["example_value"]]
    return kept
