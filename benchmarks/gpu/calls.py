"""Sends calls to a gateway or an engine and times their tokens."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from benchmarks.gpu.engines import MODEL
from plait.backends.errors import PlaitError
from plait.backends.http.client import HttpClient
from plait.lab.profiling.timed_stream import TimedStream, read_stream

Prompt = Sequence[int]
"""Token ids."""

TOKEN_IDS = range(300, 8000)
"""Ids that the tokenizer has for ordinary text."""


@dataclass(frozen=True, slots=True)
class Served:
    """A call's stream, and what the gateway said of it: its engine, and the prompt tokens it expected to be cached."""

    stream: TimedStream
    engine: str
    predicted_tokens: int | None

    @property
    def cached_tokens(self) -> int:
        """The prompt tokens that the engine found in its cache."""
        return self.stream.cached_tokens or 0

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.stream.ttft_s

    @property
    def tpot_s(self) -> float:
        """The mean time of a token after the first; 0 if there is none."""
        (first_s, first), (last_s, last) = self.stream.arrivals[0], self.stream.arrivals[-1]
        return (last_s - first_s) / (last - first) if last > first else 0.0


@dataclass(frozen=True, slots=True)
class Due:
    """A call to be sent `at_s` seconds from the start, with headers."""

    at_s: float
    prompt: Prompt
    output_tokens: int
    headers: Mapping[str, str]


class Caller:
    """Sends completions to one server."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def complete(self, prompt: Prompt, output_tokens: int, headers: Mapping[str, str] | None = None) -> Served:
        """One completion of exactly so many tokens. Raises ValueError or PlaitError for anything else."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = [(b"content-type", b"application/json")]
        sent += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        sent_s = time.perf_counter()
        response = await self._client.request("POST", "/v1/completions", sent, msgspec.json.encode(body))
        if response.status != 200:
            raise ValueError(f"status {response.status}: {(await response.read())[:300]!r}")
        said = dict(response.headers)
        predicted = said.get(b"plait-cached-tokens")
        stream = await read_stream(response, sent_s, time.perf_counter)
        return Served(stream, said.get(b"plait-engine", b"").decode(), None if predicted is None else int(predicted))

    async def on_time(self, calls: Iterable[Due], limit_s: float) -> list[Served | str]:
        """Each call at its time, whatever is under way then. What runs after `limit_s` is cancelled.

        Returns what became of each call, or why it failed.
        """
        zero_s = time.perf_counter()

        async def send(call: Due) -> Served | str:
            try:
                async with asyncio.timeout(limit_s):
                    await asyncio.sleep(zero_s + call.at_s - time.perf_counter())
                    return await self.complete(call.prompt, call.output_tokens, call.headers)
            except TimeoutError:
                return f"not done after {limit_s:.1f} s"
            except (ValueError, PlaitError) as error:
                return str(error)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(call)) for call in calls]
        return [task.result() for task in tasks]


@asynccontextmanager
async def caller(url: str) -> AsyncIterator[Caller]:
    """Calls to the server at `url`; the end closes the connections."""
    client = HttpClient(url)
    try:
        yield Caller(client)
    finally:
        await client.aclose()


def fresh(rng: random.Random, tokens: int) -> list[int]:
    """A prompt that no other call has."""
    return rng.choices(TOKEN_IDS, k=tokens)


def mean(values: Sequence[float]) -> float:
    """Their mean; 0 if there are none."""
    return sum(values) / len(values) if values else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of them is not above; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
