"""What online calls notice of lines, and how many lines run beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf
from statistics import fmean, geometric_mean, quantiles
from typing import Final

from benchmarks.batching.fleet import ENGINES, SLOTS, Endless, Fleet, Lines, endless_lines, online_calls
from benchmarks.running.report import table
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.simulate import CallRecord

LOADS: Final = (0.3, 0.6, 0.9)
"""Of the calls a second that the fleet answers if all come at once."""
LINE_TOKENS: Final = (300, 1900)
SCHEDULERS: Final = ("slo", "fcfs")
"""Plait's in the engine, and one that knows no lines, as in an engine without an adapter."""
WARM_S: Final = 20.0
"""Calls before are in no figure."""
BEGINS_S: Final = 5.0
IDLE_S: Final = 120.0

MOST: Final = {"ttft_p50_s": 1.1, "tpot_s": 1.1, "ttft_p95_s": 1.15, "ttft_p99_s": 1.25}
NAMES: Final = {"ttft_p50_s": "TTFT p50", "tpot_s": "TPOT", "ttft_p95_s": "TTFT p95", "ttft_p99_s": "TTFT p99"}
LEAST_LINES: Final = 0.08
"""Of an idle fleet's, beside online calls at the lowest load."""
FIRST_CALLS: Final = 100
MOST_FIRST_S: Final = 2.0
"""The longest TTFT of so many calls that come at `LOADS[0]` to a fleet where only lines ran."""
LEAST_IDLE: Final = 0.9
"""Of the lines a second with all slots full, on an idle fleet."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Online calls at a load beside lines; no `load`: lines alone; no `tokens`: online calls alone."""

    load: float
    tokens: int
    seed: int
    scheduler: str = "slo"
    all_slots: bool = False
    """Lines fill all slots, whatever the feeder says."""
    is_first: bool = False
    """The online calls come late, to a fleet where only lines ran."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of online calls, and the lines that ended in a second."""

    ttft_p50_s: float = 0.0
    ttft_p95_s: float = 0.0
    ttft_p99_s: float = 0.0
    tpot_s: float = 0.0
    lines_per_s: float = 0.0
    longest_ttft_s: float = 0.0


def cells(seeds: Sequence[int]) -> list[Cell]:
    found = [
        Cell(load, tokens, seed, scheduler)
        for seed in seeds
        for load in LOADS
        for scheduler in SCHEDULERS
        for tokens in (0, *LINE_TOKENS)
    ]
    alone = [
        Cell(0.0, tokens, seed, all_slots=full) for seed in seeds for tokens in LINE_TOKENS for full in (False, True)
    ]
    first = [
        Cell(LOADS[0], tokens, seed, scheduler, is_first=True)
        for seed in seeds
        for scheduler in SCHEDULERS
        for tokens in LINE_TOKENS
    ]
    return found + alone + first


def run(cell: Cell, calls: int) -> Figures:
    """The figures of a cell, with so many online calls."""
    if not cell.load:
        return Figures(lines_per_s=_alone(cell))
    fleet = Fleet(cell.scheduler)
    if cell.is_first:
        return Figures(longest_ttft_s=_first(fleet, cell))
    online = online_calls(calls, cell.load * _saturation_per_s(cell.seed), cell.seed)
    ends_s = online[-1].arrives_s
    lines_per_s, lines = 0.0, None
    if cell.tokens:
        left = endless_lines(cell.tokens, cell.seed)
        lines = Lines(fleet, Endless(), left, begins_s=BEGINS_S, ends_s=ends_s)
    fleet.simulation.run(online)
    if lines is not None:
        lines_per_s = _per_s(lines.records, BEGINS_S, ends_s)
    records = fleet.simulation.records
    return _figures([one for one in records if one.tenant == "online" and one.arrived_s > WARM_S], lines_per_s)


def _first(fleet: Fleet, cell: Cell) -> float:
    """The longest TTFT of the first online calls."""
    online = online_calls(FIRST_CALLS, cell.load * _saturation_per_s(cell.seed), cell.seed)
    late = [replace(call, arrives_s=call.arrives_s + IDLE_S / 2) for call in online]
    Lines(fleet, Endless(), endless_lines(cell.tokens, cell.seed), ends_s=late[-1].arrives_s)
    fleet.simulation.run(late)
    return max(one.ttft_s for one in fleet.simulation.records if one.tenant == "online")


def _alone(cell: Cell) -> float:
    """Lines a second without online calls."""
    fleet = Fleet(cell.scheduler)
    if cell.all_slots:
        records: list[CallRecord] = []
        left = endless_lines(cell.tokens, cell.seed)

        def another(record: CallRecord) -> None:
            records.append(record)
            if record.finished_s < IDLE_S:
                send(record.finished_s)

        def send(now_s: float) -> None:
            fleet.simulation.send(left(len(fleet.simulation.records))(now_s), another)

        for _ in range(ENGINES * SLOTS):
            fleet.simulation.at(0.0, send)
    else:
        lines = Lines(fleet, Endless(), endless_lines(cell.tokens, cell.seed), ends_s=IDLE_S)
        records = lines.records
    fleet.simulation.run()
    return _per_s(records, IDLE_S / 4, IDLE_S)


def _per_s(records: Sequence[CallRecord], begins_s: float, ends_s: float) -> float:
    return sum(begins_s < one.finished_s <= ends_s for one in records) / (ends_s - begins_s)


def _figures(online: Sequence[CallRecord], lines_per_s: float) -> Figures:
    ttfts = quantiles([one.ttft_s for one in online], n=100)
    tpots = [(one.finished_s - one.first_token_s) / (one.output_tokens - 1) for one in online if one.output_tokens > 1]
    return Figures(ttfts[49], ttfts[94], ttfts[98], fmean(tpots), lines_per_s)


@cache
def _saturation_per_s(seed: int) -> float:
    """Online calls a second that the fleet answers if all come at once."""
    online = online_calls(2000, inf, seed)
    return len(online) / max(one.finished_s for one in Fleet().simulation.run(online))


def ratios(found: Mapping[Cell, Figures], load: float, tokens: int, scheduler: str, figure: str) -> list[float]:
    """A figure beside lines over that without, for each seed."""
    return [
        getattr(figures, figure) / getattr(found[Cell(load, 0, cell.seed, scheduler)], figure)
        for cell, figures in found.items()
        if (cell.load, cell.tokens, cell.scheduler, cell.is_first) == (load, tokens, scheduler, False)
    ]


def _idle(found: Mapping[Cell, Figures], tokens: int, *, all_slots: bool) -> float:
    return fmean(
        figures.lines_per_s
        for cell, figures in found.items()
        if (cell.load, cell.tokens, cell.all_slots) == (0.0, tokens, all_slots)
    )


def _rows(found: Mapping[Cell, Figures]) -> Iterator[tuple[float, int, str]]:
    yield from dict.fromkeys((cell.load, cell.tokens, cell.scheduler) for cell in found if cell.load and cell.tokens)


def markdown(found: Mapping[Cell, Figures]) -> Iterator[str]:
    """A row for each load, kind of lines and scheduler."""
    rows = []
    for load, tokens, scheduler in _rows(found):
        shown = [f"{geometric_mean(ratios(found, load, tokens, scheduler, figure)):.3f}" for figure in NAMES]
        lines = _lines_per_s(found, load, tokens, scheduler)
        share = lines / _idle(found, tokens, all_slots=True)
        rows.append([f"{load:g}", str(tokens), scheduler, *shown, f"{lines:.2f}, {share:.2f}"])
    head = ["load", "tokens of lines", "scheduler", *(f"{name}, over none" for name in NAMES.values())]
    yield from table([*head, "lines a second, of an idle fleet's"], rows)


def _lines_per_s(found: Mapping[Cell, Figures], load: float, tokens: int, scheduler: str) -> float:
    return fmean(
        figures.lines_per_s
        for cell, figures in found.items()
        if (cell.load, cell.tokens, cell.scheduler, cell.is_first) == (load, tokens, scheduler, False)
    )


def claims(found: Mapping[Cell, Figures]) -> Iterator[Claim]:
    for load, tokens, scheduler in _rows(found):
        where = f"load {load:g}, lines of {tokens} tokens, {scheduler}"
        for figure, most in MOST.items():
            if scheduler == "slo" or figure == "ttft_p50_s":
                by_seed = ratios(found, load, tokens, scheduler, figure)
                name = f"{NAMES[figure]} beside lines, over none"
                yield Claim(name, geometric_mean(by_seed), most=most, where=where, by_seed=tuple(by_seed))
    for tokens in LINE_TOKENS:
        idle, full = (_idle(found, tokens, all_slots=full) for full in (False, True))
        share, where = _lines_per_s(found, LOADS[0], tokens, "slo") / full, f"lines of {tokens} tokens"
        yield Claim(f"lines beside a load of {LOADS[0]}, of an idle fleet's", share, least=LEAST_LINES, where=where)
        name = f"lines on an idle fleet, over {ENGINES} x {SLOTS} at once"
        yield Claim(name, idle / full, least=LEAST_IDLE, where=where)
    for tokens, scheduler in product(LINE_TOKENS, SCHEDULERS):
        longest = max(
            figures.longest_ttft_s
            for cell, figures in found.items()
            if (cell.tokens, cell.scheduler, cell.is_first) == (tokens, scheduler, True)
        )
        where = f"lines of {tokens} tokens, {scheduler}"
        yield Claim(
            "longest TTFT of calls that come to a fleet full of lines, s", longest, most=MOST_FIRST_S, where=where
        )
