from __future__ import annotations

import asyncio

from plait.gateway.metrics import new_registry
from tests.gateway.exposed import samples


async def test_the_process_its_tasks_and_its_build_are_shown() -> None:
    waiting = asyncio.create_task(asyncio.Event().wait())
    await asyncio.sleep(0)
    found = samples(new_registry())
    assert found["plait_tasks"] == 2
    assert found["process_open_fds"] > 0
    assert [name for name in found if name.startswith("plait_build_info{")]
    waiting.cancel()


def test_outside_an_event_loop_there_are_no_tasks_to_count() -> None:
    assert "plait_tasks" not in samples(new_registry())
