"""A part of a run on a GPU: what it gets, and the file that it leaves, also if it is cut off."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.engines import Engine

Figures = dict[str, Any]
"""What a section found so far, as JSON. A section adds to it while it runs."""


@dataclass(frozen=True)
class Fleet:
    """The engines of a run: those with the adapter and the stock one, their model's files, a folder for logs.

    Gateways have this cost `profile`; None: the default one.
    """

    engines: Sequence[Engine]
    stock: Engine
    model: Path
    folder: Path
    profile: str | None = None

    def computed_prompt_tokens(self) -> float:
        """The prompt tokens that the engines with the adapter have computed so far, by vLLM's own count."""
        return sum(engine.computed_prompt_tokens() for engine in self.engines)

    def emptied(self) -> float:
        """Have these engines forget all prefixes; returns what they have computed until now."""
        for engine in self.engines:
            engine.empty_cache()
        return self.computed_prompt_tokens()


@dataclass(frozen=True)
class Section:
    """`run` measures with a plan for at most `share` of a run's time. `expected` was written down before the run."""

    name: str
    share: float
    expected: str
    run: Callable[[Fleet, float, Figures], Awaitable[None]]
    """Called with the fleet, the seconds, and the figures to fill."""


@dataclass(frozen=True)
class Outcome:
    """What a section leaves: its figures, and why it has no more (empty: it has all)."""

    section: str
    expected: str
    machine: Mapping[str, object]
    figures: Figures
    problem: str
    took_s: float


async def run_section(section: Section, fleet: Fleet, seconds: float, machine: Mapping[str, object]) -> Outcome:
    """Run a section within its seconds. Its failure is part of the outcome, so that the next one runs."""
    figures: Figures = {}
    began_s, problem = time.monotonic(), ""
    try:
        async with asyncio.timeout(seconds):
            await section.run(fleet, seconds, figures)
    except TimeoutError:
        problem = f"cut off after {seconds:.0f} s"
    except Exception as error:  # noqa: BLE001 - whatever fails there, the machine's time is short and others wait
        problem = _reason(error)
    return Outcome(section.name, section.expected, machine, figures, problem, time.monotonic() - began_s)


def write(outcome: Outcome, folder: Path) -> None:
    """Write a section's file."""
    (folder / f"{outcome.section}.json").write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
