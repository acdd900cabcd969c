"""Reads the calls and sizes of an engine without Plait's adapter, from the places that its row of `dialects` names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec

from plait.backends.protocol.dialects import Dialect, Figure, SizesRoute

MOST_CALLS: Final = 100_000
MOST_TOKENS: Final = 2**28
"""An upper bound of calls, and of tokens in a KV cache or a context. Larger numbers are not believed."""

Body = bytes | bytearray

_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class EngineCounts(NamedTuple):
    """An engine's own counts of its calls. None: the engine does not report the number."""

    running: int

    waiting: int | None
    kv_tokens: int | None
    """The size of the KV cache."""

    work: float = 0.0
    """A number that changes whenever the engine computes."""

    slots: int | None = None
    """How many calls run at a time."""

    looked_up: float | None = None
    """The prompt tokens that were looked up in the cache since the engine's start."""

    found: float = 0.0
    """Those of them that were cached."""


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """An engine's sizes. None: the engine does not report the size."""

    kv_tokens: int | None = None
    """The size of the KV cache."""

    slots: int | None = None
    """How many calls run at a time."""

    context_tokens: int | None = None
    """The longest context of any model."""

    contexts: Mapping[str, int] = field(default_factory=dict[str, int])
    """The longest context of each model that is loaded."""

    def context(self, model: str) -> int | None:
        """The longest context of a model, in tokens. Ollama's names may have a tag that clients leave out."""
        return self.contexts.get(model, self.contexts.get(f"{model}:latest", self.context_tokens))


NO_SIZES: Final = EngineSizes()
"""The sizes of an engine that has reported none."""

_VALUE: Final = rb"[0-9]{1,12}(?:\.[0-9]{1,20})?(?:e[+-][01][0-9])?"
_BLOCKS: Final = re.compile(rb'(?:^|,)(num_gpu_blocks|block_size|kv_cache_size_tokens)="(\d{1,12})"')


@cache
def _samples(dialect: Dialect) -> re.Pattern[bytes]:
    """A pattern of the samples that the row names."""
    names = b"|".join(re.escape(name.encode()) for name in dialect.figures)
    pattern = rb"^(?P<name>%b)(?:\{(?P<labels>[^}\n]*)\})? (?P<value>%b)$" % (names, _VALUE)
    return re.compile(pattern, re.MULTILINE)


_CALLS: Final = frozenset((Figure.RUNNING, Figure.WAITING))


@cache
def _rank(dialect: Dialect) -> re.Pattern[bytes]:
    """A pattern of the label that names a sample's data-parallel rank."""
    return re.compile(rb'(?:^|,)%b="(\d{1,6})"' % re.escape((dialect.rank_label or "").encode()))


def read_counts(dialect: Dialect, text: Body) -> dict[int, EngineCounts]:
    """The counts in metrics, by data-parallel rank in ascending order; 0 for an engine without ranks.

    Empty if there are none. SGLang may lack a rank that has had no call.
    """
    ranks = _by_rank(dialect, text)
    if all(totals.keys().isdisjoint(_CALLS) for totals in ranks.values()):
        return {}
    return {max(0, rank): _counts(totals) for rank, totals in ranks.items()}


def count_ranks(dialect: Dialect, text: Body) -> int:
    """How many data-parallel ranks the metrics name. vLLM's counters name all of them before the first call."""
    return len(_by_rank(dialect, text))


def read_total(dialect: Dialect, text: Body) -> float:
    """The sum of the counters among the row's samples, over all ranks. A server that runs on never lowers it."""
    samples = _samples(dialect).finditer(text)
    return sum(float(sample["value"]) for sample in samples if sample["name"].endswith((b"_total", b"_count")))


def _by_rank(dialect: Dialect, text: Body) -> dict[int, defaultdict[Figure, float]]:
    """The figures of each rank that the metrics name, in ascending order; -1 where they name none."""
    if not dialect.figures:
        return {}
    totals: defaultdict[int, defaultdict[Figure, float]] = defaultdict(lambda: defaultdict(float))
    for sample in _samples(dialect).finditer(text):
        figure, value = dialect.figures[sample["name"].decode()], float(sample["value"])
        labels = sample["labels"] or b""
        named = _rank(dialect).search(labels)
        of_rank = totals[-1 if named is None else int(named[1])]
        if figure is Figure.BLOCKS_IN_LABELS:
            blocks = {name: int(number) for name, number in _BLOCKS.findall(labels)}
            if b"kv_cache_size_tokens" in blocks:  # of the rank; blocks of several groups are no tokens
                of_rank[Figure.KV_TOKENS] = blocks[b"kv_cache_size_tokens"]
            else:
                of_rank[figure] = blocks.get(b"num_gpu_blocks", 0) * blocks.get(b"block_size", 0)
        elif figure is Figure.BLOCK_TOKENS:  # the same in all samples
            of_rank[figure] = value
        else:
            of_rank[figure] += value
    if len(totals) > 1 and (loose := totals.pop(-1, None)) is not None and len(totals) == 1:
        for figure, value in loose.items():  # with several ranks it is not known whose they are
            totals[max(totals)][figure] += value
    of_all = max((of_rank[Figure.BLOCKS_IN_LABELS] for of_rank in totals.values()), default=0.0)
    for of_rank in totals.values():
        of_rank[Figure.KV_TOKENS] += of_all / len(totals)
    return {rank: totals[rank] for rank in sorted(totals)}


def _counts(totals: Mapping[Figure, float]) -> EngineCounts:
    kv_tokens = totals[Figure.KV_TOKENS] + totals[Figure.KV_BLOCKS] * totals[Figure.BLOCK_TOKENS]
    running, waiting, slots = (
        min(int(totals[figure]), MOST_CALLS) for figure in (Figure.RUNNING, Figure.WAITING, Figure.SLOTS)
    )
    looked_up = (totals[Figure.LOOKED_UP] or totals[Figure.PROMPT_TOKENS]) if Figure.LOOKED_UP in totals else None
    work = totals[Figure.WORK] + totals[Figure.PROMPT_TOKENS] + totals[Figure.LOOKED_UP]
    known_tokens = min(int(kv_tokens), MOST_TOKENS) or None
    return EngineCounts(running, waiting, known_tokens, work, slots or None, looked_up, totals[Figure.FOUND])


def in_all(ranks: Collection[EngineCounts]) -> EngineCounts:
    """The counts of all ranks together."""
    running, waiting, kv_tokens, work, slots, looked_up, found = zip(*ranks, strict=True)
    known = [None if None in numbers else sum(numbers) for numbers in (waiting, kv_tokens, slots, looked_up)]
    return EngineCounts(sum(running), known[0], known[1], sum(work), known[2], known[3], sum(found))


class _Slot(msgspec.Struct):
    is_processing: bool


def read_slots(body: Body) -> EngineCounts | None:
    """The counts in a list of slots, which has no waiting calls; None if the body is no such list."""
    try:
        slots = msgspec.json.decode(body, type=list[_Slot])
    except _UNREADABLE:
        return None
    running = sum(slot.is_processing for slot in slots)
    return EngineCounts(min(running, MOST_CALLS), None, None, slots=min(len(slots), MOST_CALLS) or None)


class _Load(msgspec.Struct):
    dp_rank: int


class _Loads(msgspec.Struct):
    loads: list[_Load]


def read_loads(body: Body) -> int:
    """How many data-parallel ranks a list of loads has; 0 if the body is no such list."""
    try:
        return len({load.dp_rank for load in msgspec.json.decode(body, type=_Loads).loads})
    except _UNREADABLE:
        return 0


def read_sizes(route: SizesRoute, body: Body) -> EngineSizes | None:
    """The sizes in a route's answer; None if another kind of engine has answered."""
    try:
        answer = msgspec.json.decode(body)
    except _UNREADABLE:
        return None
    if any(_at(answer, mark) is None for mark in route.marks):
        return None
    contexts = {} if route.models is None else dict(_contexts(_at(answer, route.models), route.context))
    return EngineSizes(
        kv_tokens=_size(answer, route.kv_tokens, MOST_TOKENS),
        slots=_size(answer, route.slots, MOST_CALLS),
        context_tokens=None if route.models is not None else _size(answer, route.context, MOST_TOKENS),
        contexts=contexts,
    )


def read_owners(body: Body) -> set[str]:
    try:
        models = msgspec.json.decode(body, type=_OwnedList).data
    except _UNREADABLE:
        return set()
    return {model.owned_by for model in models if model.owned_by is not None}


class _Owned(msgspec.Struct):
    owned_by: str | None = None


class _OwnedList(msgspec.Struct):
    data: list[_Owned]


def _contexts(entries: Any, context: str | None) -> Iterator[tuple[str, int]]:
    for entry in entries if isinstance(entries, list) else ():
        name, tokens = _at(entry, "name"), _size(entry, context, MOST_TOKENS)
        if isinstance(name, str) and tokens is not None:
            yield name, tokens


def _size(answer: Any, name: str | None, most: int) -> int | None:
    """A whole number from 1 to `most`; None for anything else."""
    value = None if name is None else _at(answer, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most else None


def _at(answer: Any, name: str) -> Any:
    """The value at a dotted path in a decoded answer; None if it is missing."""
    for part in name.split("."):
        answer = answer.get(part) if isinstance(answer, dict) else None
    return answer
