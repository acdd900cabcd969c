"""The prompt tokens that a batch's lines compute, by the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from benchmarks.batching.fleet import Fleet, Lines, Tokens, line_call, prompt_of, words
from benchmarks.running.report import table
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.workload import stream
from plait.policy.batches.line_order import LinesLeft, chain_of

LINES: Final = 2400
AT_ONCE: Final = 128
ANSWER_TOKENS: Final = 60
OWN_TOKENS: Final = 40
MOST: Final = 1.1
"""Computed over needed tokens."""

Order = Literal["file", "tree"]
ORDERS: Final[tuple[Order, ...]] = ("file", "tree")


@dataclass(frozen=True, slots=True)
class Shape:
    """Lines that begin with a common system prompt, then one of `groups` texts. Lengths are whole blocks."""

    groups: int
    system_tokens: int
    group_tokens: int


SHAPES: Final[Mapping[str, Shape]] = {
    "300 documents, one system prompt": Shape(300, 320, 2000),
    "24 prompts, which all fit": Shape(24, 0, 1504),
    "400 prompts": Shape(400, 0, 1808),
}


@dataclass(frozen=True, slots=True)
class Cell:
    shape: str
    order: Order
    seed: int


@dataclass(frozen=True, slots=True)
class Figures:
    computed_share: float
    """Prompt tokens computed, over those of each text once."""
    seconds: float


def cells(seeds: Sequence[int]) -> list[Cell]:
    return [Cell(shape, order, seed) for seed in seeds for shape in SHAPES for order in ORDERS]


def run(cell: Cell) -> Figures:
    shape, draw = SHAPES[cell.shape], stream(f"order {cell.shape}", cell.seed)
    system, groups = words(draw, shape.system_tokens), [words(draw, shape.group_tokens) for _ in range(shape.groups)]
    prompts = [[*system, *groups[number % shape.groups], *words(draw, OWN_TOKENS)] for number in range(LINES)]
    draw.shuffle(prompts)
    fleet = Fleet()
    chains = [chain_of(_text(prompt)) if cell.order == "tree" else b"" for prompt in prompts]
    calls = [partial(line_call, prompt_of(prompt), ANSWER_TOKENS) for prompt in prompts]
    lines = Lines(fleet, LinesLeft(chains, range(LINES), fleet.names), calls.__getitem__, at_once=AT_ONCE)
    fleet.simulation.run()
    needed = shape.system_tokens + shape.groups * shape.group_tokens + LINES * OWN_TOKENS
    computed = sum(one.computed_tokens for one in lines.records)
    return Figures(computed / needed, max(one.finished_s for one in lines.records))


def _text(prompt: Tokens) -> bytes:
    """Four characters a token, as in English."""
    return b"".join(b"%04x" % token for token in prompt)


def markdown(found: Mapping[Cell, Figures]) -> Iterator[str]:
    rows = []
    for shape in SHAPES:
        of = [_of(found, shape, order) for order in ORDERS]
        rows.append([shape, *(f"{one.computed_share:.2f}, {one.seconds:.0f} s" for one in of)])
    yield from table(["lines", *(f"in the order of the {order}" for order in ORDERS)], rows)


def _of(found: Mapping[Cell, Figures], shape: str, order: Order) -> Figures:
    of = [one for cell, one in found.items() if (cell.shape, cell.order) == (shape, order)]
    return Figures(max(one.computed_share for one in of), max(one.seconds for one in of))


def claims(found: Mapping[Cell, Figures]) -> Iterator[Claim]:
    for shape in SHAPES:
        tree, file = (_of(found, shape, order).computed_share for order in reversed(ORDERS))
        yield Claim("prompt tokens computed over needed", tree, most=MOST, where=shape)
        yield Claim("the same over those in the file's order", tree / file, most=1.0, where=shape)
