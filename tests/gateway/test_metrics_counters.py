from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Counter, generate_latest

from plait.gateway.metrics import SAMPLES_AT_ONCE, FastCounter, FastHistogram, exposition, new_registry, scrape


def test_a_fast_counter_shows_what_a_counter_of_prometheus_client_shows() -> None:
    new_registry()  # without the `_created` series
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    counter = Counter("plait_x", "A text", ["model", "engine"], registry=theirs)
    fast = FastCounter("plait_x", "A text", ["model", "engine"])
    ours.register(fast)
    assert exposition(ours) == exposition(theirs)
    for engine_id, amount in (("a", 1.0), ("b\n", 64.0), ("a", 0.0), ("a", 2.0)):
        counter.labels("m", engine_id).inc(amount)
        fast.of("m", engine_id).inc(amount)
    assert exposition(ours) == exposition(theirs)


async def test_a_scrape_lets_the_loop_have_its_turns_and_shows_the_same() -> None:
    registry = new_registry()
    histogram = FastHistogram("plait_y_seconds", "A text\nin two lines", ["engine"], (0.1, 1.0))
    registry.register(histogram)
    for number in range(SAMPLES_AT_ONCE):
        histogram.of(f"engine-{number}").observe(number)
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
