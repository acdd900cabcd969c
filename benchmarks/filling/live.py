"""The documents in real time: real processes and sockets, and a gateway with the configuration that ships."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.filling.workloads import DOCUMENT_LENGTHS, zipf
from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.servers import Fleet, Launcher
from plait.gateway.config.sections import UpstreamConfig

ENGINES: Final = 4
DOCUMENTS: Final = 30
DOCUMENT_TOKENS: Final = 24_000
TIMEOUT_S: Final = 600.0
SHIPPED: Final = msgspec.structs.asdict(UpstreamConfig())
"""A gateway of tests polls its engines faster than this."""
WORDS: Final = ("red", "green", "blue", "seven", "house", "river", "north", "wind", "paper", "stone")


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """One run, times in seconds. `lost` counts the calls that were not answered in full, by what came instead."""

    sent: int
    ttft_mean_s: float
    ttft_p99_s: float
    e2e_mean_s: float
    hit_rate: float
    longest_wait_s: float
    lost: dict[str, int]


def run_live(rate: float, seconds: float, seed: int, engine_options: Sequence[str] = ()) -> LiveFigures:
    """Ask `rate` questions a second for so many seconds."""
    return asyncio.run(_run(rate, seconds, seed, engine_options))


async def _run(rate: float, seconds: float, seed: int, engine_options: Sequence[str]) -> LiveFigures:
    with tempfile.TemporaryDirectory() as folder, Launcher(Path(folder)) as launch:
        engines = [launch.engine(f"e{number}", time_scale=1, options=engine_options) for number in range(ENGINES)]
        gateway = launch.gateway(engines, "gateway", upstream=SHIPPED)
        await asyncio.to_thread(Fleet(gateway, {engine.name: engine for engine in engines}).start)
        async with Client(gateway.port, TIMEOUT_S) as client:
            documents = [_text(document, await _words(client)) for document in range(DOCUMENTS)]
            return await _ask(client, documents, rate, seconds, seed)


async def _ask(client: Client, documents: Sequence[str], rate: float, seconds: float, seed: int) -> LiveFigures:
    dice, answers = random.Random(seed), list[Answer]()
    asked = zipf(len(documents), dice)

    async def ask(number: int) -> None:
        own = random.Random(f"{seed}/{number}")
        question = " ".join(own.choices(WORDS, k=DOCUMENT_LENGTHS.draw_question(own)))
        prompt = f"{documents[next(asked)]}\n{question}"
        answers.append(await post(client, prompt, DOCUMENT_LENGTHS.draw_answer(own)))

    tasks, due_s = list[asyncio.Task[None]](), time.monotonic()
    ends_s = due_s + seconds
    while (due_s := due_s + dice.expovariate(rate)) < ends_s:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        tasks.append(asyncio.create_task(ask(len(tasks))))
    await asyncio.gather(*tasks)
    return _figures(answers)


async def post(client: Client, text: str, max_tokens: int, headers: Mapping[str, str] | None = None) -> Answer:
    """The answer to one message, a stream of so many tokens."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return await client.post(CHAT, body, headers)


async def _words(client: Client) -> int:
    """How many words make a document."""
    probe = await post(client, _text(-1, 1_000), 1)
    return round(DOCUMENT_TOKENS * 1_000 / usage(probe)[0])


def _text(document: int, words: int) -> str:
    return " ".join(random.Random(f"document {document}").choices(WORDS, k=words))


def _figures(answers: Sequence[Answer]) -> LiveFigures:
    good = [answer for answer in answers if is_whole(answer)]
    waits_s, usages = ttfts_s(good), [usage(answer) for answer in good]
    return LiveFigures(
        sent=len(answers),
        ttft_mean_s=statistics.fmean(waits_s),
        ttft_p99_s=waits_s[int(0.99 * (len(waits_s) - 1))],
        e2e_mean_s=statistics.fmean(answer.time_s for answer in good),
        hit_rate=sum(cached for _, cached, _ in usages) / sum(prompt for prompt, _, _ in usages),
        longest_wait_s=waits_s[-1],
        lost=lost(answers),
    )


def is_whole(answer: Answer) -> bool:
    """Whether the stream came to its end."""
    return answer.status == 200 and not answer.broken and b"[DONE]" in answer.body


def lost(answers: Sequence[Answer]) -> dict[str, int]:
    """What came instead of an answer, and how often."""
    return dict(Counter(answer.broken or str(answer.status) for answer in answers if not is_whole(answer)))


def ttfts_s(answers: Sequence[Answer]) -> list[float]:
    """The times to the first tokens of whole answers, in ascending order."""
    return sorted(one.first_s - one.began_s for one in answers if is_whole(one) and one.first_s is not None)


def usage(answer: Answer) -> tuple[int, int, int]:
    """The tokens of the prompt, those of it that were cached, and those of the answer."""
    found = next(event["usage"] for event in _events(answer) if event.get("usage"))
    cached = (found.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return found["prompt_tokens"], cached, found["completion_tokens"]


def _events(answer: Answer) -> Iterator[dict]:  # type: ignore[type-arg]
    for line in answer.body.splitlines():
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
