"""Measures vLLM with Plait on one GPU, in sections of a few seconds each: `python -m benchmarks gpu_run`.

The engines run already (`python -m benchmarks gpu_smoke` starts them): two with the adapter, and a stock one. Gateways
are started here. Each section has its part of `--seconds`, and writes a file of figures when it ends, also if it fails
or is cut off. docs/measurements/gpu.md says what each measures. `--rehearse` is for engines on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from benchmarks.gpu import costs, decodes, exactness, objectives, placed_documents, programs
from benchmarks.gpu.engines import Engine
from benchmarks.gpu.machine import described
from benchmarks.gpu.section import Fleet, Outcome, Section, run_section, write


@dataclass(frozen=True)
class _Known:
    """A section before it is known what it runs on: its module, its seconds of 455, and what is expected of a GPU."""

    module: Any
    seconds: float
    expected: str


SECTIONS: Final = {
    "objectives": _Known(
        objectives,
        190,
        "kept with TTFT x 4 at least .97, stock under .5; long prompts' TTFT at most 1.5 x stock's, output tokens/s at "
        "least .98 x; each row: docs/measurements/gpu.md",
    ),
    "exactness": _Known(
        exactness, 50, "at least .97 of predictions within a tree block, thousands of blocks evicted, used blocks equal"
    ),
    "placement": _Known(
        placed_documents, 100, "computed prompt tokens of round robin / plait at least 1.5, TTFT in the same direction"
    ),
    "decodes": _Known(decodes, 20, "TPOT of slo / stock at most 1.02; 5 to 7 ms"),
    "costs": _Known(costs, 55, "shipped profile predicts 5 to 30 % too little time, most for small iterations"),
    "programs": _Known(
        programs, 40, "makespan of the client / by variables 1.0 to 1.2 without a network between; 1 request for 25"
    ),
}
"""In this order: a run that is cut off lacks the last ones."""


def main() -> int:
    """Run the sections, write their files, and print them; returns how many failed."""
    arguments = _arguments()
    out, logs = arguments.out, arguments.logs
    for folder in (out, logs):
        folder.mkdir(parents=True, exist_ok=True)
    *engines, stock = (
        Engine(name, urlsplit(url).port or 80, is_stock=name == "S")
        for name, url in zip("ABS", (*arguments.engines, arguments.stock), strict=True)
    )
    fleet = Fleet(engines, stock, arguments.model.absolute(), logs, arguments.profile)
    began_s = time.monotonic()
    outcomes = asyncio.run(_run(_sections(arguments), fleet, out, arguments.seconds))
    summary = {one.section: {"took (s)": round(one.took_s, 1), "problem": one.problem} for one in outcomes}
    (out / "run.json").write_text(json.dumps({"machine": described(), "sections": summary}, indent=1) + "\n")
    print(f"{len(outcomes)} sections in {time.monotonic() - began_s:.0f} s: {json.dumps(summary)}")
    return sum(bool(one.problem) for one in outcomes)


async def _run(sections: Sequence[Section], fleet: Fleet, out: Path, seconds: float) -> list[Outcome]:
    """One section after the other, each within its share."""
    machine, outcomes = described(), list[Outcome]()
    for section in sections:
        outcome = await run_section(section, fleet, section.share * seconds, machine)
        write(outcome, out)
        outcomes.append(outcome)
        print(f"=== {section.name} ({outcome.took_s:.0f} s) {outcome.problem}\nexpected: {section.expected}")
        print(json.dumps(_short(outcome.figures), indent=1), flush=True)
    return outcomes


def _sections(arguments: argparse.Namespace) -> list[Section]:
    whole_s = sum(known.seconds for known in SECTIONS.values())
    return [
        Section(name, known.seconds / whole_s, known.expected, _measure(known.module, rehearse=arguments.rehearse))
        for name, known in SECTIONS.items()
        if name in arguments.sections
    ]


def _measure(module: Any, *, rehearse: bool) -> Callable[[Fleet, float, dict[str, Any]], Awaitable[None]]:
    return partial(module.measure, module.CPU if rehearse else module.GPU)


def _short(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures without long lists and texts, which are in the file."""
    return {
        name: value
        for name, value in figures.items()
        if not (isinstance(value, str | list) and len(value) > 8 and not isinstance(value[0], dict))
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu_run")
    parser.add_argument("--engines", nargs=2, required=True, metavar="URL", help="with Plait's adapter")
    parser.add_argument("--stock", required=True, metavar="URL", help="without it, and otherwise the same")
    parser.add_argument("--model", type=Path, default=Path(".gpu/model"), help="a folder (default: %(default)s)")
    parser.add_argument("--profile", help="the gateways' cost profile (default: the configuration's)")
    parser.add_argument("--seconds", type=float, default=460.0, help="for all sections (default: %(default)s)")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="default: all")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the figures")
    parser.add_argument("--logs", type=Path, default=Path(".gpu/logs"), help="of gateways (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, for engines on a CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
