"""A server of several data-parallel ranks: which of them computes a call, and what is told of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from plait.backends.protocol.call_objectives import PATH as CALL_OBJECTIVES
from tests.lab.embedded.served_engine import KV_TOKENS, Served, serving

RANK = "X-Data-Parallel-Rank"
BLOCKS = KV_TOKENS // 16
PROMPT = "word " * 60


@pytest.fixture(params=[False, True], ids=["each by itself", "lockstep"])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    async with serving(ranks=3, lockstep=request.param) as served:
        yield served


async def complete(served: Served, rank: int | None, prompt: str = PROMPT) -> Any:
    headers = {} if rank is None else {RANK: str(rank)}
    body = {"model": "m", "prompt": prompt, "max_tokens": 4}
    response = await served.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["usage"]


def cached(usage: Any) -> int:
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))


async def state(served: Served, **query: str | int) -> Any:
    response = await served.http.get("/cache_state", params=query)
    assert response.status_code == 200, response.text
    return response.json()


async def samples(served: Served) -> dict[str, list[tuple[dict[str, str], float]]]:
    text = (await served.http.get("/metrics")).text
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        assert family.name not in found
        found[family.name] = [
            (sample.labels, sample.value) for sample in family.samples if "created" not in sample.name
        ]
    return found


async def test_each_rank_has_a_cache_of_its_own(served: Served) -> None:
    assert cached(await complete(served, 2)) == 0
    assert cached(await complete(served, 1)) == 0
    assert cached(await complete(served, 2)) > 200
    assert [engine.counters.calls for engine in served.server.engines] == [0, 1, 2]


async def test_calls_that_name_no_rank_are_balanced(served: Served) -> None:
    await asyncio.gather(*(complete(served, None, f"{number} {PROMPT}") for number in range(9)))
    assert [engine.counters.calls for engine in served.server.engines] == [3, 3, 3]


async def test_calls_avoid_a_rank_that_has_calls(served: Served) -> None:
    named = [complete(served, 1, f"{number} named {PROMPT}") for number in range(4)]
    await asyncio.gather(*named, *(complete(served, None, f"{number} {PROMPT}") for number in range(4)))
    assert [engine.counters.calls for engine in served.server.engines] == [2, 4, 2]


async def test_a_conversation_of_every_api_goes_to_the_named_rank(served: Served) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        "/v1/responses": {"input": "hi", "max_output_tokens": 2},
        "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    }
    for path, body in bodies.items():
        response = await served.http.post(path, json={"model": "m", **body}, headers={RANK: "2"})
        assert response.status_code == 200, response.text
    assert [engine.counters.calls for engine in served.server.engines] == [0, 0, 3]


@pytest.mark.parametrize("rank", ["-1", "3", "1.0", "", "one", "9" * 30, "+1", "1 2"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/responses", CALL_OBJECTIVES, "/tokenize"])
async def test_a_rank_that_is_not_there_is_refused(served: Served, path: str, rank: str) -> None:
    body = {"model": "m", "prompt": "hi", "input": "hi"}
    refused(await served.http.post(path, json=body, headers={RANK: rank}), "x-data-parallel-rank", rank)
    assert sum(engine.counters.calls for engine in served.server.engines) == 0


@pytest.mark.parametrize("rank", ["-1", "3", "x"])
async def test_there_is_no_report_of_a_rank_that_is_not_there(served: Served, rank: str) -> None:
    refused(await served.http.get("/cache_state", params={"rank": rank}), "rank", rank)


def refused(response: httpx.Response, param: str, rank: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    no_rank = "this server has no data-parallel rank 3, but 0 to 2"
    assert error["message"] in {no_rank, f"'{param}' must be a whole number, not {rank!r}"}


async def test_each_rank_reports_its_own_cache(served: Served) -> None:
    await complete(served, 1)
    first, second, third = [await state(served, rank=rank) for rank in range(3)]
    assert [(one["rank"], one["ranks"], one["engine"]) for one in (first, second, third)] == [
        (0, 3, "e@0"), (1, 3, "e@1"), (2, 3, "e@2"),
    ]  # fmt: skip
    assert await state(served) == first
    assert len({one["epoch"] for one in (first, second, third)}) == 3
    assert (first["stored"], third["stored"]) == ([], [])
    assert len(second["stored"]) > 0
    assert {one["kv"]["total_blocks"] for one in (first, second, third)} == {BLOCKS}


async def test_a_report_waits_for_news_of_its_rank(served: Served) -> None:
    known = await state(served, rank=1)
    asked = {"rank": 1, "since": known["cursor"], "epoch": known["epoch"]}
    waiting = asyncio.create_task(state(served, **asked, wait_ms=60_000))
    await complete(served, 0)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await complete(served, 1)
    assert len((await waiting)["stored"]) > 0


async def test_objectives_are_changed_at_the_named_rank(served: Served) -> None:
    changes = [{"plait_handle": "h", "plait_jct_ms": 60_000}]
    await served.http.post(CALL_OBJECTIVES, json=changes, headers={RANK: "2"})
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 2, "vllm_xargs": {"plait_handle": "h"}}
    for rank in range(3):
        await served.http.post("/v1/completions", json=body, headers={RANK: str(rank)})
    shares = [engine.cache_state().scheduler.slo_attainment for engine in served.server.engines]
    assert shares == [None, None, 1.0], "the change came before the call"


async def test_metrics_have_a_sample_for_each_rank(served: Served) -> None:
    await complete(served, 1)
    found = await samples(served)
    assert [(labels["engine"], value) for labels, value in found["plait_engine_calls"]] == [
        ("e@0", 0), ("e@1", 1), ("e@2", 0),
    ]  # fmt: skip
    ranks = [{"model_name": "m", "engine": str(rank)} for rank in range(3)]
    assert [labels for labels, _ in found["vllm:num_requests_running"]] == ranks
    cache = found["vllm:cache_config_info"]
    assert [labels["engine"] for labels, _ in cache] == ["0", "1", "2"]
    assert {labels["num_gpu_blocks"] for labels, _ in cache} == {str(3 * BLOCKS)}, "as vLLM: the sum, at every rank"


async def test_health_and_models_are_the_addresses(served: Served) -> None:
    for path in ("/health", "/ping", "/metrics"):
        assert (await served.http.get(path)).status_code == 200
    assert len((await served.http.get("/v1/models")).json()["data"]) == 1
    assert (await served.http.get("/load")).json() == {"server_load": 0}


async def test_one_rank_tells_as_if_there_were_none() -> None:
    async with serving() as served:
        assert cached(await complete(served, 0)) == 0
        assert cached(await complete(served, None)) > 200
        one = await state(served)
        assert (one["engine"], one["rank"], one["ranks"]) == ("e", 0, 1)
        found = await samples(served)
        assert found["vllm:num_requests_running"] == [({"model_name": "m"}, 0)]
        assert found["vllm:cache_config_info"] == [({"block_size": "16", "num_gpu_blocks": str(BLOCKS)}, 1)]
        response = await served.http.post("/v1/completions", json={"prompt": "hi"}, headers={RANK: "1"})
        assert response.status_code == 400
