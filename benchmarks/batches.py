"""What online calls notice of batches: `python -m benchmarks batches`; `--order`: what the order of lines saves.

In virtual time, with the real feeder, router, admission and engine cores. `--kills 2` runs 50,000 lines on real
gateways that are killed twice.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.batching import kills, online, order
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, finish

SEEDS: Final = (1, 2, 3)
CALLS: Final = 10_000
QUICK_CALLS: Final = 1_500


@dataclass(frozen=True, slots=True)
class Plan:
    """Makes a runner in a worker process, with so many online calls a run."""

    calls: int

    def __call__(self, _traces: Path) -> partial[online.Figures]:
        """The runner."""
        return partial(online.run, calls=self.calls)


def main() -> int:
    """Run, print, write; returns 1 if a claim fails."""
    made = parser(__doc__, quick="one seed, fewer calls", seeds=SEEDS)
    made.add_argument("--online", action="store_true", help="the same: what online calls notice (default)")
    made.add_argument("--order", action="store_true", help="the prompt tokens that lines compute, by their order")
    made.add_argument("--kills", type=int, default=0, metavar="N", help="real gateways that are killed so often")
    made.add_argument("--lines", type=int, default=kills.LINES, help="of a batch whose gateways are killed")
    arguments = made.parse_args()
    if arguments.kills:
        return finish("batches", kills.report(list(kills.run(arguments.lines, arguments.kills))), arguments)
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    if arguments.order:
        return conduct("batches", Experiment(order.cells(seeds), lambda _traces: order.run, ordered), arguments)
    plan = Plan(QUICK_CALLS if arguments.quick else CALLS)
    return conduct("batches", Experiment(online.cells(seeds), plan, beside), arguments)


def beside(found: Mapping[online.Cell, online.Figures]) -> Report:
    """Online calls beside lines."""
    results = [{**asdict(cell), **asdict(figures)} for cell, figures in found.items()]
    return Report(lines=list(online.markdown(found)), claims=list(online.claims(found)), results=results)


def ordered(found: Mapping[order.Cell, order.Figures]) -> Report:
    """Lines in their order."""
    results = [{**asdict(cell), **asdict(figures)} for cell, figures in found.items()]
    return Report(lines=list(order.markdown(found)), claims=list(order.claims(found)), results=results)


if __name__ == "__main__":
    sys.exit(main())
