"""The workload for comparing placement policies: repeated questions about long documents and tool lists.

Its shape is Preble's (table 1 and section 4.1). A call has a long shared part, a short question and a short answer. The
popularity of the shared parts follows Zipf's law. Calls arrive as a Poisson process. The shared parts come from the
LooGLE and ToolBench data sets if the caller has them, and from `builtin_prompts` otherwise. Everything here is a pure
function of its arguments and of the files read: the same seed gives the same workload.
"""

from __future__ import annotations

import ast
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import msgspec

from plait.gateway.simulation.builtin_prompts import catalogues, manuals

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


@dataclass(frozen=True, slots=True)
class WorkloadCall:
    """One chat-completion call to be sent. `prefix` is the name of its shared prefix."""

    prefix: str
    messages: list[dict[str, str]]
    tools: list[dict[str, Any]] | None
    max_tokens: int


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


def select_working_set(
    prefixes: Sequence[SharedPrefix], token_count: Callable[[SharedPrefix], int], target_tokens: int, seed: int
) -> list[SharedPrefix]:
    """A seeded subset whose shared parts sum to nearly `target_tokens`, in the order of `prefixes`.

    `token_count` gives the tokens of a prefix's shared part and is called once for each. Documents and tool lists get
    half of the target each. If one kind cannot fill its half, the other kind may. If all prefixes together do not reach
    the target, all are returned. If even the smallest exceeds it, only the smallest is returned.
    """
    tokens = [token_count(prefix) for prefix in prefixes]
    order = _stream("working set", seed).sample(range(len(prefixes)), len(prefixes))
    kinds = sorted({prefix.kind for prefix in prefixes})  # documents first: tool lists are finer, and fill what is left
    chosen: set[int] = set()
    left_tokens = target_tokens
    for n_kinds, kind in zip(range(len(kinds), 0, -1), kinds, strict=True):
        of_kind = [index for index in order if prefixes[index].kind == kind]
        left_tokens -= _take(of_kind, tokens, chosen, left_tokens // n_kinds, left_tokens)
    left_tokens -= _take(order, tokens, chosen, left_tokens, left_tokens)
    _close_gap(prefixes, tokens, chosen, left_tokens)
    return [prefix for index, prefix in enumerate(prefixes) if index in chosen]


def generate_calls(prefixes: Sequence[SharedPrefix], n_calls: int, seed: int, zipf: float = 1.1) -> list[WorkloadCall]:
    """`n_calls` calls on `prefixes`. A seeded order ranks the prefixes; rank r is drawn in proportion to `r ** -zipf`.

    A longer run with the same seed begins with the calls of the shorter one. Each call holds its whole prompt as text.
    """
    if not prefixes:
        raise ValueError("there are no shared prefixes to make calls on")
    rng = _stream("calls", seed)
    by_rank = rng.sample(prefixes, len(prefixes))
    cumulative = list(accumulate(rank**-zipf for rank in range(1, len(by_rank) + 1)))
    return [_call(rng.choices(by_rank, cum_weights=cumulative)[0], rng) for _ in range(n_calls)]


def poisson_arrivals(n: int, rate_per_s: float, seed: int) -> list[float]:
    """`n` ascending arrival times in seconds from the start, of a Poisson process of `rate_per_s` arrivals a second."""
    if rate_per_s <= 0:
        raise ValueError(f"the arrival rate must be above 0 a second, not {rate_per_s}")
    rng = _stream("arrivals", seed)
    return list(accumulate(rng.expovariate(rate_per_s) for _ in range(n)))


def _stream(purpose: str, seed: int) -> random.Random:
    """A random generator for one purpose. A run has one seed, from which each purpose draws independently."""
    return random.Random(f"{purpose} {seed}")  # noqa: S311 - a workload to be repeated, nothing to be guarded


# A question repeats from call to call, and an equal prompt would be cached whole. So the opening varies, which ends the
# shared prefix at once, and a random number at the end makes two prompts differ.
_OPENINGS = (
    "", "Please help me with this.", "A quick one.", "I have been asked the following.", "One more question.",
    "I could not find this myself.", "For a report I am writing:", "This came up in a meeting today.",
    "My colleague would like to know:", "Could you look into this?", "I need this before noon.", "Just to be sure:",
)  # fmt: skip
_CLOSINGS = (
    "Ticket {n}.",
    "Keep it short, this is for note {n}.",
    "I will file the answer under {n}.",
    "My case: {n}.",
)


def _call(prefix: SharedPrefix, rng: random.Random) -> WorkloadCall:
    opening, closing = rng.choice(_OPENINGS), rng.choice(_CLOSINGS).format(n=rng.randrange(10_000, 1_000_000))
    question = f"{opening} {rng.choice(prefix.questions)}\n{closing}".lstrip()
    max_tokens = _output_tokens(prefix, rng)
    return WorkloadCall(prefix.name, prefix.messages_for(question), list(prefix.tools) or None, max_tokens)


def _output_tokens(prefix: SharedPrefix, rng: random.Random) -> int:
    """A log-normal length with the prefix's mean. The spread is that of its kind in `OUTPUT_TOKENS`."""
    mean_tokens, deviation_tokens = OUTPUT_TOKENS[prefix.kind]
    variance = math.log1p((deviation_tokens / mean_tokens) ** 2)
    location = math.log(prefix.mean_output_tokens) - variance / 2
    return max(1, round(rng.lognormvariate(location, math.sqrt(variance))))


def _take(
    candidates: Sequence[int], tokens: Sequence[int], chosen: set[int], share_tokens: int, limit_tokens: int
) -> int:
    """Choose the candidates that fit `share_tokens`, or else the smallest if it fits `limit_tokens`; returns tokens."""
    taken_tokens = 0
    for index in candidates:
        if index not in chosen and taken_tokens + tokens[index] <= share_tokens:
            chosen.add(index)
            taken_tokens += tokens[index]
    if taken_tokens or not candidates:
        return taken_tokens
    smallest = min(candidates, key=tokens.__getitem__)
    if smallest in chosen or tokens[smallest] > limit_tokens:
        return 0
    chosen.add(smallest)
    return tokens[smallest]


def _close_gap(prefixes: Sequence[SharedPrefix], tokens: Sequence[int], chosen: set[int], gap_tokens: int) -> None:
    """Make the one addition, or exchange within a kind, that brings the sum nearest to the target."""
    spare = [index for index in range(len(prefixes)) if index not in chosen]
    if not spare:
        return
    moves = [(abs(gap_tokens), -1, -1)] if chosen else []  # an empty set would be no workload
    moves += [(abs(gap_tokens - tokens[new]), -1, new) for new in spare]
    moves += [
        (abs(gap_tokens - tokens[new] + tokens[old]), old, new)
        for old in sorted(chosen)
        for new in spare
        if prefixes[old].kind == prefixes[new].kind
    ]
    _, old, new = min(moves)
    if new >= 0:
        chosen.discard(old)
        chosen.add(new)


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
