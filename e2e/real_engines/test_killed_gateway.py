"""A gateway over real engines that is killed in the middle of programs: nothing that was told is lost.

Each kill takes ten seconds, so all five are for `make nightly`.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from e2e.killing import Findings, Killing
from e2e.real_engines.engine import MODEL
from e2e.real_engines.fleet import EngineFleet, new_gateway

KILLS: Final = 5 if "PLAIT_NIGHTLY" in os.environ else 1


def test_every_program_ends_and_nothing_that_was_told_is_lost(fleet: EngineFleet, model: Path, folder: Path) -> None:
    path = folder / "killed" / "sessions.db"
    gateway = new_gateway("gateway-killed", fleet.engines, model, folder, store={"path": str(path)})
    killing = Killing(gateway, path, random.Random(KILLS), model=MODEL, temperature=0)

    async def rounds() -> Findings:
        await killing.start()
        for number in range(KILLS):
            await killing.kill(number)
        return await asyncio.to_thread(killing.end)

    with ExitStack() as stack:
        EngineFleet(gateway, fleet.engines).start_gateway(stack)
        findings = asyncio.run(rounds())
    assert findings.problems == []
    assert findings.kills == KILLS
