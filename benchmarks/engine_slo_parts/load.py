"""Sends calls to an OpenAI-compatible server and times their tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.engine_slo_parts.workload import BenchCall
from e2e.real_engines.engine import MODEL
from plait.backends.http.client import HttpClient
from plait.lab.profiling.timed_stream import TimedStream, read_stream

_HEADERS = ((b"content-type", b"application/json"),)


@dataclass(frozen=True, slots=True)
class Served:
    """A call and when it was sent, had its first token and its last, in seconds on one clock."""

    call: BenchCall
    sent_s: float
    first_s: float
    last_s: float

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From sending to the last token."""
        return self.last_s - self.sent_s


class Load:
    """Load on the server at `url`; a client has to be closed on the event loop that used it.

    `annotations_field` is the field of a body that the engine takes annotations in.
    """

    def __init__(self, url: str, annotations_field: str) -> None:
        self._client = HttpClient(url)
        self._annotations_field = annotations_field

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def one_by_one(self, calls: Sequence[BenchCall]) -> list[Served]:
        """Each after the other's end, whenever it was meant to be sent."""
        return [await self._send(call, None) for call in calls]

    async def on_time(self, calls: Sequence[BenchCall], ttft_s: float) -> list[Served]:
        """Each at its time, however many are under way then; short ones are promised `ttft_s`."""
        zero_s = time.perf_counter()

        async def due(call: BenchCall) -> Served:
            await asyncio.sleep(zero_s + call.at_s - time.perf_counter())
            return await self._send(call, None if call.is_long else ttft_s)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(due(call)) for call in calls]
        return [task.result() for task in tasks]

    async def _send(self, call: BenchCall, ttft_s: float | None) -> Served:
        annotations = {} if ttft_s is None else {"plait_ttft_ms": ttft_s * 1e3}
        body = msgspec.json.encode(_request(call) | {self._annotations_field: annotations})
        sent_s = time.perf_counter()
        response = await self._client.request("POST", "/v1/completions", _HEADERS, body)
        if response.status != 200:
            raise ValueError(f"the server answers {response.status}: {(await response.read())[:500]!r}")
        return _served(call, await read_stream(response, sent_s, time.perf_counter))


def _request(call: BenchCall) -> dict[str, object]:
    """A call without annotations. A stock server has no use for them and ignores them."""
    return {
        "model": MODEL,
        "prompt": call.prompt,
        "max_tokens": call.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _served(call: BenchCall, stream: TimedStream) -> Served:
    (first_s, _), (last_s, tokens) = stream.arrivals[0], stream.arrivals[-1]
    if tokens != call.output_tokens or stream.prompt_tokens != len(call.prompt):
        raise ValueError(f"asked for {call.output_tokens} tokens, got {tokens} for {stream.prompt_tokens} of a prompt")
    return Served(call, stream.sent_s, first_s, last_s)
