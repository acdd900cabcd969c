"""Short situations of docs/oncall.md, and that each situation has its part. `python -m e2e.oncall` runs all."""

from __future__ import annotations

import asyncio
from pathlib import Path

from e2e.oncall.running import SILENT, SITUATIONS, run
from plait.gateway.guests.live.problems import THRESHOLDS
from plait.gateway.guests.live.status import PART_OF_OTHERS

PAGE = Path(__file__).parents[2] / "docs" / "oncall.md"
SHORT = ("engine_wrong", "engines_out", "tenant_floods", "program_hangs", "reload_refused")


async def test_each_is_named_in_its_time_and_over_once_it_is_mended(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as group:
        for name in SHORT:
            (folder := tmp_path / name).mkdir()
            group.create_task(run(SITUATIONS[name], folder, before_s=2.0))


def test_each_part_of_the_page_is_of_a_problem_or_a_situation() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    headings = {line[3:].lower().replace(" ", "-") for line in lines if line.startswith("## ")}
    parts = [situation.part for situation in SITUATIONS.values()]
    assert len(set(parts)) == len(SITUATIONS) == 16
    assert {*parts, *(threshold.part for threshold in THRESHOLDS.values()), PART_OF_OTHERS} == headings
    assert len(SILENT) == 2
