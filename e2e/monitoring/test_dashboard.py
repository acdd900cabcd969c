"""The shipped dashboard, on a real Prometheus with the shipped configuration that scrapes two gateways under load."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from e2e.monitoring.prometheus import PACKAGE, SHIPPED, Prometheus, prometheus
from e2e.ports import free_port
from e2e.sdk import asking
from e2e.server_process import NO_TLS, Server, eventually
from e2e.servers import Launcher
from tests.pages import blocks
from tests.test_monitoring import ZERO
from tests.waiting import WITHIN_S

PAUSE_S = 0.05
"""Between two calls of one client: a refused one would be sent again at once."""
LOOK_S = 1.0
RATE_INTERVAL = "3s"
WORKERS = 2
"""Of each gateway."""
DOCUMENT = "A document that all questions share. " * 120
TENANTS: list[Mapping[str, Any]] = [
    {"name": "blue", "api_keys": ["blue-key"]},
    {"name": "green", "api_keys": ["green-key"], "max_running": 2, "max_waiting": 2},
]
"""Each worker has its part of the limits: one call may run, and one wait."""
CHAT = "/v1/chat/completions"
NO_VALUE_YET: Final = {"Mispredicted"}
"""Panels of gauges that are ratios or means."""
CHOSEN: Final = {"worker": "1", "model": "demo", "engine": "engine-1", "tenant": "green"}
"""A value of each variable but the gateway's, which is a port."""


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((SHIPPED / "dashboard.json").read_text())
    return loaded


def variables() -> dict[str, dict[str, Any]]:
    """The dashboard's variables that filter, by name."""
    return {one["name"]: one for one in dashboard()["templating"]["list"] if one["type"] == "query"}


def queries(chosen: Mapping[str, str], *, zero: bool = False) -> list[tuple[str, str]]:
    """Each query of the dashboard as Grafana asks it, with the title of its panel. Other variables stand at "All".

    Without what it draws as `zero` of a process that has counted nothing.
    """
    return [
        (panel["title"], filled(target["expr"] if zero else target["expr"].removesuffix(ZERO), chosen))
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


def filled(query: str, chosen: Mapping[str, str]) -> str:
    """A query with the variables' values. They are escaped twice: for the string, and for the regular expression."""
    for name, variable in variables().items():
        value = chosen[name].replace(".", r"\\.") if name in chosen else variable["allValue"]
        query = query.replace(f'"${name}"', f'"{value}"')
    return query.replace("$__rate_interval", RATE_INTERVAL)


async def tenant(url: str, key: str, bodies: list[dict[str, Any]], seen: Counter[int]) -> None:
    """Send these calls one after the other, again and again, until cancelled. Each has a connection of its own, so that
    all workers get some.
    """
    headers = {"authorization": f"Bearer {key}", "plait-slo-ttft-ms": "2000"}
    one_each = httpx.Limits(max_keepalive_connections=0)
    number = 0
    async with httpx.AsyncClient(
        base_url=url, verify=NO_TLS, trust_env=False, timeout=WITHIN_S, limits=one_each
    ) as gateway:
        while True:
            body = bodies[number % len(bodies)]
            seen[(await gateway.post(CHAT, json=body, headers=headers)).status_code] += 1
            number += 1
            await asyncio.sleep(PAUSE_S)


async def load(gateways: list[Server], is_enough: Callable[[], bool]) -> Counter[int]:
    """Two tenants' calls until they are enough: one asks on a document, the other has to wait and makes mistakes."""
    seen: Counter[int] = Counter()
    good = [asking(f"{DOCUMENT} Question {number}?", max_tokens=24, stream=True) for number in range(40)]
    bad = [asking("Hello.", model="nope"), asking("Hello.", max_tokens=0), asking("Hello.", max_tokens=24, stream=True)]
    tasks = []
    for gateway in gateways:
        tasks += [asyncio.create_task(tenant(gateway.url, "blue-key", good[number:], seen)) for number in range(4)]
        tasks += [asyncio.create_task(tenant(gateway.url, "green-key", bad, seen)) for _ in range(6)]
    ends_s, ended = time.monotonic() + WITHIN_S, set[asyncio.Task[None]]()
    while not ended and time.monotonic() < ends_s and not await asyncio.to_thread(is_enough):
        ended, _ = await asyncio.wait(tasks, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for failure in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(failure, asyncio.CancelledError), failure
    return seen


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two of two workers each, over the same engines, of which one is not there."""
    with Launcher(tmp_path_factory.mktemp("monitored")) as launch:
        engines = [launch.engine(name, time_scale=2) for name in ("engine-0", "engine-1")]
        configured: list[Server | Mapping[str, Any]] = [
            *engines,
            {"name": "gone", "url": f"http://127.0.0.1:{free_port()}"},
        ]
        names, server = ("gateway-0", "gateway-1"), {"workers": WORKERS}
        gateways = [launch.gateway(configured, name, server=server, tenants=TENANTS) for name in names]
        for one in (*engines, *gateways):
            one.start()
        for one in (*engines, *gateways):
            one.wait_until_ready()
        up = WORKERS * len(engines)
        eventually(lambda: all(gateway.metric("plait_engine_up") == up for gateway in gateways))
        yield gateways


@pytest.fixture(scope="module")
def binary() -> Path:
    found = PACKAGE.program("prometheus")
    if found is None:
        pytest.skip("needs Prometheus: `python -m e2e.monitoring.prometheus` fetches it with apt-get")
    return found


class Scraped:
    """A Prometheus that scrapes gateways (`host:port`) under load, asked as Grafana asks it."""

    def __init__(self, server: Prometheus, gateways: list[str]) -> None:
        self.server = server
        self.gateways = gateways
        self._since_s = time.time()
        values = {"gateway": gateways[1], **CHOSEN}
        self.choices: dict[str, dict[str, str]] = {"all": {}, **{name: {name: values[name]} for name in values}}
        """All variables at "All", and each at one value."""
        self.at_first: list[tuple[str, str]] = []
        """What was empty before the first call."""

    def lacking(self, choice: str) -> Iterator[str]:
        """The queries without data of each process that there is with this choice, or with data of others."""
        chosen = self.choices[choice]
        workers = {
            (gateway, worker)
            for gateway in self.gateways
            for worker in map(str, range(WORKERS))
            if chosen.get("gateway", gateway) == gateway and chosen.get("worker", worker) == worker
        }
        for title, query in queries(chosen):
            series = self._series(query)
            told = {(labels.get("instance"), labels.get("worker")) for labels in series}
            expected = workers if "worker" in query else {(gateway, None) for gateway, _ in workers}
            others = [one for one in series if any(one.get(name, chosen[name]) != chosen[name] for name in chosen)]
            if told != expected or others:
                yield f"{title}: {query}: {told}"

    def empty(self) -> Iterator[tuple[str, str]]:
        """The panels and queries without any data."""
        return ((title, query) for title, query in queries({}, zero=True) if not self._series(query))

    def is_scraped(self) -> bool:
        """Whether all have been scraped often enough for a rate."""
        rate = f"rate(process_cpu_seconds_total[{RATE_INTERVAL}])"
        return len({one["instance"] for one in self._series(rate)}) == len(self.gateways)

    def is_enough(self) -> bool:
        """Whether nothing is lacking."""
        return not any(lacking for choice in self.choices for lacking in self.lacking(choice))

    def _series(self, query: str) -> list[dict[str, str]]:
        """The labels of a query's series that have a value at some time."""
        series = self.server.query(query, self._since_s)
        return [one["metric"] for one in series if any(math.isfinite(float(value)) for _, value in one["values"])]


@pytest.fixture(scope="module")
def scraped(binary: Path, gateways: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    hosts = [gateway.url.removeprefix("http://") for gateway in gateways]
    with prometheus(binary, tmp_path_factory.mktemp("prometheus"), hosts) as server:
        scraped = Scraped(server, hosts)
        eventually(scraped.is_scraped)
        scraped.at_first = list(scraped.empty())
        seen = asyncio.run(load(gateways, scraped.is_enough))
        assert {200, 400, 429, 503} <= set(seen), seen  # 503: the engine that is not there could have the model
        yield scraped


def test_a_panel_of_a_fresh_gateway_is_empty_only_where_there_is_no_value(scraped: Scraped) -> None:
    """Quantiles, ratios and means have none without a call."""
    empty = {title for title, query in scraped.at_first if "histogram_quantile" not in query and " / " not in query}
    assert empty == NO_VALUE_YET


@pytest.mark.parametrize("choice", ["all", *variables()])
def test_each_query_tells_the_processes_apart(scraped: Scraped, choice: str) -> None:
    assert list(scraped.lacking(choice)) == []


def test_the_variables_offer_what_there_is(scraped: Scraped) -> None:
    offered = {}
    for name, variable in variables().items():
        selector, _, label = filled(variable["query"], {})[len("label_values(") : -1].rpartition(", ")
        offered[name] = scraped.server.label_values(label, selector)
    assert offered == {
        "gateway": set(scraped.gateways),
        "worker": {"0", "1"},
        "model": {"demo"},
        "engine": {"engine-0", "engine-1", "gone"},
        "tenant": {"blue", "green"},
    }


def test_each_alert_fires_in_its_time_and_is_silent_else(binary: Path) -> None:
    promtool = binary.with_name("promtool")
    for options in (("check", "rules", "rules.yml"), ("test", "rules", "rules.test.yml")):
        ran = subprocess.run([promtool, *options], cwd=SHIPPED, capture_output=True, check=False)
        assert ran.returncode == 0, ran.stdout.decode() + ran.stderr.decode()


def test_promtool_takes_the_configuration_and_the_metrics(binary: Path, gateways: list[Server]) -> None:
    promtool = binary.with_name("promtool")
    subprocess.run([promtool, "check", "config", SHIPPED / "prometheus.yml"], check=True, capture_output=True)
    metrics = gateways[0].get("/metrics").content
    checked = subprocess.run([promtool, "check", "metrics"], input=metrics, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr.decode()


def test_promtool_takes_the_queries_of_the_pages(binary: Path, tmp_path: Path) -> None:
    found = [text for _, text in blocks("promql")]
    assert found
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(found)]
    file = tmp_path / "queries.json"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "pages", "rules": rules}]}))
    ran = subprocess.run([binary.with_name("promtool"), "check", "rules", file], capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
