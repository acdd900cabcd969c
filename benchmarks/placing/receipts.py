"""What it costs to choose an engine and keep what was compared: `python -m benchmarks placement --receipts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Protocol

import msgspec

from benchmarks.running.report import table
from plait.gateway.guests.receipts.receipt import choice_of
from plait.lab.simulation.claim import Claim
from plait.policy.types import Placement

SETTINGS: Final = ("off", "on")

MOST: Final = {4: 1.20, 64: 1.15}
"""How much longer a choice may take with receipts, by the number of engines."""

_ENCODE: Final = msgspec.msgpack.Encoder().encode


class Placing(Protocol):
    """A fleet whose calls are placed and end. `keep` takes each placement, and its time counts as that of a choice."""

    keep: Callable[[Placement], object]

    def run(self, calls: int) -> list[tuple[int, int, int]]:
        """Place so many calls; nanoseconds of choosing, booking and settling of each."""
        ...


class NewFleet(Protocol):
    """Makes a fleet."""

    def __call__(self, *, engines: int, seed: int) -> Placing:
        """With so many engines, and prompts by this seed."""
        ...


@dataclass(frozen=True, slots=True)
class ReceiptRow:
    """Microseconds of CPU that a choice takes."""

    shape: str
    engines: int
    receipts: str
    select_us: float


def measure(shape: str, new: NewFleet, warm_up: int, calls: int, rounds: int) -> list[ReceiptRow]:
    """Each setting in turns, on fleets of 4 and 64 engines; the fastest round each. `new` makes a fleet of a seed."""
    best: dict[tuple[int, str], float] = {}
    for number in range(rounds):
        for engines in (4, 64):
            for name in SETTINGS:
                fleet = new(engines=engines, seed=number)
                fleet.keep = _kept if name == "on" else lambda _placement: None
                fleet.run(warm_up * engines)
                took_us = fmean(select for select, *_ in fleet.run(calls)) / 1e3
                best[engines, name] = min(took_us, best.get((engines, name), took_us))
    return [ReceiptRow(shape, *case, took_us) for case, took_us in best.items()]


def _kept(placement: Placement) -> bytes:
    """What a receipt keeps of a placement."""
    return _ENCODE(choice_of(placement, None, placed_s=0.0, sent_s=0.0, block_tokens=64))


def markdown(rows: Sequence[ReceiptRow]) -> Iterator[str]:
    """The table."""
    off = {(row.shape, row.engines): row.select_us for row in rows if row.receipts == "off"}
    cells = [
        (
            row.shape,
            row.engines,
            row.receipts,
            f"{row.select_us:.1f}",
            f"{row.select_us / off[row.shape, row.engines]:.2f}",
        )
        for row in rows
    ]
    yield from table(("prompts", "engines", "receipts", "us to choose", "over off"), cells)


def claims(rows: Sequence[ReceiptRow]) -> Iterator[Claim]:
    """How much longer a choice may take than without receipts."""
    off = {(row.shape, row.engines): row.select_us for row in rows if row.receipts == "off"}
    for engines, most in MOST.items():
        worst = max(row.select_us / off[row.shape, engines] for row in rows if row.engines == engines)
        yield Claim(f"a choice with receipts over without, {engines} engines", worst, most=most)
