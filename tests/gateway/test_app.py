"""The composed gateway: everything beside the completion routes, and how configuration reaches the parts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import httpx
import msgspec
import pytest

from plait.backends.profiles import load_profile
from plait.backends.protocol.cache_state import SchedulerState
from plait.gateway.app import Gateway
from plait.gateway.config.file import parse_config
from plait.gateway.config.sections import DEFAULT_PROFILE, Config
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.health import HealthState
from plait.gateway.guests.live.feed import Feed
from plait.gateway.guests.live.fleet_snapshot import fleet_news
from plait.policy.types import Call, PlacementReason
from tests.gateway.fleet.lettered_prompts import report

ENGINES: list[dict[str, Any]] = [{"name": "a", "url": "http://127.0.0.1:1"}, {"name": "b", "url": "http://127.0.0.1:9"}]


def config(**sections: Any) -> Config:
    return parse_config({"engines": ENGINES, **sections}, "test")


class Served:
    """A gateway whose monitor is not running, and a client of it."""

    def __init__(self, config: Config) -> None:
        self.gateway = Gateway(config)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.gateway.app), base_url="http://gateway")


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served(config())
    yield served
    await served.http.aclose()


async def test_models_are_what_the_engines_serve(served: Served) -> None:
    assert (await served.http.get("/v1/models")).json() == {"object": "list", "data": []}
    served.gateway.kernel.router.health.answered("a", {"org/m": 4_096, "n": None})
    described = {"id": "org/m", "object": "model", "created": 0, "owned_by": "plait", "max_model_len": 4_096}
    described |= {"root": "org/m", "parent": None}
    listed = (await served.http.get("/v1/models")).json()["data"]
    assert listed == [{**described, "id": "n", "root": "n", "max_model_len": None}, described]
    assert (await served.http.get("/v1/models/org/m")).json() == described
    assert (await served.http.get("/v1/models/")).json()["data"] == listed
    served.gateway.kernel.router.health.unreachable("a")
    assert (await served.http.get("/v1/models")).json()["data"] == listed, "a model does not vanish with its engine"
    codex = (await served.http.get("/v1/models", params={"client_version": "0.171.0"})).json()
    assert codex == {"object": "list", "data": listed, "models": []}


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/v1/models/other", "model_not_found"),
        ("GET", "/v1", "not_found"),
        ("GET", "/v1/nothing", "not_found"),
        ("POST", "/v1/load_lora_adapter", "not_found"),
        ("POST", "/v1/chat/completions/", "not_found"),
    ],
)
async def test_what_is_not_there(served: Served, method: str, path: str, code: str) -> None:
    for engine in ("a", "b"):
        served.gateway.kernel.router.health.answered(engine, {"m": None})
    response = await served.http.request(method, path)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (404, code, "invalid_request_error")


async def test_the_completion_routes_are_served(served: Served) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = await served.http.post(path, content=b"{")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


async def test_it_is_ready_when_every_model_has_an_engine() -> None:
    served = Served(config(models=[{"name": "m"}]))
    router = served.gateway.kernel.router

    async def ready() -> tuple[int, dict[str, Any]]:
        response = await served.http.get("/ready")
        return response.status_code, response.json()

    status, answer = await ready()
    assert (status, answer["engines_up"], set(answer["out"])) == (503, {"m": 0}, {"a", "b"})
    router.health.answered("a", {"m": None})
    assert (await ready())[1]["out"].keys() == {"b"}
    router.health.answered("b", {"m": None, "n": None})
    assert await ready() == (200, {"ready": True, "engines_up": {"m": 2, "n": 1}})
    said = "GET /v1/models: 401, the engine refuses our key: see api_key"
    router.health.unreachable("b", "refused_key", said, "10.0.0.7:8000 is for operators")
    assert served.gateway.kernel.engines.describe("b")["last_error"] == f"{said}: 10.0.0.7:8000 is for operators"
    status, answer = await ready()
    assert (status, answer["ready"], answer["engines_up"]) == (503, False, {"m": 1, "n": 0})
    out = answer["out"]["b"]
    assert abs(datetime.fromisoformat(out.pop("since")).timestamp() - time.time()) < 10
    assert out == {
        "health": "down",
        "cause": "refused_key",
        "last_error": said,
    }
    assert (await served.http.get("/health")).json() == {"status": "ok"}, "it is alive all the same"
    await served.http.aclose()


async def test_an_engine_whose_plugin_does_not_work_is_shown_where_readiness_is() -> None:
    served = Served(config())
    served.gateway.kernel.router.health.answered("a", {"m": None})
    served.gateway.kernel.router.no_reports("a", "the plugin is not active")
    answer = (await served.http.get("/ready")).json()
    del answer["out"]
    assert answer == {"ready": True, "engines_up": {"m": 1}, "degraded": {"a": "the plugin is not active"}}
    assert 'plait_engine_degraded{engine="a"} 1.0' in (await served.http.get("/metrics")).text
    await served.http.aclose()


async def test_an_engine_whose_adapter_does_less_is_shown_where_readiness_is() -> None:
    served = Served(config())
    router = served.gateway.kernel.router
    router.health.answered("a", {"m": None})
    for tier, shown in (("chunks", None), ("reports", {"a": "reports"})):
        router.report("a", msgspec.structs.replace(report(), scheduler=SchedulerState(tier=tier)), 0.0)
        answer = (await served.http.get("/ready")).json()
        assert answer.get("tiers") == shown
        assert served.gateway.kernel.engines.describe("a")["tier"] == tier
        metrics = (await served.http.get("/metrics")).text
        assert f'plait_engine_tier{{engine="a",tier="{tier}"}} 1.0' in metrics
        assert metrics.count('tier="order"} 0.0') == 1
    await served.http.aclose()


async def test_a_gateway_without_models_is_not_ready(served: Served) -> None:
    response = await served.http.get("/ready")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_keys_guard_the_models_but_not_operations() -> None:
    served = Served(config(server={"api_keys": ["secret"]}))
    for path in ("/v1/models", "/v1/models/m"):
        response = await served.http.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (await served.http.get("/v1/models", headers={"authorization": "Bearer secret"})).status_code == 200
    assert [(await served.http.get(path)).status_code for path in ("/health", "/ready", "/metrics")] == [200, 503, 200]
    await served.http.aclose()


async def test_metrics_show_the_fleet(served: Served) -> None:
    router = served.gateway.kernel.router
    router.health.answered("a", {"m": None})
    call = Call("c", "m", 129, 64, [1, 2])
    ended = router.book(call, router.select(call, 0.0), 0.0)
    router.settle(ended, CallUsage(129, 1), 1.0)
    router.book(call, router.select(call, 2.0), 2.0)
    lines = (await served.http.get("/metrics")).text.splitlines()
    assert 'plait_engine_up{engine="a"} 1.0' in lines
    assert 'plait_engine_up{engine="b"} 0.0' in lines
    assert 'plait_engine_outstanding_calls{engine="a"} 1.0' in lines
    assert 'plait_engine_resident_tokens{engine="a"} 128.0' in lines
    assert "plait_prefix_tree_blocks 2.0" in lines


def test_configuration_reaches_the_router() -> None:
    engines = [{**ENGINES[0], "kv_tokens": 640}, {**ENGINES[1], "models": ["big"]}]
    models = [{"name": "m"}, {"name": "big", "profile": "h100-llama-70b-tp2"}]
    sections = {
        "models": models,
        "placement": {"policy": "least_outstanding", "window_s": 5.0},
        "upstream": {"probe_interval_s": 2.0},
    }
    router = Gateway(parse_config({"engines": engines, **sections}, "test")).kernel.router
    small, big = router.engines["a"], router.engines["b"]
    router.health.answered("b", {"big": None})
    assert router.select(Call("c", "big", 1, 64, []), 0.0).reason is PlacementReason.LEAST_OUTSTANDING
    assert (small.cache.estimated_tokens, big.cache.estimated_tokens) == (640, 225_000)
    assert small.view.cost_model.prefill_time_s(1_000) > big.view.cost_model.prefill_time_s(1_000)
    assert (small.view.ledger.window_s, small.view.ledger.mean_output_tokens) == (5.0, 128)
    assert (small.health.state, small.health.probe_after_s) == (HealthState.UNTRIED, 2.0)


@pytest.mark.parametrize("model", [{"name": "m", "profile": "none-such"}, {"name": "m", "tokenizer": "/none/such"}])
def test_what_cannot_be_loaded_is_said_at_the_start(model: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"none.such"):
        Gateway(config(models=[model]))


async def test_it_watches_its_engines_from_startup_to_shutdown() -> None:
    gateway, before = Gateway(config()), asyncio.all_tasks()
    inbox, outbox = asyncio.Queue[dict[str, str]](), asyncio.Queue[Any]()
    running = asyncio.create_task(gateway.app({"type": "lifespan", "state": {}}, inbox.get, outbox.put))
    await inbox.put({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    names = {task.get_name() for task in asyncio.all_tasks() - before - {running}} - {"connect"}
    of_engines = {f"{work}:{engine}" for work in ("monitor", "models", "counts", "address") for engine in "ab"}
    of_guests = {"sessions-expire", "problems", "accounts", "budgets", "batches", "batch-lines", "old-files"}
    assert names == of_engines | of_guests | {"monitor-age", "hang-check", "silent-streams"}
    await inbox.put({"type": "lifespan.shutdown"})
    assert (await outbox.get())["type"] == "lifespan.shutdown.complete"
    await running
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize(
    ("more", "known", "told"),
    [
        ({}, None, None),
        ({"models": ["m"]}, None, None),
        ({"kv_tokens": 640}, 640, 640),
        ({"models": ["big"]}, 225_000, None),
    ],
)
def test_a_size_that_nobody_told_is_not_shown(more: dict[str, Any], known: int | None, told: int | None) -> None:
    """A profile's size bounds the estimate of the cache, and counts as known if the configuration names the profile."""
    models = [{"name": "m"}, {"name": "big", "profile": "h100-llama-70b-tp2"}]
    gateway = Gateway(parse_config({"engines": [{**ENGINES[0], **more}], "models": models}, "test"))
    cache = gateway.kernel.router.engines["a"].cache
    assert cache.estimated_tokens == known
    assert cache.view.residency.most_blocks == (known or load_profile(DEFAULT_PROFILE).kv.tokens) // cache.block_tokens
    (shown,) = fleet_news(gateway.kernel.router, gateway.kernel.admission, gateway.house[Feed], 0.0).engines
    assert (shown.kv_tokens, shown.kv_used_tokens) == (told, None)


def test_watchers_see_the_first_64_addresses_with_their_ranks() -> None:
    engines = [{"name": f"e{place}", "url": f"http://127.0.0.1:{1 + place}", "ranks": 2} for place in range(70)]
    gateway = Gateway(parse_config({"engines": engines}, "test"))
    news = fleet_news(gateway.kernel.router, gateway.kernel.admission, gateway.house[Feed], 0.0)
    assert [one.name for one in news.engines] == [f"e{place}@{rank}" for place in range(64) for rank in range(2)]
    assert news.engine_count == 140


@pytest.mark.parametrize("method", ["TRACE", "OPTIONS"])
async def test_a_method_that_no_route_takes(served: Served, method: str) -> None:
    response = await served.http.request(method, "/v1/sessions")
    assert (response.status_code, "allow" in response.headers) == (405, True)
    assert response.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"plait": {"session": "s", "inputs": "later"}}),
        ("/v1/submit", {"session_id": "s", "placeholders": [{"name": "out", "in_out": True}]}),
    ],
    ids=["call", "chained call", "submission"],
)
async def test_a_template_of_the_requests_own_is_refused_at_once(
    served: Served, path: str, fields: dict[str, Any]
) -> None:
    served.gateway.kernel.router.health.answered("a", {"m": None})
    messages = [{"role": "user", "content": "Say {{out}}" if "submit" in path else "hello"}]
    if "submit" in path:
        messages = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "{{out}}"}]
    body = {"model": "m", "messages": messages, "chat_template": "x", **fields}
    response = await served.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")


async def test_each_metric_is_shown_once(served: Served) -> None:
    """Prometheus' own tools refuse a name that two collectors use."""
    lines = (await served.http.get("/metrics")).text.splitlines()
    described = Counter(line.split()[2] for line in lines if line.startswith("# HELP "))
    assert len(described) > 70
    assert not [name for name, count in described.items() if count > 1]


async def test_a_defect_is_answered(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.gateway.api.operations.scrape", lambda _registry: 1 / 0)
    response = await served.http.get("/metrics")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/api/v1/chat/completions", "/v1/chat/completions"),
        ("//v1/messages", "/v1/messages"),
        ("/models", "/v1/models"),
        ("/v1/something/else", None),
    ],
)
async def test_a_wrong_path_is_told_the_right_one(served: Served, path: str, meant: str | None) -> None:
    error = (await served.http.post(f"http://gateway{path}", json={})).json()["error"]
    assert error["code"] == "not_found"
    assert error["message"].endswith(f"Did you mean {meant}?" if meant else ".")


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/nothing", "/v1/messages/count_tokens"])
async def test_anthropics_paths_have_its_errors(served: Served, path: str) -> None:
    answer = (await served.http.post(path, json={"model": "nobody", "messages": []})).json()
    assert (answer["type"], set(answer["error"])) == ("error", {"type", "message"})
