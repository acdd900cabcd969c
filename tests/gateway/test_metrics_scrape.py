from __future__ import annotations

import asyncio

from prometheus_client import generate_latest

from plait.gateway.metrics import MOST_LABEL_SETS, SAMPLES_AT_ONCE, FastCounter, FastHistogram, new_registry, scrape
from tests.gateway.exposed import samples

LABELS = ("tenant", "model")


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


def test_label_sets_beyond_the_most_count_as_other() -> None:
    registry = new_registry()
    counter, histogram = FastCounter("plait_x", "A text", LABELS), FastHistogram("plait_y", "A text", LABELS, (0.1,))
    registry.register(counter)
    registry.register(histogram)
    for number in range(MOST_LABEL_SETS + 3):
        counter.of[f"tenant-{number}", "m"].inc()
        histogram.of[f"tenant-{number}", "m"].observe(1.0)
    counter.of["tenant-0", "m"].inc()
    found = samples(registry)
    assert len(counter.of) == len(histogram.of) == MOST_LABEL_SETS + 1
    assert found['plait_x_total{model="m",tenant="tenant-0"}'] == 2
    for name in ("plait_x_total", "plait_y_count"):
        assert found[f'{name}{{model="other",tenant="other"}}'] == 3
        assert f'{name}{{model="m",tenant="tenant-{MOST_LABEL_SETS}"}}' not in found
