"""What an engine without the adapter counts in its own `/metrics`: calls, and its KV cache.

vLLM and SGLang (with `--enable-metrics`) have these under names of their own. They say how many calls others have sent
to the engine, and whether calls wait in it.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import Final

import httpx

from plait.gateway.config import EngineConfig, UpstreamConfig
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.offer import EngineCounts
from plait.gateway.fleet.router import Router
from plait.gateway.membership.probes import probe_client
from plait.policy.placement.engine_view import sent_calls

PATH: Final = "/metrics"
INTERVAL_S: Final = 0.2
WITHOUT_S: Final = 60.0
"""The pause after an answer without such counts."""
NOT_ASKED_S: Final = 1.0
"""The pause while an engine reports, or is out."""

MAX_BYTES: Final = 4 * 2**20
"""Of the metrics. vLLM's have some 100 kB."""
MOST: Final = 100_000
MOST_KV: Final = 2**28
"""More than any engine has, of calls and of tokens in a KV cache."""

SKEW: Final = 1
"""So many calls may have come to an engine, or left it, since it has counted."""

_SAMPLE: Final = re.compile(
    rb"^(?:vllm:num_requests_(?P<vllm>running|waiting)|sglang:num_(?P<sglang>running|queue)_reqs|"
    rb"sglang:(?P<tokens>max_total_num_tokens)|vllm:(?P<cache>cache_config_info))"
    rb"(?:\{(?P<labels>[^}\n]*)\})? (?P<value>[0-9]{1,12}(?:\.[0-9]{1,12})?(?:e\+0[0-9])?)$",
    re.MULTILINE,
)
_BLOCKS: Final = re.compile(rb'(?:^|,)(num_gpu_blocks|block_size)="(\d{1,12})"')


def read_counts(text: bytes) -> EngineCounts | None:
    """The counts in an exposition of metrics, summed over an engine's cores; None if there are none."""
    running = waiting = 0
    kv_tokens, found = 0, False
    for sample in _SAMPLE.finditer(text):
        kind, value = sample["vllm"] or sample["sglang"], float(sample["value"])
        if kind is not None:
            found = True
            running, waiting = (
                (running + int(value), waiting) if kind == b"running" else (running, waiting + int(value))
            )
        elif sample["tokens"] is not None:
            kv_tokens += int(value)
        else:
            blocks = {name: int(number) for name, number in _BLOCKS.findall(sample["labels"] or b"")}
            kv_tokens += blocks.get(b"num_gpu_blocks", 0) * blocks.get(b"block_size", 0)
    return EngineCounts(min(running, MOST), min(waiting, MOST), min(kv_tokens, MOST_KV) or None) if found else None


def apply_counts(engine: FleetEngine, counts: EngineCounts | None) -> None:
    """Take over what an engine counts (None: nothing any more). One in which calls wait runs as many as it can."""
    engine.counts = counts
    view = engine.view
    if counts is None:
        view.use_report()
        return
    others = max(0, counts.running + counts.waiting - sent_calls(view) - SKEW)
    view.use_report(slots=counts.running if counts.waiting else 0, others=others)
    if counts.kv_tokens is not None:
        engine.cache.kv_tokens = counts.kv_tokens


async def _asked(http: httpx.AsyncClient, within_s: float) -> EngineCounts | None:
    """What an engine counts now; None if it does not, or has more metrics than any. Raises `httpx.HTTPError`."""
    text = bytearray()
    async with asyncio.timeout(within_s), http.stream("GET", PATH) as answer:
        async for piece in answer.aiter_bytes():
            text += piece
            if len(text) > MAX_BYTES:
                return None
        return read_counts(bytes(text)) if answer.status_code == 200 else None


async def follow_counts(router: Router, config: EngineConfig, upstream: UpstreamConfig) -> None:
    """Read the counts of an engine while it takes calls and does not report, until cancelled."""
    async with probe_client(config, upstream) as http:
        while True:
            engine, counts = router.engines[config.name], None
            cache = engine.cache
            is_asked = cache.reports is False and cache.kind is None and engine.health.takes_calls
            if is_asked:
                with suppress(httpx.HTTPError, TimeoutError):
                    counts = await _asked(http, upstream.probe_timeout_s)
            if cache.kind is None and (counts is not None or engine.counts is not None):
                apply_counts(
                    engine, counts if config.kv_tokens is None or counts is None else counts._replace(kv_tokens=None)
                )
                router.on_room(config.name)
            pause_s = WITHOUT_S if counts is None else INTERVAL_S
            await asyncio.sleep(pause_s if is_asked else NOT_ASKED_S)
