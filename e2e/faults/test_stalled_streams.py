"""An engine that begins streams and does not go on with them, as where prefill works and decoding hangs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final

from e2e.faults.fleet import two_engines
from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.faults.watching import Watch
from plait.gateway.membership.recovery import NOTHING_SAID

APART_S: Final = 0.05
"""Between two calls. At this rate the healthy engine has some ten at once, and the stalled one looks no worse.

Without the stall rule the engine was out after 24 to 29 s, and got calls all the time.
"""


async def test_new_streams_do_not_hide_the_stalled_ones(tmp_path: Path) -> None:
    """The engine is given up although each new call gets its first events from it at once."""
    with two_engines(tmp_path, "--first-s", "0.1", "--token-s", "0.05") as (gateway, engine):
        async with Client(gateway.port) as client, Watch(gateway.port) as watch:
            await engine.set_mode("hang_stream")
            calls: list[asyncio.Task[Answer]] = []
            begun_s = time.monotonic()
            waiting = asyncio.create_task(watch.until(lambda: watch.was_out(engine.name, begun_s)))
            while not waiting.done():
                calls.append(asyncio.create_task(_call(client, len(calls))))
                await asyncio.sleep(APART_S)
            assert waiting.result() is not None
            stuck = [(await call).header("plait-engine") == engine.name for call in calls]
        assert NOTHING_SAID not in gateway.log(), "the engine is given up before a limit on its calls ends them"
    assert any(stuck)
    assert not any(stuck[-len(stuck) // 3 :]), "an engine that seems to be stalled gets no new calls"


async def _call(client: Client, number: int) -> Answer:
    messages = [{"role": "user", "content": f"Question {number}?"}]
    body: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 8, "stream": True}
    return await client.post(CHAT, body)
