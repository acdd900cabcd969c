"""Calls whose prompts are token ids, and what the gateway said and the engine found of them in its cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import httpx

from e2e.real_engines.engine import MODEL
from e2e.server_process import Server
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS
from tests.waiting import WITHIN_S


@dataclass(frozen=True)
class Placed:
    """A call's answer: where it was computed, its cached prompt tokens as predicted and as counted, and its E2E."""

    status: int
    engine: str
    predicted: int = 0
    cached: int = 0
    prompt: int = 0
    e2e_s: float = 0.0


async def send(gateway: Server, bodies: Iterable[dict[str, Any]], at_once: int, output_tokens: int) -> list[Placed]:
    """Send bodies with prompts in their order; what became of each."""
    limit, common = asyncio.Semaphore(at_once), {"model": MODEL, "max_tokens": output_tokens}
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=2 * WITHIN_S) as client:

        async def one(body: dict[str, Any]) -> Placed:
            async with limit:
                began_s = time.monotonic()
                answer = await client.post("/v1/completions", json={**common, **body})
                e2e_s = time.monotonic() - began_s
            if answer.status_code != 200:
                return Placed(answer.status_code, answer.text)
            usage, headers = answer.json()["usage"], answer.headers
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            predicted = int(headers["plait-cached-tokens"])
            return Placed(200, headers["plait-engine"], predicted, cached, usage["prompt_tokens"], e2e_s)

        return await asyncio.gather(*map(one, bodies))


def placed(gateway: Server, prompts: Iterable[Sequence[int]], at_once: int, output_tokens: int) -> list[Placed]:
    """Send prompts in their order, all of which have to be answered."""
    found = asyncio.run(send(gateway, [{"prompt": prompt} for prompt in prompts], at_once, output_tokens))
    assert [one for one in found if one.status != 200] == []
    return found


def cached_share(calls: Sequence[Placed]) -> float:
    """The share of all prompt tokens that the engines found cached."""
    return sum(one.cached for one in calls) / sum(one.prompt for one in calls)


def predicted_share(calls: Sequence[Placed]) -> float:
    """The share of all prompt tokens that the gateway predicted to be cached."""
    return sum(one.predicted for one in calls) / sum(one.prompt for one in calls)


def near_share(calls: Sequence[Placed]) -> float:
    """The share of the calls whose cached tokens were predicted to a tree block."""
    return fmean(abs(one.predicted - one.cached) <= TREE_BLOCK_TOKENS for one in calls)


def far_share(calls: Sequence[Placed]) -> float:
    """The share of the calls whose prediction was off by more than half of the prompt."""
    return fmean(abs(one.predicted - one.cached) > one.prompt / 2 for one in calls)
