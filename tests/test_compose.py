"""The compose file, checked without a container engine: each profile is whole, and Plait takes what it starts."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from plait.backends.profiles import load_profile
from plait.backends.sglang.launch import serve_command as sglang_command
from plait.backends.sglang.launch import serve_environment
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.vllm.launch import serve_command as vllm_command
from plait.gateway.app import Gateway
from plait.gateway.cli import LAUNCHERS, parse
from plait.gateway.commands.given_engines import given_engines
from plait.gateway.config.sections import Config
from plait.gateway.config.server import ServerConfig
from plait.gateway.server.http_server import AFTER_CUT_S
from plait.lab.embedded.completion import ServedModel
from plait.lab.embedded.engine import EngineSettings
from plait.lab.embedded.server import EmbeddedServer, ServerSettings
from tests.source_tree import ROOT

REFERENCE: Final = re.compile(r"\$\{(\w+):-([^}]*)\}")
ALIAS: Final = "gateway"
"""The host name of every profile's gateway."""
GATEWAYS: Final = {"embedded": "gateway", "vllm": "gateway-vllm", "sglang": "gateway-sglang"}
SERVE_COMMAND: Final = {"vllm": vllm_command, "sglang": sglang_command}
REAL: Final = tuple(SERVE_COMMAND)
PROFILES: Final = {*GATEWAYS, "several", "monitoring"}
PORT: Final = 8100
MONITORING: Final = ROOT / "deploy" / "monitoring"

profiles = pytest.mark.parametrize("profile", GATEWAYS)
real_profiles = pytest.mark.parametrize("profile", REAL)


def compose(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The file as Compose reads it: references to the environment are replaced, all with a default."""
    given = environment or {}
    text = REFERENCE.sub(lambda match: given.get(match[1]) or match[2], (ROOT / "docker-compose.yml").read_text())
    assert "$" not in text
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def services(profile: str, environment: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The services that `docker compose --profile PROFILE up` starts."""
    all_of_them = compose(environment)["services"].items()
    return {name: service for name, service in all_of_them if profile in service.get("profiles", [profile])}


def engines(profile: str, environment: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in services(profile, environment).items() if name != GATEWAYS[profile]}


def gateway(profile: str) -> argparse.Namespace:
    """The arguments of the profile's gateway."""
    return parse(services(profile)[GATEWAYS[profile]]["command"])


def config(profile: str) -> Config:
    """The configuration that they make."""
    return given_engines(gateway(profile)).load()


def served(profile: str, service: Mapping[str, Any]) -> list[str]:
    """The engine's own command, as Plait's launcher makes it of the image's entry and the service's command."""
    lines = Path(ROOT, service["build"]["dockerfile"]).read_text(encoding="utf-8").splitlines()
    (entry,) = (yaml.safe_load(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT "))
    assert entry == ["plait", profile]
    assert profile in LAUNCHERS
    return SERVE_COMMAND[profile](service["command"])


def options(command: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in command if word.startswith("--") and "=" in word)


def asked(service: Mapping[str, Any]) -> str:
    """The address that the service's health check asks."""
    (address,) = re.findall(r"urlopen\('([^']+)'\)", service["healthcheck"]["test"][-1])
    return str(address)


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


def test_without_a_profile_the_embedded_engines_start() -> None:
    assert "COMPOSE_PROFILES=embedded" in (ROOT / ".env").read_text(encoding="utf-8").splitlines()
    assert list(services("embedded")) == ["gateway", "engine-0", "engine-1", "engine-2", "engine-3"]


@real_profiles
def test_a_real_profile_starts_two_engines_and_nothing_embedded(profile: str) -> None:
    assert set(services(profile)) == {GATEWAYS[profile], f"{profile}-0", f"{profile}-1"}
    assert list(engines(profile)) == [f"{profile}-0", f"{profile}-1"]


def test_every_service_has_a_profile() -> None:
    """One without would start beside the engines of every profile."""
    assert all(set(service["profiles"]) <= PROFILES for service in compose()["services"].values())


@profiles
def test_the_gateway_has_the_engines_of_its_profile(profile: str) -> None:
    assert [engine.url for engine in config(profile).engines] == [f"http://{name}:{PORT}" for name in engines(profile)]
    assert gateway(profile).host == "0.0.0.0"


@profiles
def test_the_gateway_needs_nothing_beside_its_engines(profile: str) -> None:
    """Models and tokenizers come from the engines."""
    assert not config(profile).models
    assert not {"configs", "environment"} & set(services(profile)[GATEWAYS[profile]])


@profiles
def test_the_gateway_keeps_its_sessions_on_a_volume_that_the_images_user_can_write(profile: str) -> None:
    assert services(profile)[GATEWAYS[profile]]["volumes"] == ["sessions:/var/lib/plait"]
    assert config(profile).store.path == "/var/lib/plait/sessions.db"
    made = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"install --directory --owner plait --mode 0700 .*/var/lib/plait\n", made)


@profiles
def test_the_gateway_may_stop_in_its_steps(profile: str) -> None:
    """It is not killed before."""
    server = ServerConfig()
    grace_s = seconds(services(profile)[GATEWAYS[profile]]["stop_grace_period"])
    assert grace_s > server.drain_delay_s + server.shutdown_grace_s + AFTER_CUT_S


@profiles
def test_the_gateway_waits_for_healthy_engines(profile: str) -> None:
    awaited = {name: how["condition"] for name, how in services(profile)[GATEWAYS[profile]]["depends_on"].items()}
    assert awaited == dict.fromkeys(engines(profile), "service_healthy")


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_what_a_service_waits_for_is_in_its_profile_and_says_when_it_is_healthy(profile: str) -> None:
    started = services(profile)
    assert started
    for service in started.values():
        for name, how in service.get("depends_on", {}).items():
            assert how["condition"] == "service_started" or "healthcheck" in started[name]


@profiles
def test_health_checks_ask_the_port_that_is_served(profile: str) -> None:
    assert asked(services(profile)[GATEWAYS[profile]]) == "http://127.0.0.1:8000/ready"
    for service in engines(profile).values():
        assert asked(service) == f"http://127.0.0.1:{PORT}/health"


async def test_health_checks_ask_routes_that_are_there() -> None:
    engine = EngineSettings(name="e", model="demo", kv_tokens=4_000)
    model = ServedModel("demo", load_tokenizer("embedded"), 4_000)
    cost_model = load_profile("a6000-mistral-7b").cost_model()
    server = EmbeddedServer(ServerSettings(engine=engine, cost_model=cost_model, model=model))
    started = services("embedded")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Gateway(config("embedded")).app)) as http:
        assert (await http.get(asked(started["gateway"]))).status_code == 503, "no engine was tried"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app)) as http:
        assert (await http.get(asked(started["engine-0"]))).status_code == 200


@pytest.mark.parametrize("name", list(compose()["services"]))
def test_every_file_that_is_mounted_is_there(name: str) -> None:
    volumes = [entry.split(":")[0] for entry in compose()["services"][name].get("volumes", [])]
    for source in volumes:
        assert (ROOT / source).is_file() if source.startswith(".") else source in compose()["volumes"]


@pytest.mark.parametrize("name", list(compose()["services"]))
def test_ports_are_those_of_this_machine_alone(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in compose()["services"][name].get("ports", []))


def test_embedded_engines_commands_parse() -> None:
    for service in engines("embedded").values():
        arguments = parse(service["command"])
        assert (arguments.host, arguments.port, arguments.model) == ("0.0.0.0", PORT, "demo")


@real_profiles
@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "mistralai/Mistral-7B-Instruct-v0.3"])
def test_engines_serve_the_model_that_is_asked_for(profile: str, model: str) -> None:
    given = {"PLAIT_MODEL": model}
    for service in engines(profile, given).values():
        command = served(profile, service)
        assert options(command)["--host"] == "0.0.0.0"
        assert options(command)["--port"] == str(PORT)
        assert (command[4] if profile == "vllm" else options(command)["--model-path"]) == model


def test_sglang_engines_settings_are_taken() -> None:
    for service in engines("sglang").values():
        assert serve_environment(service["command"], service["environment"])["PLAIT_SGLANG"] == "{}"


@real_profiles
def test_engines_have_a_gpu_each_and_keep_the_model(profile: str) -> None:
    reserved = []
    for service in engines(profile).values():
        (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (devices["driver"], devices["capabilities"]) == ("nvidia", ["gpu"])
        reserved += devices["device_ids"]
        assert service["environment"]["HF_HOME"].startswith("/models/")
        assert service["volumes"] == ["models:/models"]
        assert service["shm_size"]
        assert service["healthcheck"]["start_period"].endswith("m")
    assert reserved == ["0", "1"]


def test_every_profile_that_a_page_names_is_there() -> None:
    pages = [ROOT / "README.md", ROOT / "docker-compose.yml", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"--profile (\w+) (?:up|down)", page.read_text())}
    assert named == {*REAL, "several", "monitoring"}


def test_prometheus_finds_each_gateway_of_each_profile_by_a_name() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert (found["type"], found["port"]) == ("A", 8000)
    for name in GATEWAYS.values():
        assert compose()["services"][name]["networks"] == {"default": {"aliases": [ALIAS]}}
    several = [name for name, one in services("several").items() if one.get("command", [""])[0] == "serve"]
    assert found["names"] == [ALIAS, *several], "each has one address, and no other service has such a name"
    assert not set(several) & {name for profile in GATEWAYS for name in services(profile)}


def test_grafana_finds_its_data_source_and_its_dashboard() -> None:
    mounted = dict(entry.split(":")[:2] for entry in services("monitoring")["grafana"]["volumes"])
    (source,) = yaml.safe_load((MONITORING / "datasource.yml").read_text(encoding="utf-8"))["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((MONITORING / "dashboards.yml").read_text(encoding="utf-8"))["providers"]
    assert Path(mounted["./deploy/monitoring/dashboard.json"]).parent == Path(provider["options"]["path"])
    panels = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    drawn = [panel for panel in panels if panel["type"] != "row"]
    assert all(panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"} for panel in drawn)
    assert len({panel["id"] for panel in panels}) == len(panels)
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == ["Problems", "Fleet", "Latency", "Placement", "Tenants", "Waiting"]
