"""The monitor over scripted engines: who is up, which models they have, what their caches hold."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from structlog.testing import capture_logs

import plait.gateway.membership.monitor
from plait.backends.errors import NotFoundError, UnsupportedError
from plait.backends.protocol.cache_state import CacheState
from plait.gateway.fleet.health import HealthLimits, HealthState
from plait.gateway.fleet.router import Router
from plait.gateway.timer import loop_time_s
from plait.policy.types import Call
from tests.gateway.membership.watched_engine import TICK_S, FakeEngine, is_up, report, until, watching


def shown_problem(router: Router) -> str | None:
    return router.engines["a"].cache.problem


async def test_an_engine_that_answers_serves_what_it_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine()
    async with watching(monkeypatch, fake, api_key="secret") as router:
        await until(lambda: is_up(router))
        assert (router.models.names, router.models.contexts.get("m")) == ({"m"}, 4_096)
        assert fake.requests[0].url == "http://engine/base/v1/models"
        assert fake.requests[0].headers["authorization"] == "Bearer secret"


async def test_an_engine_that_closes_a_connection_while_it_is_made_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine()
    with capture_logs() as logs:
        async with watching(monkeypatch, fake) as router:
            await until(lambda: is_up(router))
            fake.closes_at_once = True
            fake.reports.append(httpx.ReadError("reset"))
            await until(lambda: router.engines["a"].health.state is HealthState.DOWN)
            fake.closes_at_once = False
            await until(lambda: is_up(router))
    assert not [line for line in logs if line["event"] == "task failed and is restarted"]


async def test_models_of_an_engine_that_reports_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plait.gateway.membership.monitor, "MODELS_INTERVAL_S", TICK_S)
    fake = FakeEngine()
    async with watching(monkeypatch, fake) as router:
        fake.reports.append(report(1, cursor=1))
        await until(lambda: router.engines["a"].cache.reports is True)
        fake.models = {"data": [{"id": "m", "max_model_len": 4_096}, {"id": "adapter", "max_model_len": 4_096}]}
        asked = len(fake.requests)
        await until(lambda: len([r for r in fake.requests[asked:] if r.url.path == "/base/v1/models"]) > 2)
        fake.reports.append(report(1, 2, cursor=2))
        await until(lambda: router.models.names == {"m", "adapter"})


@pytest.mark.parametrize(("contexts", "expected"), [({}, 4_096), ({"m": 100}, 100), ({"m": 100, "adapter": 50}, 50)])
async def test_an_adapter_has_the_context_of_its_base_model(
    monkeypatch: pytest.MonkeyPatch, contexts: dict[str, int], expected: int
) -> None:
    fake = FakeEngine()
    fake.models = {"data": [{"id": "m", "max_model_len": 4_096}, {"id": "adapter", "parent": "m", "root": "/a"}]}
    async with watching(monkeypatch, fake, contexts=contexts) as router:
        await until(lambda: is_up(router))
        assert router.engines["a"].offer.models["adapter"] == expected
        assert router.engines["a"].offer.adapters == {"adapter": "m"}


async def test_a_configured_context_is_no_longer_than_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watching(monkeypatch, FakeEngine(), contexts={"m": 32_768}) as router:
        await until(lambda: is_up(router))
        assert dict(router.engines["a"].offer.models) == {"m": 4_096}
        assert "context" in router.engines["a"].mismatches


async def test_configured_models_and_contexts_win_over_listed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine()
    async with watching(monkeypatch, fake, models=["m", "n"], contexts={"m": 100}) as router:
        await until(lambda: is_up(router))
        assert dict(router.engines["a"].offer.models) == {"m": 100, "n": None}
        assert "authorization" not in fake.requests[0].headers


async def test_reports_are_polled_from_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine()
    fake.reports = [report(1, 2), report(1, 2, 3, cursor=9)]
    async with watching(monkeypatch, fake) as router:
        await until(lambda: len(fake.polls) == 3)
        assert router.engines["a"].view.residency.resident.blocks == 3
        asked = {"wait_ms": "1", "gateway": router.gateway_id}
        assert fake.polls == [
            asked,
            {**asked, "since": "1", "epoch": "1"},
            {**asked, "since": "9", "epoch": "1"},
        ]
        assert fake.requests[-1].headers["accept"] == "application/msgpack"


async def test_a_report_that_was_held_back_is_followed_by_the_next_request_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, fake = 0.0, FakeEngine()
    monkeypatch.setattr(plait.gateway.membership.monitor, "loop_time_s", lambda: now_s)
    monkeypatch.setattr(plait.gateway.membership.monitor, "MIN_REPORT_INTERVAL_S", 60.0)
    async with watching(monkeypatch, fake):
        await until(lambda: len(fake.polls) == 1)
        now_s = 61.0
        fake.reports = [report(1), report(1, 2, cursor=2)]
        await until(lambda: not fake.reports)
        await asyncio.sleep(20 * TICK_S)
        assert len(fake.polls) == 2, "the second came at once, and the third request waits"


async def test_an_engine_that_goes_away_is_down_until_it_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine()
    fake.reports = [report(1)]
    with capture_logs() as logs:
        async with watching(monkeypatch, fake) as router:
            await until(lambda: len(fake.polls) == 2)
            fake.reachable = False
            await until(lambda: not is_up(router))
            failed = len(fake.requests)
            await until(lambda: len(fake.requests) > failed + 2)
            fake.reachable = True
            await until(lambda: is_up(router))
            await until(lambda: fake.polls[-1].get("since") == "1")
    events = [entry["event"] for entry in logs]
    assert events == ["probe answered", "probe failed", "probe answered"], "each reason is said once"


async def test_an_answer_to_a_poll_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine()
    async with watching(monkeypatch, fake) as router:
        await until(lambda: len(fake.polls) == 1)
        router.health.unreachable("a")
        fake.reports.append(report(1))
        await until(lambda: is_up(router))


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_an_engine_without_reports_is_probed_and_estimated(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    fake = FakeEngine()
    fake.reports = [httpx.Response(status) for _ in range(100)]
    with capture_logs() as logs:
        async with watching(monkeypatch, fake) as router:
            await until(lambda: len(fake.polls) == 3)
            assert (is_up(router), router.engines["a"].cache.reports) == (True, False)
            assert router.engines["a"].cache.problem is None
            fake.reports = [report(1)]
            await until(lambda: router.engines["a"].cache.reports is True)
    events = [entry["event"] for entry in logs]
    assert events == ["probe answered", "engine has no cache-state report: its cache is estimated"], "said once"


async def test_an_engine_whose_plugin_is_not_active_is_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine()
    refusal = UnsupportedError("Plait's plugin is not active: names are missing")
    fake.reports = [httpx.Response(501, content=refusal.body()) for _ in range(100)]
    with capture_logs() as logs:
        async with watching(monkeypatch, fake) as router:
            await until(lambda: len(fake.polls) == 3)
            assert is_up(router)
            assert shown_problem(router) == refusal.message
            fake.reports = [report(1)]
            await until(lambda: router.engines["a"].cache.reports is True)
            assert shown_problem(router) is None
    (said,) = (entry for entry in logs if entry["event"] == "cache-state report refused")
    assert said["error"] == refusal.message


@pytest.mark.parametrize("bad", [report(1, granularity=96), httpx.Response(200, content=b"<html>")])
async def test_a_report_that_cannot_be_used_is_refused_once(
    monkeypatch: pytest.MonkeyPatch, bad: httpx.Response | CacheState
) -> None:
    fake = FakeEngine()
    fake.reports = [bad] * 100
    with capture_logs() as logs:
        async with watching(monkeypatch, fake) as router:
            await until(lambda: len(fake.polls) == 3)
            assert (is_up(router), router.engines["a"].cache.reports) == (True, False)
    assert [entry["event"] for entry in logs] == ["probe answered", "cache-state report refused"]


@pytest.mark.parametrize("models", [{"data": "none"}, [], {"models": ["m"]}])
async def test_an_engine_that_does_not_list_its_models_is_down(monkeypatch: pytest.MonkeyPatch, models: object) -> None:
    fake = FakeEngine()
    fake.models = models
    async with watching(monkeypatch, fake) as router:
        await until(lambda: len(fake.requests) > 1)
        assert router.engines["a"].health.state is HealthState.DOWN


@pytest.mark.parametrize(
    "bad", [httpx.Response(500), httpx.Response(503), httpx.ReadError("reset"), httpx.RemoteProtocolError("garbled")]
)
async def test_an_engine_whose_report_fails_is_estimated_and_stays_up(
    monkeypatch: pytest.MonkeyPatch, bad: httpx.Response | httpx.HTTPError
) -> None:
    fake = FakeEngine()
    fake.reports = [bad] * 100
    with capture_logs() as logs:
        async with watching(monkeypatch, fake) as router:
            await until(lambda: len(fake.polls) == 3)
            assert (is_up(router), router.engines["a"].cache.reports) == (True, False)
    assert [entry["event"] for entry in logs] == ["probe answered", "cache-state report refused"]


async def test_an_engine_that_misses_two_probes_is_down_and_one_that_streams_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeEngine()
    async with watching(monkeypatch, fake) as router:
        await until(lambda: is_up(router))
        call = Call("c", "m", 100, 64, [1])
        booking = router.book(call, router.select(call, 0.0), 0.0)
        fake.is_silent = True
        seen = len(fake.requests)
        while len(fake.requests) < seen + 10:
            router.engines[booking.placement.engine_id].progress.next_byte(booking, asyncio.get_running_loop().time())
            await asyncio.sleep(TICK_S)
        assert is_up(router), "bytes come: it is busy"
        router.release(booking, 0.0, delivered=False)
        await until(lambda: router.engines["a"].health.state is HealthState.DOWN)
        fake.is_silent = False
        await until(lambda: is_up(router))


async def test_an_engine_that_answers_calls_is_up_while_its_list_of_models_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten short calls a second, of which none is open when a probe has had no answer for four seconds."""
    fake, now_s = FakeEngine(), loop_time_s()
    mute_s, states = now_s + 60.0, list[tuple[float, bool]]()

    def hang(request: httpx.Request, _unreachable: httpx.TransportError) -> None:
        nonlocal now_s
        states.append((now_s, is_up(router)))
        for _ in range(40 if request.url.path == "/base/v1/models" else 0):
            now_s += 0.1
            if now_s < mute_s and is_up(router):
                call = Call("c", "m", 100, 64, [1])
                router.settle(router.book(call, router.select(call, now_s), now_s), None, now_s)
        raise httpx.ReadTimeout("nothing came", request=request)

    async with watching(monkeypatch, fake) as router:
        await until(lambda: is_up(router))
        monkeypatch.setattr(plait.gateway.membership.monitor, "loop_time_s", lambda: now_s)
        monkeypatch.setattr(fake, "_fail_if_gone", hang)
        await until(lambda: now_s > mute_s + 20.0)
    down_s = min(at_s for at_s, up in states if not up)
    assert mute_s + 4.0 < down_s < mute_s + 12.5, "the probe under way, and two more"


async def test_the_time_of_a_missed_probe_counts_in_the_pause_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, pause_s = FakeEngine(), 30.0

    def clock() -> float:
        """Each request to the silent engine takes a pause's length."""
        return loop_time_s() + pause_s * len(fake.missed)

    monkeypatch.setattr(plait.gateway.membership.monitor, "loop_time_s", clock)
    async with watching(monkeypatch, fake) as router:
        health = router.engines["a"].health
        await until(lambda: is_up(router))
        health.limits = HealthLimits(probe_s=pause_s, max_probe_s=pause_s)
        fake.is_silent = True
        await until(lambda: health.state is HealthState.DOWN)
        fake.is_silent = False
        await until(lambda: is_up(router))


async def test_routes_and_adapters_of_an_engine_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine()
    fake.openapi = {"paths": {"/v1/models": {}, "/v1/responses": {}, "/v1/tokenize": {}}}
    fake.models = {"data": [{"id": "m"}, {"id": "adapter", "parent": "m"}]}
    async with watching(monkeypatch, fake) as router:
        await until(lambda: router.models.serving("m") == 1)
        assert router.models.base("adapter") == "m"
        assert router.models.all_have("m", "/v1/responses")
        assert router.models.all_have("m", "/tokenize"), "some routes are listed with /v1 only"
        assert not router.models.all_have("m", "/v1/messages")
        with pytest.raises(NotFoundError, match="/v1/messages"):
            router.models.eligible("m", "/v1/messages")


async def test_an_engine_that_does_not_say_its_routes_may_have_any(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watching(monkeypatch, FakeEngine()) as router:
        await until(lambda: router.models.serving("m") == 1)
        assert not router.models.all_have("m", "/v1/responses")
        assert router.models.eligible("m", "/v1/responses")
