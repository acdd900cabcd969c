"""What the gateway says about a call reaches the embedded engine's scheduler, on the emulated clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from plait.backends.profiles import load_profile
from plait.backends.protocol.cache_state import CacheState
from plait.backends.protocol.call_annotations import EngineAnnotations
from plait.backends.tokenization.loading import load_tokenizer
from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.completion import ServedModel, in_emulated_time
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.embedded.server import EmbeddedServer, ServerSettings
from plait.policy.prefix.block_hash import root_hash
from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.types import Objective, Slo

TIME_SCALE = 1000.0


@asynccontextmanager
async def serving(scheduler: str = "slo") -> AsyncIterator[tuple[EmbeddedServer, httpx.AsyncClient]]:
    settings = ServerSettings(
        engine=EngineSettings(name="e", model="m", kv_tokens=4000, scheduler=scheduler),
        cost_model=load_profile("a6000-mistral-7b").cost_model(),
        model=ServedModel("m", load_tokenizer("bytes"), 4000),
        time_scale=TIME_SCALE,
    )
    server = EmbeddedServer(settings)
    transport = httpx.ASGITransport(server.app)
    async with (
        server.app.router.lifespan_context(server.app),
        httpx.AsyncClient(transport=transport, base_url="http://engine") as http,
    ):
        yield server, http


async def received(monkeypatch: pytest.MonkeyPatch, annotations: dict[str, Any]) -> EmbeddedCall:
    """The call that an annotated request becomes."""
    calls: list[EmbeddedCall] = []
    add = Engine.add

    def recording(engine: Engine, call: EmbeddedCall) -> None:
        calls.append(call)
        add(engine, call)

    monkeypatch.setattr(Engine, "add", recording)
    async with serving() as (_, http):
        body = {"model": "m", "prompt": "hi", "max_tokens": 2, "vllm_xargs": annotations}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
    (call,) = calls
    return call


async def test_a_call_carries_what_it_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    annotations = {
        "plait_ttft_ms": 200,
        "plait_tpot_ms": "50",
        "plait_jct_ms": 9000,
        "plait_age_ms": 1500,
        "plait_objective": "latency",
        "plait_priority": -2,
    }
    call = await received(monkeypatch, annotations)
    assert call.slo is not None
    assert call.slo is not None
    assert call.slo[:3] == pytest.approx((0.2 * TIME_SCALE, 0.05 * TIME_SCALE, 9.0 * TIME_SCALE))
    assert (call.objective, call.priority, call.max_output_tokens) == (Objective.LATENCY, -2, 2)
    assert call.received_s is not None
    assert call.received_s - call.arrived_s == pytest.approx(1.5 * TIME_SCALE)


async def test_a_bad_annotation_is_as_if_it_were_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    call = await received(monkeypatch, {"plait_ttft_ms": -1, "plait_age_ms": "soon", "plait_priority": [], "other": 1})
    assert (call.slo, call.priority, call.arrived_s) == (None, 0, call.received_s)


def test_objectives_are_in_real_time_and_the_engine_is_not() -> None:
    given = EngineAnnotations(age_s=2.0, slo=Slo(ttft_s=1.0, jct_s=3.0), priority=4)
    assert in_emulated_time(given, 10.0) == EngineAnnotations(age_s=20.0, slo=Slo(ttft_s=10.0, jct_s=30.0), priority=4)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_every_scheduler_serves_and_is_reported(scheduler: str) -> None:
    async with serving(scheduler) as (server, http):
        body = {"model": "m", "prompt": "hi", "max_tokens": 3, "vllm_xargs": {"plait_ttft_ms": 500}}
        response = await http.post("/v1/completions", json=body)
        assert response.json()["usage"]["completion_tokens"] == 3
        state: CacheState = server.engines[0].cache_state()
        assert state.scheduler.policy == scheduler


def test_calls_wait_in_the_order_of_their_zeros() -> None:
    engine = Engine(EngineSettings(name="e", model="m", kv_tokens=4000), load_profile("a6000-mistral-7b").cost_model())
    chain = HashChain(64, root_hash("m"), [1])
    for name, arrived_s in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        engine.add(EmbeddedCall(name, arrived_s, 1, chain=chain, tree_chain=chain, final_output_tokens=1))
    assert [call.call_id for call in engine.waiting] == ["a", "b", "c"]
