"""Three tenants in real time, one of which sends twenty times as much: real processes, the configuration that ships.

The calls are those in virtual time, at the same times.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.filling.live import SHIPPED, TIMEOUT_S, WORDS, is_whole, lost, post, ttfts_s, usage
from benchmarks.filling.tenants import HEAVY, SHAPES, WEIGHTS, Asked, Contest, calls_of
from e2e.faults.raw_client import Answer, Client
from e2e.servers import Fleet, Launcher


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """What came of a run: times in seconds, tokens of prompts and answers a second. `lost` says what came instead."""

    light_calls: int
    light_lost: dict[str, int]
    light_ttft_p50_s: float
    light_ttft_p90_s: float
    light_ttft_p99_s: float
    heavy_calls: int
    heavy_lost: dict[str, int]
    heavy_ttft_p50_s: float
    heavy_ttft_p90_s: float
    tokens_s: float
    engines_suspected: float


def run_live(contest: Contest) -> LiveFigures:
    """Send the calls of all three tenants."""
    return asyncio.run(_run(contest))


async def _run(contest: Contest) -> LiveFigures:
    tenants: list[Mapping[str, Any]] = [{"name": name, "api_keys": [_key(name)]} for name in WEIGHTS]
    with tempfile.TemporaryDirectory() as folder, Launcher(Path(folder)) as launch:
        engines = [launch.engine(f"e{number}", time_scale=1) for number in range(contest.engines)]
        gateway = launch.gateway(engines, "gateway", tenants=tenants, upstream=SHIPPED)
        await asyncio.to_thread(Fleet(gateway, {engine.name: engine for engine in engines}).start)
        async with Client(gateway.port, TIMEOUT_S) as client:
            answers = await _ask(contest, client, calls_of(contest))
        changes = await asyncio.to_thread(gateway.metric, "plait_engine_health_changes_total")
    return _figures(answers, changes - contest.engines)


async def _ask(contest: Contest, client: Client, calls: Sequence[Asked]) -> list[tuple[Asked, Answer]]:
    """Send the calls at their times; returns each with its answer."""
    ratio = await _words_a_token(client)
    prefixes = {
        shape: [
            _words(f"prefix {n}", ratio * tokens) for n, tokens in enumerate(shape.prefix_lengths(), shape.first_id)
        ]
        for shape in SHAPES.values()
    }

    async def ask(number: int, call: Asked) -> tuple[Asked, Answer]:
        question = _words(f"{contest.seed}/{number}", ratio * call.question_tokens)
        headers = {"authorization": f"Bearer {_key(call.tenant if contest.fair else HEAVY)}"}
        if contest.conversations:
            headers["x-session-id"] = call.tenant
        if contest.ttft_s is not None and call.tenant == HEAVY:
            headers["plait-slo-ttft-ms"] = str(round(1e3 * contest.ttft_s))
        if contest.objective is not None and call.tenant == HEAVY:
            headers["plait-objective"] = contest.objective
        prefix = prefixes[contest.shape_of(call.tenant)][call.prefix]
        return call, await post(client, f"{prefix}\n{question}", call.answer_tokens, headers)

    tasks, begins_s = list[asyncio.Task[tuple[Asked, Answer]]](), time.monotonic()
    for number, call in enumerate(calls):
        await asyncio.sleep(max(0.0, begins_s + call.at_s - time.monotonic()))
        tasks.append(asyncio.create_task(ask(number, call)))
    return await asyncio.gather(*tasks)


async def _words_a_token(client: Client) -> float:
    probe = await post(client, _words("probe", 1_000), 1, {"authorization": f"Bearer {_key(HEAVY)}"})
    return 1_000 / usage(probe)[0]


def _words(seed: str, words: float) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=max(1, round(words))))


def _key(tenant: str) -> str:
    return f"key-of-{tenant}"


def _figures(answers: Sequence[tuple[Asked, Answer]], suspected: float) -> LiveFigures:
    light = [answer for call, answer in answers if call.tenant != HEAVY]
    heavy = [answer for call, answer in answers if call.tenant == HEAVY]
    whole = [answer for _, answer in answers if is_whole(answer)]
    took_s = max(answer.began_s + answer.time_s for answer in whole) - min(answer.began_s for answer in whole)
    usages = [usage(answer) for answer in whole]
    light_s, heavy_s = ttfts_s(light), ttfts_s(heavy)
    return LiveFigures(
        light_calls=len(light),
        light_lost=lost(light),
        light_ttft_p50_s=median(light_s),
        light_ttft_p90_s=light_s[int(0.9 * (len(light_s) - 1))],
        light_ttft_p99_s=light_s[int(0.99 * (len(light_s) - 1))],
        heavy_calls=len(heavy),
        heavy_lost=lost(heavy),
        heavy_ttft_p50_s=median(heavy_s),
        heavy_ttft_p90_s=heavy_s[int(0.9 * (len(heavy_s) - 1))],
        tokens_s=sum(prompt + output for prompt, _, output in usages) / took_s,
        engines_suspected=suspected,
    )
