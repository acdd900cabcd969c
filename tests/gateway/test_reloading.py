"""A running gateway takes over a changed configuration, and the admin API changes its engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from plait.backends.errors import ConflictError, NotFoundError
from plait.backends.http.trust import SYSTEM_TRUST, TrustError
from plait.gateway import reloading
from plait.gateway.admission.backlog import Waiting
from plait.gateway.app import Gateway
from plait.gateway.config.file import ConfigError, load_config, parse_config
from plait.gateway.config.sections import Config, EngineConfig
from plait.gateway.fleet.booking import Booking
from plait.gateway.fleet.router import EngineBusyError
from plait.gateway.log.events import change_level
from plait.gateway.membership import engine_set
from plait.gateway.timer import loop_time_s
from plait.policy.types import Call
from tests.gateway.exposed import samples
from tests.invariants import check

A = {"name": "a", "url": "http://127.0.0.1:1", "models": ["m"]}
B = {"name": "b", "url": "http://127.0.0.1:9", "models": ["m"]}
C = {"name": "c", "url": "http://127.0.0.1:7", "models": ["m"]}
ADMIN = {"authorization": "Bearer admin"}


def config(*engines: dict[str, Any], **sections: Any) -> Config:
    server = {"admin_key": "admin", "api_keys": ["one"], **sections.pop("server", {})}
    return parse_config({"engines": list(engines or (A, B)), "server": server, **sections}, "test")


class Running:
    """A gateway whose engines are up, as far as the test says: nothing listens on their ports."""

    def __init__(self, config: Config) -> None:
        self.gateway = Gateway(config)
        self.router, self.engines, self.reloading = (
            self.gateway.kernel.router,
            self.gateway.kernel.engines,
            self.gateway.kernel.reloading,
        )
        for engine in config.engines:
            self.router.health.answered(engine.name, {"m": None})
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.gateway.app), base_url="http://gateway")

    def book(self) -> Booking:
        call = Call("c", "m", 129, 64, [1, 2])
        return self.router.book(call, self.router.select(call, 0.0), 0.0)

    async def settled(self) -> None:
        """Until the engines that may leave have left."""
        await asyncio.sleep(0.1)


@pytest.fixture
async def running(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    monkeypatch.setattr(engine_set, "IDLE_S", 0.0)
    running = Running(config())
    yield running
    await running.http.aclose()
    await running.gateway.kernel.supervisor.close()
    await running.engines.aclose()


async def test_a_removed_engine_keeps_its_calls_and_then_leaves(running: Running) -> None:
    booking = running.book()
    name = booking.placement.engine_id
    other = "b" if name == "a" else "a"
    running.reloading.apply(config(B if name == "a" else A))
    await running.settled()
    assert running.engines.describe(name)["state"] == "draining"
    assert {running.book().placement.engine_id for _ in range(3)} == {other}
    running.router.release(booking, 1.0, delivered=True)
    await running.settled()
    assert name not in running.engines
    assert list(running.router.engines) == [other]


async def test_an_engine_leaves_only_when_its_successors_were_tried(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.gateway.kernel.monitor, "add", lambda _: None)
    running.reloading.apply(config(C))
    await running.settled()
    assert sorted(running.router.engines) == ["a", "b", "c"]
    assert running.router.models.serving("m") == 2
    running.router.health.answered("c", {"m": None})
    await running.settled()
    assert list(running.router.engines) == ["c"]


async def test_an_engine_that_comes_back_into_the_file_stays(running: Running) -> None:
    bookings = [running.book(), running.book()]
    running.reloading.apply(config(B))
    running.reloading.apply(config({**A, "api_key": "k"}, B))
    await running.settled()
    for booking in bookings:
        running.router.release(booking, 1.0, delivered=True)
    await running.settled()
    assert running.engines.describe("a")["state"] == "active"
    assert running.gateway.kernel.links["a"].authorization == b"Bearer k"


async def test_a_new_url_forgets_the_cache_but_not_the_calls(running: Running) -> None:
    booking = running.book()
    name, before = booking.placement.engine_id, running.gateway.kernel.links[booking.placement.engine_id]
    moved = [{**one, "url": "http://127.0.0.1:5"} if one["name"] == name else one for one in (A, B)]
    running.reloading.apply(config(*moved))
    assert running.gateway.kernel.links[name].client is not before.client
    assert running.engines.describe(name)["url"] == "http://127.0.0.1:5"
    running.router.release(booking, 1.0, delivered=True)
    check(running.router)


async def test_keys_change_and_what_needs_a_restart_is_named(running: Running) -> None:
    after = config(server={"api_keys": ["two"], "admin_key": "other", "port": 1})
    with capture_logs() as logs:
        change = running.reloading.apply(after)
    assert (change.needs_restart, logs[-1]["log_level"]) == (("server.port",), "warning")
    listed = [
        (await running.http.get(path, headers={"authorization": f"Bearer {key}"})).status_code
        for path, key in (("/v1/models", "one"), ("/v1/models", "two"), ("/admin/engines", "admin"))
    ]
    assert listed == [401, 200, 401]
    assert running.reloading.apply(after).needs_restart == ("server.port",), "it is said again: it is not in force"


async def test_tenants_change_in_a_running_gateway(running: Running) -> None:
    terms, blue = running.gateway.kernel.terms, running.gateway.kernel.tenants.of_name("blue")
    tenant = {"name": "blue", "api_keys": ["two"], "weight": 3.0, "max_running": 2}
    change = running.reloading.apply(config(tenants=[tenant], admission={"max_running": 9, "max_waiting": 5}))
    assert (change.tenants, change.limits, change.needs_restart) == (True, True, ())
    assert (terms.limits(blue).max_running, terms.limits(blue).max_waiting) == (2, 5)
    assert (terms.limits("another").max_running, terms.weights) == (9, {blue: 3.0})
    headers = {"authorization": "Bearer two"}
    assert (await running.http.get("/v1/models", headers=headers)).status_code == 200
    running.reloading.apply(config())
    assert (await running.http.get("/v1/models", headers=headers)).status_code == 401
    assert (terms.limits(blue).max_running, terms.weights) == (inf, {})


async def test_calls_of_programs_that_wait_for_rates_wait_by_the_new_ones(running: Running) -> None:
    running.reloading.apply(config(admission={"calls_per_s": 0.1}))
    admission, call = running.gateway.kernel.admission, Call("c", "m", 10, 64, [])
    calls = [Waiting("blue", 20, call=call, passes=True) for _ in range(2)]
    for one in calls:
        admission.enter(one, loop_time_s())
    assert [one.is_sent for one in calls] == [True, False]
    assert admission.outlook(calls[1], loop_time_s())[1] > 9
    running.reloading.apply(config(admission={"calls_per_s": 10.0}))
    await running.settled()
    assert calls[1].is_sent


async def test_a_gateway_with_keys_stays_one(running: Running) -> None:
    change = running.reloading.apply(config(server={"api_keys": []}))
    assert change.needs_restart == ("server.api_keys",)
    assert (await running.http.get("/v1/models")).status_code == 401


async def test_a_wrong_file_changes_nothing(running: Running, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[server]\nprot = 1\n")
    with capture_logs() as logs:
        running.gateway.kernel.reloading.reload(partial(load_config, path))
    assert "did you mean" in logs[-1]["problems"][0]
    assert samples(running.gateway.kernel.registry)['plait_reloads_total{outcome="refused"}'] == 1
    assert list(running.router.engines) == ["a", "b"]


async def test_the_log_level_changes(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[str] = []
    monkeypatch.setattr("plait.gateway.reloading.change_level", levels.append)
    running.reloading.apply(config(log={"level": "debug"}))
    assert levels == ["debug"]


async def test_the_set_refuses_what_it_cannot_do(running: Running) -> None:
    for taken in ({"name": "a", "url": "http://x"}, {"name": "x", "url": A["url"]}):
        with pytest.raises(ConflictError):
            running.engines.add(EngineConfig(**taken))
    with pytest.raises(NotFoundError):
        running.engines.drain("x", draining=True)
    with pytest.raises(EngineBusyError):
        running.engines.remove("a")
    booking = running.book()
    running.engines.drain(booking.placement.engine_id, draining=True)
    with pytest.raises(EngineBusyError, match="1 running calls"):
        running.engines.remove(booking.placement.engine_id)


async def test_the_admin_routes(running: Running) -> None:
    async def ask(method: str, path: str = "", headers: dict[str, str] = ADMIN, **options: Any) -> tuple[int, Any]:
        answer = await running.http.request(method, f"/admin/engines{path}", headers=headers, **options)
        return answer.status_code, answer.json()

    assert (await ask("GET", headers={}))[0] == 401
    assert [engine["name"] for engine in (await ask("GET"))[1]["data"]] == ["a", "b"]
    assert (await ask("POST", json={**C, "kv_tokens": 640}))[0] == 201
    assert (await ask("POST", "/c", json={"state": "draining"}))[1]["state"] == "draining"
    assert (await ask("POST", "/c", json={"state": "gone"}))[0] == 400
    assert (await ask("DELETE", "/c"))[1] == {"object": "engine.deleted", "name": "c", "deleted": True}
    assert (await ask("DELETE", "/c"))[1]["error"]["code"] == "engine_not_found"
    assert (await ask("DELETE", "/a"))[1]["error"]["code"] == "engine_busy"
    assert (await ask("DELETE", "/a?force=true"))[0] == 200
    assert list(running.router.engines) == ["b"]


async def test_without_a_key_there_is_no_admin_api() -> None:
    http = httpx.AsyncClient(
        transport=httpx.ASGITransport(Gateway(parse_config({"engines": [A]}, "test")).app), base_url="http://gateway"
    )
    answer = await http.get("/admin/engines", headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    await http.aclose()


@pytest.mark.parametrize("valid", [True, False])
async def test_certificates_are_read_again(running: Running, monkeypatch: pytest.MonkeyPatch, valid: bool) -> None:
    """Whether the configuration can be used or not."""
    problem = "SSL_CERT_FILE=/none cannot be read"

    class Certificates:
        def reload(self) -> bool:
            if not valid:
                raise TrustError(problem)
            return True

    monkeypatch.setattr(reloading, "SYSTEM_TRUST", Certificates())

    def refused() -> Config:
        raise ConfigError("nonsense")

    change_level("info")  # others of this process may have changed it
    with capture_logs() as logs:
        running.reloading.reload(refused)
    said = {"event": "certificates reloaded", "log_level": "info"}
    refusal = {"event": "certificates refused, the old ones stay", "problem": problem, "log_level": "error"}
    assert logs[0] == (said if valid else refusal)
    assert running.reloading.refused == [*([] if valid else [problem]), "nonsense"], "status has all of them"
    running.reloading.reload(lambda: running.reloading.config)
    assert running.reloading.refused == ([] if valid else [problem])


def test_certificates_that_cannot_be_read_are_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/none/such.pem")
    monkeypatch.setattr(SYSTEM_TRUST, "_context", None)
    Gateway(config(A))
    server = {"advertise_url": "https://gateway", "peer_key": "p" * 32, "secret": "s" * 32}
    shared = config(A, server=server, store={"url": "postgresql://plait@db/plait"})
    for https in (config({**A, "url": "https://127.0.0.1:1"}), shared):
        with pytest.raises(ValueError, match=r"^SSL_CERT_FILE=/none/such.pem cannot be read: No such file"):
            Gateway(https)


async def test_an_engine_that_cannot_be_checked_is_not_added(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/none/such.pem")
    monkeypatch.setattr(SYSTEM_TRUST, "_context", None)
    body = {"name": "c", "url": "https://127.0.0.1:7"}
    answer = await running.http.post("/admin/engines", json=body, headers=ADMIN)
    assert (answer.status_code, "SSL_CERT_FILE" in answer.json()["error"]["message"]) == (400, True)
    assert "c" not in running.engines
    assert "c" not in running.router.engines


async def test_two_names_of_one_port_of_this_machine_are_warned_of(running: Running) -> None:
    with capture_logs() as logs:
        running.engines.add(EngineConfig(url="http://127.0.0.1:70", name="other"))
        running.engines.add(EngineConfig(url="http://localhost:7", name="one"))
        running.engines.add(EngineConfig(url="http://[::1]:7", name="same"))
        Gateway(config(A, {**B, "url": "http://localhost:1"}))
    said = [(line["engine"], line["other"]) for line in logs if line["event"] == "two engines may be one"]
    assert said == [("same", "one"), ("b", "a")]
