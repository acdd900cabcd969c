"""Overload: more calls than engines can serve, from unequal tenants: `python -m benchmarks overload`.

Two embedded engines in real time behind the gateway. First its peak is measured in a closed loop. Then an open loop
sends `--times` as much: three equal tenants with a TTFT objective and one that sends twenty times as much as each of
them. The same load runs with the gateway's queue and without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.servers import Fleet, Launcher

EQUALS: Final = ("a", "b", "c")
GREEDY: Final = "greedy"
GREEDY_TIMES: Final = 20
SLO_TTFT_S: Final = 12.0
OUTPUT_TOKENS: Final = 60
WORDS: Final = 300
PEAK_CONCURRENCY: Final = 96
MAX_WAIT_S: Final = 20.0
BACKLOG_S: Final = 2.0
TTFT_MARGIN: Final = 1.5
"""The queue is bounded by predicted times; what is promised may be so many times as long."""

OFF: Final = {"engine_backlog_s": 1e8, "max_wait_s": 1e8}
ON: Final = {"engine_backlog_s": BACKLOG_S, "max_wait_s": MAX_WAIT_S}


@dataclass
class Result:
    """One run. `good_calls_s` counts answered calls a second, `tokens` what each tenant got."""

    name: str
    seconds: float
    sent: dict[str, int]
    answered: dict[str, int]
    refused: dict[str, int]
    good_calls_s: float = 0.0
    ttft_p50_s: float = 0.0
    ttft_p99_s: float = 0.0
    slo_attainment: float = 0.0
    wrong: dict[str, int] = field(default_factory=dict)


def main() -> None:
    """Measure, print, and say whether the targets hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks overload")
    parser.add_argument("--seconds", type=float, default=120.0, help="of overload (default: %(default)s)")
    parser.add_argument("--times", type=float, default=5.0, help="the peak (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report there")
    arguments = parser.parse_args()
    peak, on, off = asyncio.run(_measure(arguments.seconds, arguments.times))
    held = claims(peak, on, off)
    for result in (peak, on, off):
        print(json.dumps(asdict(result)))
    for claim in held:
        print(f"{'holds' if claim['holds'] else 'FAILS'}: {claim['name']} = {claim['value']}, wanted {claim['target']}")
    if arguments.json is not None:
        report = {"results": [asdict(result) for result in (peak, on, off)], "claims": held}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(not all(claim["holds"] for claim in held))


def claims(peak: Result, on: Result, off: Result) -> list[dict[str, Any]]:
    """The figures that are promised of overload."""
    share = on.good_calls_s * on.seconds / 4
    least = min(on.answered.get(name, 0) / min(on.sent[name], share) for name in EQUALS)
    return [
        _claim("goodput under overload over the peak's", on.good_calls_s / peak.good_calls_s, 0.9, at_least=True),
        _claim("TTFT p99 of admitted calls, s", on.ttft_p99_s, TTFT_MARGIN * (MAX_WAIT_S + BACKLOG_S), at_least=False),
        _claim("least share of an equal tenant, of its own", least, 0.9, at_least=True),
        _claim(
            "SLO attainment of annotated calls, over that without the queue",
            on.slo_attainment - off.slo_attainment,
            0.0,
            at_least=True,
        ),
    ]


def _claim(name: str, value: float, target: float, *, at_least: bool) -> dict[str, Any]:
    holds = value >= target if at_least else value <= target
    return {"name": name, "value": round(value, 4), "target": target, "holds": holds}


async def _measure(seconds: float, times: float) -> tuple[Result, Result, Result]:
    with tempfile.TemporaryDirectory() as folder, Launcher(Path(folder)) as launch:
        engines = [launch.engine(name, time_scale=1) for name in ("one", "two")]
        keys = {"api_keys": [*EQUALS, GREEDY]}
        gateways = {
            name: launch.gateway(engines, name, server=keys, log={"level": "warning"}, admission=settings)
            for name, settings in (("on", ON), ("off", OFF))
        }
        await asyncio.to_thread(Fleet(gateways["on"], {engine.name: engine for engine in engines}).start)
        gateways["off"].start()
        await asyncio.to_thread(gateways["off"].wait_until_ready)
        peak = await _closed_loop(gateways["on"].port, min(30.0, seconds))
        results = [peak]
        for name in ("on", "off"):
            await asyncio.sleep(5)
            results.append(await _open_loop(name, gateways[name].port, seconds, times * peak.good_calls_s))
        for gateway in gateways.values():
            gateway.kill()  # calls still wait: a graceful end would take long, and is measured elsewhere
    return results[0], results[1], results[2]


async def _closed_loop(port: int, seconds: float) -> Result:
    """As many calls as are answered, in the second half: the first fills the engines."""
    ends_s = time.monotonic() + seconds
    answers: list[tuple[str, Answer]] = []
    async with Client(port, 120.0) as client:

        async def work(number: int) -> None:
            dice = random.Random(number)
            while time.monotonic() < ends_s:
                answers.append((GREEDY, await _call(client, GREEDY, dice)))

        await asyncio.gather(*(work(number) for number in range(PEAK_CONCURRENCY)))
    settled = [(tenant, answer) for tenant, answer in answers if answer.ended_s > ends_s - seconds / 2]
    return _result("peak", seconds / 2, settled, ends_s)


async def _open_loop(name: str, port: int, seconds: float, calls_s: float) -> Result:
    dice, answers, tasks = random.Random(1), list[tuple[str, Answer]](), set[asyncio.Task[None]]()
    ends_s = time.monotonic() + seconds
    async with Client(port, 4 * seconds + 60) as client:

        async def send(tenant: str, seed: int) -> None:
            answers.append((tenant, await _call(client, tenant, random.Random(seed))))

        due_s, number = time.monotonic(), 0
        while due_s < ends_s:
            due_s, number = due_s + dice.expovariate(calls_s), number + 1
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            (tenant,) = dice.choices((*EQUALS, GREEDY), (1, 1, 1, GREEDY_TIMES))
            tasks.add(asyncio.create_task(send(tenant, number)))
        await asyncio.sleep(max(0.0, ends_s + MAX_WAIT_S + BACKLOG_S - time.monotonic()))
        for task in tasks:
            task.cancel()
        sent = len(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)
    result = _result(name, seconds, answers, ends_s)
    result.wrong["no answer in time"] = sent - len(answers)
    return result


async def _call(client: Client, tenant: str, dice: random.Random) -> Answer:
    text = " ".join(dice.choices(("red", "green", "blue", "seven", "house", "river"), k=WORDS))
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": OUTPUT_TOKENS}
    headers = {"authorization": f"Bearer {tenant}"}
    if tenant in EQUALS:
        headers["plait-slo-ttft-ms"] = str(1e3 * SLO_TTFT_S)
    return await client.post(CHAT, {**body, "stream": True, "ignore_eos": True}, headers)


def _result(name: str, seconds: float, answers: Sequence[tuple[str, Answer]], ends_s: float) -> Result:
    """What came within the run. A refused call has missed its objective."""
    good = [(tenant, answer) for tenant, answer in answers if answer.status == 200 and not answer.broken]
    times_s = sorted(answer.first_s - answer.began_s for _, answer in good if answer.first_s is not None)
    annotated = [answer for tenant, answer in answers if tenant in EQUALS]
    met = sum(
        answer.status == 200 and answer.first_s is not None and answer.first_s - answer.began_s <= SLO_TTFT_S
        for answer in annotated
    )
    other = [answer for _, answer in answers if answer.status not in {200, 429} or answer.broken]
    return Result(
        name,
        seconds,
        sent=dict(Counter(tenant for tenant, _ in answers)),
        answered=dict(Counter(tenant for tenant, _ in good)),
        refused=dict(Counter(tenant for tenant, answer in answers if answer.status == 429)),
        good_calls_s=sum(answer.ended_s <= ends_s for _, answer in good) / seconds,
        ttft_p50_s=times_s[len(times_s) // 2] if times_s else 0.0,
        ttft_p99_s=times_s[int(0.99 * (len(times_s) - 1))] if times_s else 0.0,
        slo_attainment=met / len(annotated) if annotated else 0.0,
        wrong=dict(Counter(answer.broken or str(answer.status) for answer in other)),
    )


if __name__ == "__main__":
    main()
