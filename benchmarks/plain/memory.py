"""What a Plait holds in memory at rest, and while requests come that never repeat."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.plain.routers import Router, plait_command, running_engine, running_router
from benchmarks.plain.rows import ROWS
from e2e.faults.raw_client import CHAT, Client

CONCURRENCY: Final = 16
PARTS: Final = 10
PART: Final = 10_000
WARM_UP: Final = 100_000
WARM_UP_S: Final = 240.0
"""So many requests and as long: then the cache of tokens is full, which holds 64 MiB, and the load of placement's
window, 180 s, is that of the rate.
"""

MOST_AT_REST_MB: Final = 120.0
MOST_GROWTH_MB: Final = 5.0
"""Over all requests behind the warm-up: what the allocator keeps differs by a few megabytes from part to part."""


def main(requests: int) -> int:
    """Fill the caches, then send so many requests; returns 1 if a claim does not hold.

    Prints the memory at rest, warm, and after each tenth of the requests.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        engine = stack.enter_context(running_engine(folder / "engine.log"))
        command = partial(plait_command, "short", [engine], folder)
        router = stack.enter_context(running_router("plait", command, folder, Path(__file__).parents[2]))
        at_rest_mb = router.resident_mb()
        found = uvloop.run(_loaded(router, requests))
    print(f"at rest {at_rest_mb:.1f} MB")
    for sent, resident_mb in found:
        print(f"after {sent} requests {resident_mb:.1f} MB")
    _, warm_mb = found[0]
    growth_mb = max(resident_mb for _, resident_mb in found[1:]) - warm_mb
    claims = [("at rest, MB", at_rest_mb, MOST_AT_REST_MB), ("growth once warm, MB", growth_mb, MOST_GROWTH_MB)]
    for claim, value, most in claims:
        print(f"- {'holds' if value <= most else 'FAILS'}: {claim} = {value:.1f}, wanted <= {most:g}")
    return int(any(value > most for _, value, most in claims))


async def _loaded(router: Router, requests: int) -> list[tuple[int, float]]:
    """The memory after the warm-up, and after each part of the load."""
    numbers, found, sent = count(), list[tuple[int, float]](), 0
    async with Client(router.port) as client:
        warm_s = time.monotonic() + WARM_UP_S
        while sent < WARM_UP or time.monotonic() < warm_s:
            await _send(client, numbers, PART)
            sent += PART
        found.append((sent, router.resident_mb()))
        for _ in range(PARTS):
            await _send(client, numbers, requests // PARTS)
            sent += requests // PARTS
            found.append((sent, router.resident_mb()))
    return found


async def _send(client: Client, numbers: Iterator[int], requests: int) -> None:
    left = iter(range(requests))

    async def work() -> None:
        for _ in left:
            answer = await client.post(CHAT, ROWS[0].body(next(numbers)))
            assert answer.status == 200, answer

    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
