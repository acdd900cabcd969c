"""Sends a workload to real servers over HTTP, each call at its time, and records the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from plait.backends.http.client import HttpClient, Response
from plait.gateway.answers.completion_stream import CompletionStream
from plait.gateway.asgi import header
from plait.gateway.simulation.compare import Workload
from plait.gateway.simulation.processes import FleetPlan
from plait.gateway.simulation.simulated_call import CallRecord
from plait.gateway.simulation.workload import WorkloadCall
from plait.policy.types import PlacementReason


async def send_workload(
    plan: FleetPlan, workload: Workload, arrivals_s: Sequence[float], progress: Callable[[int], None]
) -> list[CallRecord]:
    """Begin each session of the workload at the plan's gateway, `arrivals_s` emulated seconds from now.

    The records are in the order of the calls; their times are emulated seconds too. Raises RuntimeError for a call that
    is not answered in full.
    """
    client = HttpClient(plan.url)
    loop = asyncio.get_running_loop()
    zero = loop.time()
    finished = 0

    def now_s() -> float:
        return (loop.time() - zero) * plan.time_scale

    async def send(numbers: Sequence[int], begins_s: float) -> list[CallRecord]:
        records: list[CallRecord] = []
        due_s = begins_s
        for number in numbers:
            call = workload.calls[number]
            due_s += call.think_s
            await asyncio.sleep((due_s - now_s()) / plan.time_scale)
            records.append(await _send(client, plan.model, call, now_s))
            due_s = records[-1].finished_s
            nonlocal finished
            finished += 1
            progress(finished)
        return records

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(*pair)) for pair in zip(workload.sessions(), arrivals_s, strict=True)]
    finally:
        await client.aclose()
    return [record for task in tasks for record in task.result()]


async def _send(client: HttpClient, model: str, call: WorkloadCall, now_s: Callable[[], float]) -> CallRecord:
    body = {
        "model": model,
        "messages": call.messages,
        "max_tokens": call.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if call.session:
        body["prompt_cache_key"] = call.session
    if call.tools is not None:
        body["tools"] = call.tools
    arrived_s = now_s()
    response = await client.post(
        "/v1/chat/completions", [(b"content-type", b"application/json")], msgspec.json.encode(body)
    )
    stream, first_token_s = CompletionStream("gateway", withhold=False), 0.0
    while piece := await response.read_chunk():
        first_token_s = first_token_s or now_s()
        stream.feed(piece)
    if response.status != 200 or stream.usage is None:
        raise RuntimeError(f"a call on {call.prefix} failed: status {response.status}, or an answer without usage")
    return CallRecord(
        prefix=call.prefix,
        engine_id=_header(response, b"plait-engine"),
        reason=PlacementReason(_header(response, b"plait-placement")),
        prompt_tokens=stream.usage.prompt_tokens,
        output_tokens=stream.usage.output_tokens,
        predicted_cached_tokens=int(_header(response, b"plait-cached-tokens")),
        arrived_s=arrived_s,
        cached_tokens=stream.usage.cached_tokens or 0,
        first_token_s=first_token_s,
        finished_s=now_s(),
    )


def _header(response: Response, name: bytes) -> str:
    value = header(response.headers, name)
    if value is None:
        raise RuntimeError(f"the gateway's answer lacks its {name.decode()} header")
    return value
