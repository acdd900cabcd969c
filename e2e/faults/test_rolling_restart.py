"""Stopping, restarting and reloading under load: every call gets its answer, or is told."""

from __future__ import annotations

import asyncio
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from e2e.ports import free_port
from e2e.rolling_load import Ended, chat, client, get, post, steady_load
from e2e.server_process import STOPPED_BY_SIGTERM, Server, eventually
from e2e.servers import Fleet, Launcher, toml
from tests.waiting import SLOWNESS, WITHIN_S

ADMIN_KEY = "sk-admin"
DRAIN_DELAY_S, GRACE_S = 1.0 * SLOWNESS, 2.0 * SLOWNESS
STOPPING = "503 gateway_stopping"


class Admin:
    """The admin API of a gateway."""

    def __init__(self, server: Server, port: int | None = None) -> None:
        self._url = f"http://127.0.0.1:{port or server.port}/admin/engines"

    def __call__(self, method: str, path: str = "", key: str = ADMIN_KEY, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.request(method, self._url + path, headers=headers, trust_env=False, timeout=WITHIN_S, **options)

    def engine(self, name: str) -> dict[str, Any]:
        described: dict[str, Any] = self("GET", f"/{name}").json()
        return described

    def drain(self, name: str, state: str = "draining") -> None:
        answer = self("POST", f"/{name}", json={"state": state})
        assert (answer.status_code, answer.json()["state"]) == (200, state)

    def names(self) -> list[str]:
        return [engine["name"] for engine in self("GET").json()["data"]]


def started(launch: Launcher, *names: str, **server: Any) -> Fleet:
    engines = [launch.engine(name) for name in names]
    fleet = Fleet(
        launch.gateway(engines, server={"admin_key": ADMIN_KEY, **server}), {engine.name: engine for engine in engines}
    )
    fleet.start()
    return fleet


async def until(holds: Callable[[], bool]) -> None:
    await asyncio.to_thread(eventually, holds)


async def test_at_sigterm_every_call_is_answered_or_told(launch: Launcher) -> None:
    fleet = await asyncio.to_thread(started, launch, "a", "b", drain_delay_s=DRAIN_DELAY_S, shutdown_grace_s=GRACE_S)
    gateway = fleet.gateway
    async with client(gateway) as http, steady_load(gateway) as load:
        endless = chat("Go on", 50_000)
        waiting: dict[str, asyncio.Task[Ended]] = {
            "stranded held call": asyncio.create_task(
                post(http, chat("Use {{never}}"), plait_session="x", plait_inputs="never")
            ),
            "stranded get": asyncio.create_task(get(http, "x", "never")),
            "endless stream": asyncio.create_task(post(http, chat("Go on", 50_000, stream=True))),
            "endless whole": asyncio.create_task(post(http, endless)),
            "endless producer": asyncio.create_task(post(http, endless, plait_session="y", plait_output="v")),
        }
        await asyncio.sleep(0.5 * SLOWNESS)
        waiting["held call"] = asyncio.create_task(post(http, chat("Use {{v}}"), plait_session="y", plait_inputs="v"))
        waiting["get"] = asyncio.create_task(get(http, "y", "v"))
        await asyncio.sleep(0.5 * SLOWNESS)
        terminated_s = asyncio.get_running_loop().time()
        gateway.terminate()
        await until(lambda: gateway.get("/ready").status_code == 503)
        assert gateway.get("/ready").json()["stopping"] is True
        assert (await post(http, chat("Still there?"))).how == "complete"
        ended = {name: await task for name, task in waiting.items()}
    closed_s, deadline_s = terminated_s + DRAIN_DELAY_S, terminated_s + DRAIN_DELAY_S + GRACE_S
    assert {name: one.how for name, one in ended.items()} == {
        **dict.fromkeys(ended, STOPPING),
        "endless stream": "event gateway_stopping",
    }
    first_cut_s = min(one.at_s for name, one in ended.items() if not name.startswith("stranded"))
    for name, one in ended.items():
        is_stranded = name.startswith("stranded")
        assert one.at_s > (closed_s if is_stranded else deadline_s) - 0.1, (name, one.at_s - terminated_s)
        assert not is_stranded or one.at_s < first_cut_s, "what nothing can wake is told at once"
        assert one.retry_after == "1" or one.how.startswith("event")
    assert load.lost() == {}, load.ended
    assert await asyncio.to_thread(gateway.wait) in STOPPED_BY_SIGTERM


async def test_a_second_sigterm_ends_at_once(launch: Launcher) -> None:
    fleet = await asyncio.to_thread(started, launch, "a", drain_delay_s=10 * WITHIN_S)
    fleet.gateway.terminate()
    await until(lambda: fleet.gateway.get("/ready").status_code == 503)
    fleet.gateway.terminate()
    assert fleet.gateway.wait() == -signal.SIGTERM


async def test_a_rolling_restart_of_all_engines_loses_no_call(launch: Launcher) -> None:
    fleet = await asyncio.to_thread(started, launch, "a", "b", "c")
    admin = Admin(fleet.gateway)

    def roll(name: str) -> None:
        admin.drain(name)
        eventually(lambda: admin.engine(name)["outstanding_calls"] == 0)
        fleet.engines[name].stop()
        fleet.engines[name].start()
        fleet.engines[name].wait_until_ready()
        admin.drain(name, "active")
        eventually(lambda: admin.engine(name)["health"] == "up")

    async with steady_load(fleet.gateway) as load:
        for name in fleet.engines:
            await asyncio.to_thread(roll, name)
        await asyncio.sleep(0.3)
    assert load.lost() == {}, load.ended
    assert {kind for kind, how in load.ended if how == "complete"} == {"stream", "whole", "chained", "get"}


async def test_sighup_adds_removes_and_changes_engines_without_a_lost_call(launch: Launcher, tmp_path: Path) -> None:
    fleet = await asyncio.to_thread(started, launch, "a", "b")
    gateway, admin, path = fleet.gateway, Admin(fleet.gateway), tmp_path / "gateway.toml"
    others = [launch.engine(name) for name in ("c", "d")]
    for other in others:
        other.start()
    for other in others:
        await asyncio.to_thread(other.wait_until_ready)
    config = tomllib.loads(path.read_text())

    def reload(engines: list[dict[str, Any]], **sections: Any) -> None:
        path.write_text(toml({**config, "engines": engines, **sections}))
        gateway.signal(signal.SIGHUP)

    a, b, c, d = ({"name": one.name, "url": one.url} for one in (*fleet.engines.values(), *others))
    async with steady_load(gateway) as load:
        reload([b, c])
        await until(lambda: admin.names() == ["b", "c"])
        reload([d])
        await until(lambda: admin.names() == ["d"])
        reload([{**d, "url": a["url"]}])
        await until(lambda: admin.engine("d")["url"] == a["url"])
        fleet.engines["b"].stop()
        await asyncio.sleep(0.3)
        reload([{"url": 3}])
        await until(lambda: "configuration refused" in gateway.log())
        reload([{**d, "url": a["url"]}], placement={"policy": "round_robin"}, log={"level": "warning"})
        await until(lambda: "placement.policy" in gateway.log())
        assert admin.names() == ["d"]
    assert load.lost() == {}, load.ended
    assert gateway.metric("plait_reloads_total", outcome="applied") == 4
    assert gateway.metric("plait_reloads_total", outcome="refused") == 1


async def test_the_admin_api(launch: Launcher) -> None:
    port = free_port()
    fleet = await asyncio.to_thread(started, launch, "a", "b", admin_port=port)
    admin, outside = Admin(fleet.gateway, port), Admin(fleet.gateway)
    assert outside("GET").status_code == 404, "it has a listener of its own"
    assert admin("GET", key="wrong").status_code == 401
    assert [engine["state"] for engine in admin("GET").json()["data"]] == ["active", "active"]
    late = launch.engine("late", model="late-model")
    late.start()
    late.wait_until_ready()
    added = admin("POST", json={"name": "late", "url": late.url})
    assert (added.status_code, added.json()["health"]) == (201, "untried")
    await until(lambda: admin.engine("late")["models"].keys() == {"late-model"})
    again = admin("POST", json={"name": "late", "url": "http://127.0.0.1:9"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "engine_exists")
    busy = admin("DELETE", "/late")
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "engine_busy")
    for wrong in ({}, {"name": "x"}, {"url": "ftp://x"}, {"url": "http://x", "nmae": "y"}):
        refused = admin("POST", json=wrong)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    admin.drain("late")
    assert admin("DELETE", "/late").status_code == 200
    assert admin("GET", "/late").json()["error"]["code"] == "engine_not_found"
    async with client(fleet.gateway) as http:
        calls = [asyncio.create_task(post(http, chat(f"Call {number}", 2_000))) for number in range(6)]
        await until(lambda: admin.engine("a")["outstanding_calls"] > 0)
        assert (await asyncio.to_thread(admin, "DELETE", "/a?force=true")).status_code == 200
        assert [(await call).how for call in calls] == ["complete"] * 6, "they moved"
    assert admin.names() == ["b"]
