from __future__ import annotations

import asyncio

from prometheus_client import generate_latest

from plait.gateway.calls.metrics import FastHistogram
from plait.gateway.metrics import SAMPLES_AT_ONCE, new_registry, scrape


async def test_a_scrape_lets_the_loop_have_its_turns_and_shows_the_same() -> None:
    registry = new_registry()
    histogram = FastHistogram("plait_y_seconds", "A text\nin two lines", ["engine"], (0.1, 1.0))
    registry.register(histogram)
    for number in range(SAMPLES_AT_ONCE):
        histogram.of[(f"engine-{number}",)].observe(number)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    text = await scrape(registry)
    counting.cancel()
    assert turns >= len(text.splitlines()) / SAMPLES_AT_ONCE

    ours = [line for line in text.splitlines() if b"plait_y" in line]
    theirs = [line for line in generate_latest(registry).splitlines() if b"plait_y" in line]
    assert ours == theirs
