"""`GET /admin/status`: of one gateway, and of several together."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from plait.gateway.app import Gateway
from plait.gateway.config.file import ConfigError
from plait.gateway.config.sections import Config
from plait.gateway.fleet.health import HealthState
from plait.gateway.guests.live.problems import Problem
from plait.gateway.guests.live.status import (
    EngineRow,
    GatewayRow,
    ModelRow,
    Status,
    StatusApi,
    TenantRow,
    Watched,
    fingerprint,
    merged,
)
from tests.gateway.guests.live.test_routes import BEARER, KEY, client, gateway


async def asked(made: Gateway) -> dict[str, Any]:
    async with client(made) as http:
        assert (await http.get("/admin/status")).status_code == 401
        found: dict[str, Any] = (await http.get("/admin/status", headers=BEARER)).json()
    return found


async def test_a_refused_reload_has_its_reason_until_one_is_taken() -> None:
    made = gateway(admin_key=KEY)

    def broken() -> Config:
        raise ConfigError("c.toml: one\nc.toml: two")

    made.kernel.reloading.reload(broken)
    assert (await asked(made))["refused_reload"] == ["c.toml: one", "c.toml: two"]
    made.kernel.reloading.reload(lambda: made.config)
    assert (await asked(made))["refused_reload"] == []


async def test_a_gateway_tells_what_it_sees() -> None:
    made = gateway(admin_key=KEY)
    made.kernel.engines.drain("a", draining=True)
    answer = await asked(made)
    assert answer == {
        "problems": [],
        "engines": [
            {"name": "a", "state": "draining", "cause": "", "since": 0.0, "calls": 0, "reason": "", "kv_tokens": None,
             "kv_used_tokens": 0},
        ],
        "gateways": [
            {"name": "0", "version": version("plait"), "since": answer["gateways"][0]["since"], "store": "",
             "failing_since": 0.0},
        ],
        "models": [{"name": "m", "waiting_calls": 0, "held_sessions": 0}],
        "tenants": [],
        "secret": fingerprint(made.house.secret),
        "refused_reload": [],
    }  # fmt: skip
    assert time() - 60 < answer["gateways"][0]["since"] <= time()


async def test_a_store_says_its_kind_and_since_when_it_fails(tmp_path: Path) -> None:
    made = gateway(admin_key=KEY, store={"path": str(tmp_path / "kept" / "s.db")})
    assert (await asked(made))["gateways"][0]["store"] == "SQLite"
    made.house[Watched].problems.now = (Problem("store_failing", "", 7.0, "", "p"),)
    assert (await asked(made))["gateways"][0]["failing_since"] == 7.0


async def test_an_engine_that_is_down_says_why_on_all_rows() -> None:
    made = gateway(admin_key=KEY)
    made.kernel.router.health.unreachable("a", "unreachable", "engine a cannot be reached", "10.0.0.7:80 refused")
    row = (await asked(made))["engines"][0]
    assert (row["state"], row["reason"]) == ("down", "engine a cannot be reached: 10.0.0.7:80 refused")


async def test_a_problem_has_the_words_of_probes_and_no_others() -> None:
    """An engine's answer to a call may quote its prompt; problems are in the log."""
    made = gateway(admin_key=KEY)
    made.kernel.router.health.unreachable("a", "unreachable", "engine a cannot be reached", "10.0.0.7:80 refused")
    engine = made.kernel.router.engines["a"]
    assert made.house[Watched]._fleet.signs(1.0).engines["a"].reason == engine.whole_error
    for state in (HealthState.EJECTED, HealthState.PROBATION, HealthState.SUSPECT):
        engine.health.state = state
        assert made.house[Watched]._fleet.signs(1.0).engines["a"].reason == ""


async def test_a_gateway_with_another_secret_is_named() -> None:
    secrets = {"same": "f1", "b": "f2"}
    told = {
        name: SimpleNamespace(status=200, body=msgspec.json.encode(Status([], [], [], [], secret)))
        for name, secret in secrets.items()
    }

    async def ask_all(*_: object) -> dict[str, SimpleNamespace]:
        return told

    others: Any = SimpleNamespace(ask_all=ask_all, own="a", are_workers=False)
    api = StatusApi(None, None, others, "f1")  # type: ignore[arg-type]
    request: Any = SimpleNamespace(scope={"headers": []})
    status = await api._of_all(Status([], [], [], [], "f1"), request)
    [problem] = status.problems
    assert (problem.code, problem.about) == ("secret_differs", "b")
    assert "server.secret" in problem.sentence


async def test_an_engine_says_since_when_it_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = gateway(admin_key=KEY), list[float]()
    for wall_s, draining in ((5.0, True), (9.0, True), (11.0, False), (13.0, True)):
        monkeypatch.setattr("plait.gateway.guests.live.signs.time", lambda now_s=wall_s: now_s)
        made.kernel.engines.drain("a", draining=draining)
        made.house[Watched].look(wall_s)
        (engine,) = (await asked(made))["engines"]
        if draining:
            seen.append(engine["since"])
    assert seen == [5.0, 5.0, 13.0]


async def test_tenants_have_their_calls_tokens_and_weights() -> None:
    made = gateway(admin_key=KEY, tenants=[{"name": "gold", "api_keys": ["g"], "weight": 4}], api_keys=["k"])
    metrics = made.house[Watched]._fleet.metrics
    for tenant, model in (("gold", "m"), ("gold", "n"), ("a1b2", "m")):
        metrics._tenant_calls.of[tenant, model, "200", ""].value += 2
        metrics._tenant_prompt.of[tenant, model].value += 100
        metrics._tenant_output.of[tenant, model].value += 7
    assert (await asked(made))["tenants"] == [
        {"name": name, "waiting_calls": 0, "answered_calls": 2 * models, "failed_calls": 0,
         "prompt_tokens": 100 * models, "output_tokens": 7 * models, "weight": weight}
        for name, models, weight in (("a1b2", 1, 1.0), ("gold", 2, 4.0))
    ]  # fmt: skip


def seen(*engines: EngineRow, problems: tuple[Problem, ...] = (), waiting: int = 0) -> Status:
    tenants = [TenantRow("t", waiting, 10, 1, 100, 20, 2.0)] if waiting else []
    return Status([*problems], [*engines], [ModelRow("m", waiting, 1)], tenants)


def test_calls_of_several_gateways_are_summed() -> None:
    up, out = EngineRow("a", "up", "", 1.0, 3), EngineRow("a", "ejected", "hang", 5.0, 4)
    both = merged([seen(up, waiting=2), seen(out, EngineRow("b", "up", "", 1.0, 0), waiting=3), seen()])
    assert both.engines == [EngineRow("a", "ejected", "hang", 5.0, 7), EngineRow("b", "up", "", 1.0, 0)]
    assert both.models == [ModelRow("m", 5, 3)]
    assert both.tenants == [TenantRow("t", 5, 20, 2, 200, 40, 2.0)]


def test_gateways_are_in_the_same_order_wherever_they_are_asked() -> None:
    one, two = (Status([], [], [], [], gateways=[GatewayRow(name, "1.2", 1.0)]) for name in ("one", "two"))
    assert merged([one, two]).gateways == merged([two, one]).gateways


def test_an_engine_drains_once_it_does_in_all_gateways() -> None:
    draining, others = EngineRow("a", "draining", "", 0.0, 0), ("handing over", "up", "ejected")
    for state in others:
        assert merged([seen(draining), seen(EngineRow("a", state, "", 1.0, 2))]).engines[0].state == state
    assert merged([seen(draining), seen(draining)]).engines == [draining]


def test_a_problem_of_several_gateways_is_named_once_since_it_began() -> None:
    late, early = Problem("engine_out", "a", 5.0, "", "p"), Problem("engine_out", "a", 4.0, "", "p")
    other = Problem("queue_long", "m", 4.5, "", "p")
    assert merged([seen(problems=(late,)), seen(problems=(early, other))]).problems == [early, other]


def test_gateways_with_one_secret_have_one_fingerprint() -> None:
    assert fingerprint(b"secret") == fingerprint(b"secret") != fingerprint(b"another")
