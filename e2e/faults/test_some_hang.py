"""An engine that answers most calls and never answers some."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from e2e.faults.fleet import ScriptedServer
from e2e.faults.raw_client import CHAT, Client
from e2e.faults.verdicts import is_good
from e2e.servers import Launcher
from plait.gateway.config import UpstreamConfig

LOAD_S: Final = 15.0
WORKERS: Final = 16
SHARE: Final = 0.02
WITHIN_S: Final = 13.0


@pytest.mark.parametrize("some_stream", [False, True], ids=["whole", "mixed"])
async def test_no_call_waits_because_others_are_answered(tmp_path: Path, some_stream: bool) -> None:
    """The calls that the engine forgets are answered elsewhere, while it goes on with others."""
    scripted = ScriptedServer("engines", {"a": ["demo"], "b": ["demo"]}, tmp_path, "--first-s", "0.05")
    times_s: list[float] = []
    with ExitStack() as stack:
        stack.callback(scripted.stop)
        launch = stack.enter_context(Launcher(tmp_path))
        entries = [engine.entry() for engine in scripted.engines.values()]
        gateway = launch.gateway(entries, upstream=msgspec.structs.asdict(UpstreamConfig()))
        for server in (scripted, gateway):
            server.start()
        for server in (scripted, gateway):
            server.wait_until_ready()
        await scripted.engines["a"].set_mode("hang_request", share=SHARE)
        async with Client(gateway.port) as client:
            ends_s = time.monotonic() + LOAD_S

            async def work(worker: int) -> None:
                number = 0
                while time.monotonic() < ends_s:
                    number += 1
                    messages = [{"role": "user", "content": f"Question {number} of {worker}?"}]
                    body: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 8}
                    body["stream"] = some_stream and number % 2 == 0
                    answer = await client.post(CHAT, body)
                    assert is_good(body, answer)
                    times_s.append(answer.time_s)
                    await asyncio.sleep(0.05)

            await asyncio.gather(*(work(worker) for worker in range(WORKERS)))
    assert max(times_s) <= WITHIN_S
