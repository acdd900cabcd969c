"""A gateway that is killed in the middle of programs: the next one goes on with all that a client was told of."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.killing import killed
from e2e.servers import Launcher


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.nightly)])
async def test_every_program_ends_with_its_values_and_nothing_that_was_told_is_lost(
    launch: Launcher, tmp_path: Path, kills: int
) -> None:
    findings = await killed(launch, tmp_path, kills, seed=kills)
    assert findings.problems == []
    assert findings.kills == kills
    assert max(findings.starts) > 1, "no call was interrupted"
