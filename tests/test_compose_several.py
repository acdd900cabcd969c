"""The compose file's profile with several gateways, checked without a container engine."""

from __future__ import annotations

import re

import pytest

from plait.gateway.cli import parse
from plait.gateway.config.file import load_config
from plait.gateway.config.sections import Config
from plait.gateway.config.server import ServerConfig
from plait.gateway.server.http_server import AFTER_CUT_S
from tests.source_tree import ROOT
from tests.test_compose import compose, engines, seconds, services

NGINX = (ROOT / "deploy" / "several" / "nginx.conf").read_text(encoding="utf-8")
STARTED = services("several")
GATEWAYS = ("gateway-1", "gateway-2", "gateway-3")


def config(name: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A gateway's configuration, by what is mounted and set for it."""
    service = STARTED[name]
    (mounted,) = service["volumes"]
    source, target, mode = mounted.split(":")
    assert (str(parse(service["command"]).config), mode) == (target, "ro")
    for key, value in service["environment"].items():
        monkeypatch.setenv(key, value)
    return load_config(ROOT / source)


def test_three_gateways_a_balancer_a_database_and_the_engines_start() -> None:
    assert set(STARTED) == {*GATEWAYS, "balancer", "postgres", *engines("embedded")}


@pytest.mark.parametrize("name", GATEWAYS)
def test_each_gateway_enters_the_name_by_which_the_others_reach_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(name, monkeypatch)
    assert made.server.advertise_url == f"http://{name}:{made.server.port}"
    assert made.server.host == "0.0.0.0"
    assert [engine.url for engine in made.engines] == [f"http://{engine}:8100" for engine in engines("embedded")]
    server, grace_s = ServerConfig(), seconds(STARTED[name]["stop_grace_period"])
    assert grace_s > server.drain_delay_s + server.shutdown_grace_s + AFTER_CUT_S


def test_gateways_have_one_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {config(name, monkeypatch).server.secret for name in GATEWAYS}
    assert len(secrets) == 1
    assert None not in secrets, "each would make its own, and /admin/status would say `secret_differs`"


def test_gateways_find_the_database_with_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    database = STARTED["postgres"]
    for name in GATEWAYS:
        assert config(name, monkeypatch).store.url == "postgresql://plait@postgres:5432/plait"
        assert STARTED[name]["environment"]["PGPASSWORD"] == database["environment"]["POSTGRES_PASSWORD"]
        assert STARTED[name]["depends_on"]["postgres"] == {"condition": "service_healthy"}
    assert database["environment"]["POSTGRES_USER"] == "plait"
    assert database["volumes"][0].split(":")[0] in compose()["volumes"]


def test_no_gateway_and_no_database_is_open_to_the_machine() -> None:
    assert [name for name, service in STARTED.items() if "ports" in service] == ["balancer"]


def test_the_balancer_asks_again_for_the_address_of_a_gateway_that_is_made_anew() -> None:
    upstream = re.search(r"upstream gateways \{(.*?)\}", NGINX, re.DOTALL)
    assert upstream is not None
    servers = [line.split() for line in upstream[1].splitlines() if "server " in line]
    assert all("resolve" in server for server in servers)
    assert "zone gateways " in upstream[1], "nginx resolves names again where its processes share them"
    assert "resolver 127.0.0.11 valid=" in NGINX, "by Docker's DNS"
    version = tuple(map(int, re.findall(r"nginx:(\d+)\.(\d+)", STARTED["balancer"]["image"])[0]))
    assert version >= (1, 28), "1.27.3 is the first version that can do so"


def test_the_balancer_knows_all_gateways_and_keeps_what_is_theirs() -> None:
    assert re.findall(r"server ([a-z0-9-]+):8000 ", NGINX) == list(GATEWAYS)
    assert re.search(r"listen (\d+);", NGINX)[1] == STARTED["balancer"]["ports"][0].rpartition(":")[2]  # type: ignore[index]
    assert 'proxy_set_header plait-peer "";' in NGINX, "clients must not pass for gateways"
    assert f"client_max_body_size {ServerConfig().max_body_bytes // 2**20}m;" in NGINX
