"""The shipped dashboard, on a real Prometheus with the shipped configuration that scrapes a gateway under load."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.monitoring.prometheus import PACKAGE, SHIPPED, Prometheus, prometheus
from e2e.sdk import asking
from e2e.server_process import NO_TLS
from e2e.servers import Fleet, Launcher

LOAD_S = 8.0
RATE_INTERVAL = "3s"
DOCUMENT = "A document that all questions share. " * 120
TENANTS: list[Mapping[str, Any]] = [
    {"name": "blue", "api_keys": ["blue-key"]},
    {"name": "green", "api_keys": ["green-key"], "max_running": 1, "max_waiting": 3},
]
CHAT = "/v1/chat/completions"


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((SHIPPED / "dashboard.json").read_text())
    return loaded


def queries() -> list[tuple[str, str]]:
    """Each query of the dashboard, with the title of its panel."""
    return [(panel["title"], target["expr"]) for panel in dashboard()["panels"] for target in panel.get("targets", [])]


async def tenant(gateway: httpx.AsyncClient, key: str, bodies: list[dict[str, Any]], seen: Counter[int]) -> None:
    """Send these calls one after the other, again and again, until cancelled."""
    headers = {"authorization": f"Bearer {key}", "plait-slo-ttft-ms": "2000"}
    number = 0
    while True:
        body = bodies[number % len(bodies)]
        seen[(await gateway.post(CHAT, json=body, headers=headers)).status_code] += 1
        number += 1


async def load(url: str) -> Counter[int]:
    """Two tenants' calls for some seconds: one asks on a document, the other has to wait and makes mistakes."""
    seen: Counter[int] = Counter()
    good = [asking(f"{DOCUMENT} Question {number}?", max_tokens=24, stream=True) for number in range(40)]
    bad = [asking("Hello.", model="nope"), asking("Hello.", max_tokens=0), asking("Hello.", max_tokens=24)]
    async with httpx.AsyncClient(base_url=url, verify=NO_TLS, trust_env=False, timeout=30) as gateway:
        tasks = [asyncio.create_task(tenant(gateway, "blue-key", good[number:], seen)) for number in range(4)]
        tasks += [asyncio.create_task(tenant(gateway, "green-key", bad, seen)) for _ in range(6)]
        await asyncio.wait(tasks, timeout=LOAD_S, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended
    return seen


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Launcher(tmp_path_factory.mktemp("monitored")) as launch:
        engines = [launch.engine(name, time_scale=2) for name in ("engine-0", "engine-1")]
        fleet = Fleet(launch.gateway(engines, tenants=TENANTS), {engine.name: engine for engine in engines})
        fleet.start()
        yield fleet


@pytest.fixture(scope="module")
def binary() -> Path:
    found = PACKAGE.program("prometheus")
    if found is None:
        pytest.skip("needs Prometheus: `python -m e2e.monitoring.prometheus` fetches it with apt-get")
    return found


def finite(series: list[dict[str, Any]]) -> bool:
    return any(math.isfinite(float(value)) for one in series for _, value in one["values"])


def without_data(server: Prometheus, since_s: float) -> list[str]:
    """The dashboard's queries that have no value at any time."""
    return [
        f"{title}: {query}"
        for title, query in queries()
        if not finite(server.query(query.replace("$__rate_interval", RATE_INTERVAL), since_s))
    ]


def test_every_query_of_the_dashboard_has_data(binary: Path, fleet: Fleet, tmp_path: Path) -> None:
    since_s = time.time()
    with prometheus(binary, tmp_path, fleet.gateway.url.removeprefix("http://")) as server:
        seen = asyncio.run(load(fleet.gateway.url))
        assert {200, 400, 404, 429} <= set(seen), seen
        assert not without_data(server, since_s)


def test_each_alert_fires_in_its_time_and_is_silent_else(binary: Path) -> None:
    promtool = binary.with_name("promtool")
    for options in (("check", "rules", "rules.yml"), ("test", "rules", "rules.test.yml")):
        ran = subprocess.run([promtool, *options], cwd=SHIPPED, capture_output=True, check=False)
        assert ran.returncode == 0, ran.stdout.decode() + ran.stderr.decode()


def test_promtool_takes_the_configuration_and_the_metrics(binary: Path, fleet: Fleet) -> None:
    promtool = binary.with_name("promtool")
    subprocess.run([promtool, "check", "config", SHIPPED / "prometheus.yml"], check=True, capture_output=True)
    metrics = fleet.gateway.get("/metrics").content
    checked = subprocess.run([promtool, "check", "metrics"], input=metrics, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr.decode()
