"""An engine that answers most calls and never answers some."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final

import pytest

from e2e.faults.fleet import two_engines
from e2e.faults.raw_client import CHAT, Client
from e2e.faults.verdicts import is_good

LOAD_S: Final = 15.0
WORKERS: Final = 16
SHARE: Final = 0.02
WITHIN_S: Final = 13.0


@pytest.mark.parametrize("some_stream", [False, True], ids=["whole", "mixed"])
async def test_no_call_waits_because_others_are_answered(tmp_path: Path, some_stream: bool) -> None:
    """The calls that the engine forgets are answered elsewhere, while it goes on with others."""
    times_s: list[float] = []
    with two_engines(tmp_path, "--first-s", "0.05") as (gateway, engine):
        await engine.set_mode("hang_request", share=SHARE)
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
