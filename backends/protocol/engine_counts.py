"""What an engine without Plait's adapter says of itself, as its row of `dialects` names it: calls and sizes."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from typing import Final, NamedTuple

from plait.backends.protocol.dialects import Dialect, Figure

MOST_CALLS: Final = 100_000
MOST_TOKENS: Final = 2**28
"""More than any engine has, of calls, and of tokens in a KV cache or a context."""

Body = bytes | bytearray


class EngineCounts(NamedTuple):
    """The calls in an engine, as it counts them itself."""

    running: int

    waiting: int

    kv_tokens: int | None
    """Its KV cache; None: it does not say."""

    work: float = 0.0
    """A number that changes whenever it computes."""

    slots: int | None = None
    """Calls that it runs at a time; None: it does not say."""


_VALUE: Final = rb"[0-9]{1,12}(?:\.[0-9]{1,20})?(?:e[+-]0[0-9])?"
_BLOCKS: Final = re.compile(rb'(?:^|,)(num_gpu_blocks|block_size)="(\d{1,12})"')


@cache
def _samples(dialect: Dialect) -> re.Pattern[bytes]:
    """The samples in an exposition that the row names."""
    names = b"|".join(re.escape(name.encode()) for name in dialect.figures)
    pattern = rb"^(?P<name>%b)(?:\{(?P<labels>[^}\n]*)\})? (?P<value>%b)$" % (names, _VALUE)
    return re.compile(pattern, re.MULTILINE)


def read_counts(dialect: Dialect, text: Body) -> EngineCounts | None:
    """The counts in an exposition of metrics, summed over an engine's cores; None if there are none."""
    if not dialect.figures:
        return None
    totals: defaultdict[Figure, float] = defaultdict(float)
    for sample in _samples(dialect).finditer(text):
        figure, value = dialect.figures[sample["name"].decode()], float(sample["value"])
        if figure is Figure.BLOCKS_IN_LABELS:
            blocks = {name: int(number) for name, number in _BLOCKS.findall(sample["labels"] or b"")}
            totals[Figure.KV_TOKENS] += blocks.get(b"num_gpu_blocks", 0) * blocks.get(b"block_size", 0)
        elif figure is Figure.BLOCK_TOKENS:  # the same for all cores
            totals[figure] = value
        else:
            totals[figure] += value
    if totals.keys().isdisjoint((Figure.RUNNING, Figure.WAITING)):
        return None
    kv_tokens = totals[Figure.KV_TOKENS] + totals[Figure.KV_BLOCKS] * totals[Figure.BLOCK_TOKENS]
    running, waiting, slots = (
        min(int(totals[figure]), MOST_CALLS) for figure in (Figure.RUNNING, Figure.WAITING, Figure.SLOTS)
    )
    return EngineCounts(running, waiting, min(int(kv_tokens), MOST_TOKENS) or None, totals[Figure.WORK], slots or None)
