from __future__ import annotations

import asyncio
import json
from pathlib import Path

from benchmarks.gpu.engines import Engine
from benchmarks.gpu.section import Figures, Fleet, Section, run_section, write

FLEET = Fleet([Engine("A", 1), Engine("B", 2)], Engine("S", 3, is_stock=True), Path(), Path())


async def found_all(_fleet: Fleet, _seconds: float, figures: Figures) -> None:
    figures["share"] = 1.0


async def takes_too_long(_fleet: Fleet, _seconds: float, figures: Figures) -> None:
    figures["share"] = 0.5
    await asyncio.sleep(60)


async def fails(_fleet: Fleet, _seconds: float, figures: Figures) -> None:
    figures["share"] = 0.25
    async with asyncio.TaskGroup() as group:
        group.create_task(refused())


async def refused() -> None:
    raise ValueError("status 500")


async def test_a_section_leaves_its_figures(tmp_path: Path) -> None:
    outcome = await run_section(Section("exactness", 1, "all", found_all), FLEET, 1, {"accelerator": "CPU"})
    write(outcome, tmp_path)
    found = json.loads((tmp_path / "exactness.json").read_text())
    assert (found["figures"], found["expected"], found["problem"]) == ({"share": 1.0}, "all", "")


async def test_what_was_found_before_the_cut_stays() -> None:
    outcome = await run_section(Section("exactness", 1, "", takes_too_long), FLEET, 0.01, {})
    assert (outcome.figures, outcome.problem) == ({"share": 0.5}, "cut off after 0 s")


async def test_a_failure_is_part_of_the_outcome() -> None:
    outcome = await run_section(Section("exactness", 1, "", fails), FLEET, 1, {})
    assert (outcome.figures, outcome.problem) == ({"share": 0.25}, "ValueError: status 500")
