"""Three tenants in real time, one of which sends twenty times as much: real processes, the configuration that ships.

The load is given in the fleet's saturation, which is found in virtual time: the calls a second that are completed if
all come at once.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.filling.live import SHIPPED, TIMEOUT_S, WORDS, is_whole, lost, post, ttfts_s, usage
from benchmarks.filling.systems import NONE, FleetSize, systems
from benchmarks.filling.workloads import EMPTY, FIRST_UNIQUE_ID, TOOL_LENGTHS, Lengths, extended, zipf
from e2e.faults.raw_client import Answer, Client
from e2e.servers import Fleet, Launcher
from plait.gateway.simulation.simulate import SimulatedCall

HEAVY: Final = "heavy"
WEIGHTS: Final = {HEAVY: 20, "light-1": 1, "light-2": 1}
"""How many calls each tenant sends, relative to the others."""
SATURATION_CALLS: Final = 1000


@dataclass(frozen=True, slots=True)
class Shape:
    """Calls with one of some shared prefixes, by Zipf's law. All lengths are in tokens."""

    prefixes: int
    prefix_tokens: tuple[int, int]
    lengths: Lengths

    def prefix_lengths(self) -> list[int]:
        """The length of each prefix."""
        dice = random.Random("prefixes")
        return [dice.randint(*self.prefix_tokens) for _ in range(self.prefixes)]


SHAPES: Final[Mapping[str, Shape]] = {
    "chat": Shape(1, (100, 100), Lengths((50, 1_500), (20, 600), 180)),
    "tools": Shape(200, (1_000, 8_000), TOOL_LENGTHS),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A call: who sends it when, and its lengths."""

    at_s: float
    tenant: str
    prefix: int
    question_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One run. With a `ttft_s`, each call of the heavy tenant has this TTFT. Not `fair`: all are one tenant's."""

    shape: str
    load: float
    seconds: float
    seed: int
    engines: int = 1
    ttft_s: float | None = None
    fair: bool = True


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """What came of a run: times in seconds, tokens of prompts and answers a second. `lost` says what came instead."""

    light_calls: int
    light_lost: dict[str, int]
    light_ttft_p50_s: float
    light_ttft_p99_s: float
    heavy_calls: int
    heavy_lost: dict[str, int]
    heavy_ttft_p50_s: float
    tokens_s: float
    engines_suspected: float


def run_tenants(contest: Contest) -> TenantFigures:
    """Send the calls of all three tenants."""
    return asyncio.run(_run(contest, contest.load * saturation_per_s(contest)))


def saturation_per_s(contest: Contest) -> float:
    """The calls a second that are completed in virtual time if all come at once."""
    shape, dice = SHAPES[contest.shape], random.Random(f"saturation of {contest.shape}")
    shared = [extended(EMPTY, prefix, tokens) for prefix, tokens in enumerate(shape.prefix_lengths())]
    asked, calls = zipf(shape.prefixes, dice), list[SimulatedCall]()
    for number in range(contest.engines * SATURATION_CALLS):
        prompt = extended(shared[next(asked)], FIRST_UNIQUE_ID + number, shape.lengths.draw_question(dice))
        calls.append(SimulatedCall(0.0, prompt, shape.lengths.draw_answer(dice)))
    _, simulation = systems(FleetSize(engines=contest.engines))[NONE](0)
    return len(calls) / max(record.finished_s for record in simulation.run(calls))


def calls_of(contest: Contest, rate: float) -> Iterator[Asked]:
    """The calls of a run, `rate` a second."""
    shape, dice, at_s = SHAPES[contest.shape], random.Random(contest.seed), 0.0
    asked = zipf(shape.prefixes, dice)
    while (at_s := at_s + dice.expovariate(rate)) < contest.seconds:
        (tenant,) = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))
        yield Asked(at_s, tenant, next(asked), shape.lengths.draw_question(dice), shape.lengths.draw_answer(dice))


async def _run(contest: Contest, rate: float) -> TenantFigures:
    """At `rate` calls a second."""
    tenants: list[Mapping[str, Any]] = [{"name": name, "api_keys": [_key(name)]} for name in WEIGHTS]
    with tempfile.TemporaryDirectory() as folder, Launcher(Path(folder)) as launch:
        engines = [launch.engine(f"e{number}", time_scale=1) for number in range(contest.engines)]
        gateway = launch.gateway(engines, "gateway", tenants=tenants, upstream=SHIPPED)
        await asyncio.to_thread(Fleet(gateway, {engine.name: engine for engine in engines}).start)
        async with Client(gateway.port, TIMEOUT_S) as client:
            answers = await _ask(contest, client, list(calls_of(contest, rate)))
        changes = await asyncio.to_thread(gateway.metric, "plait_engine_health_changes_total")
    return _figures(answers, changes - contest.engines)


async def _ask(contest: Contest, client: Client, calls: Sequence[Asked]) -> list[tuple[Asked, Answer]]:
    """Send the calls at their times; returns each with its answer."""
    ratio = await _words_a_token(client)
    prefixes = [
        _words(f"prefix {n}", ratio * tokens) for n, tokens in enumerate(SHAPES[contest.shape].prefix_lengths())
    ]

    async def ask(number: int, call: Asked) -> tuple[Asked, Answer]:
        question = _words(f"{contest.seed}/{number}", ratio * call.question_tokens)
        headers = {"authorization": f"Bearer {_key(call.tenant if contest.fair else HEAVY)}"}
        if contest.ttft_s is not None and call.tenant == HEAVY:
            headers["plait-slo-ttft-ms"] = str(round(1e3 * contest.ttft_s))
        return call, await post(client, f"{prefixes[call.prefix]}\n{question}", call.answer_tokens, headers)

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


def _figures(answers: Sequence[tuple[Asked, Answer]], suspected: float) -> TenantFigures:
    light = [answer for call, answer in answers if call.tenant != HEAVY]
    heavy = [answer for call, answer in answers if call.tenant == HEAVY]
    whole = [answer for _, answer in answers if is_whole(answer)]
    took_s = max(answer.began_s + answer.time_s for answer in whole) - min(answer.began_s for answer in whole)
    usages = [usage(answer) for answer in whole]
    light_s, heavy_s = ttfts_s(light), ttfts_s(heavy)
    return TenantFigures(
        light_calls=len(light),
        light_lost=lost(light),
        light_ttft_p50_s=median(light_s),
        light_ttft_p99_s=light_s[int(0.99 * (len(light_s) - 1))],
        heavy_calls=len(heavy),
        heavy_lost=lost(heavy),
        heavy_ttft_p50_s=median(heavy_s),
        tokens_s=sum(prompt + output for prompt, _, output in usages) / took_s,
        engines_suspected=suspected,
    )
