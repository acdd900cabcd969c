"""The compose file, checked without a container engine: each profile is whole, and Plait takes what it starts."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from plait.backends.sglang.launch import serve_command as sglang_command
from plait.backends.sglang.launch import serve_environment
from plait.backends.vllm.launch import serve_command as vllm_command
from plait.gateway.cli import LAUNCHERS, parse
from plait.gateway.config import Config
from plait.gateway.config_file import parse_config
from tests.source_tree import ROOT

REFERENCE: Final = re.compile(r"\$\{(\w+):-([^}]*)\}")
GATEWAYS: Final = {"embedded": "gateway", "vllm": "gateway-vllm", "sglang": "gateway-sglang"}
SERVE_COMMAND: Final = {"vllm": vllm_command, "sglang": sglang_command}
REAL: Final = tuple(SERVE_COMMAND)
PORT: Final = 8100

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
    apart = {GATEWAYS[profile], "tokenizer"}
    return {name: service for name, service in services(profile, environment).items() if name not in apart}


def config(profile: str, environment: Mapping[str, str] | None = None) -> Config:
    """The configuration that the profile's gateway mounts."""
    (mounted,) = services(profile, environment)[GATEWAYS[profile]]["configs"]
    assert mounted["target"] == "/etc/plait/config.toml"
    content = compose(environment)["configs"][mounted["source"]]["content"]
    return parse_config(tomllib.loads(content), mounted["target"])


def served(profile: str, service: Mapping[str, Any]) -> list[str]:
    """The engine's own command, as Plait's launcher makes it of the image's entry and the service's command."""
    lines = Path(ROOT, service["build"]["dockerfile"]).read_text(encoding="utf-8").splitlines()
    (entry,) = (yaml.safe_load(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT "))
    assert entry == ["plait", profile]
    assert profile in LAUNCHERS
    return SERVE_COMMAND[profile](service["command"])


def options(command: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in command if word.startswith("--") and "=" in word)


def test_without_a_profile_the_embedded_engines_start() -> None:
    assert "COMPOSE_PROFILES=embedded" in (ROOT / ".env").read_text(encoding="utf-8").splitlines()
    assert list(services("embedded")) == ["gateway", "engine-0", "engine-1", "engine-2", "engine-3"]


@real_profiles
def test_a_real_profile_starts_two_engines_and_nothing_embedded(profile: str) -> None:
    assert set(services(profile)) == {"tokenizer", GATEWAYS[profile], f"{profile}-0", f"{profile}-1"}
    assert list(engines(profile)) == [f"{profile}-0", f"{profile}-1"]


def test_every_service_has_a_profile() -> None:
    """One without would start beside the engines of every profile."""
    assert all(set(service["profiles"]) <= set(GATEWAYS) for service in compose()["services"].values())


@profiles
def test_the_gateway_names_the_engines_of_its_profile(profile: str) -> None:
    named = config(profile).engines
    assert [engine.name for engine in named] == list(engines(profile))
    assert [engine.url for engine in named] == [f"http://{name}:{PORT}" for name in engines(profile)]


@profiles
def test_the_gateway_waits_for_healthy_engines(profile: str) -> None:
    awaited = {name: how["condition"] for name, how in services(profile)[GATEWAYS[profile]]["depends_on"].items()}
    assert awaited.pop("tokenizer", None) == (None if profile == "embedded" else "service_completed_successfully")
    assert awaited == dict.fromkeys(engines(profile), "service_healthy")


@profiles
def test_what_a_service_waits_for_is_in_its_profile_and_says_when_it_is_healthy(profile: str) -> None:
    started = services(profile)
    for service in started.values():
        for name, how in service.get("depends_on", {}).items():
            assert how["condition"] == "service_completed_successfully" or "healthcheck" in started[name]


@profiles
def test_health_checks_ask_the_port_that_is_served(profile: str) -> None:
    gateway = services(profile)[GATEWAYS[profile]]
    assert "http://127.0.0.1:8000/ready" in gateway["healthcheck"]["test"][-1]
    for service in engines(profile).values():
        assert f"http://127.0.0.1:{PORT}/health" in service["healthcheck"]["test"][-1]


def test_embedded_engines_commands_parse() -> None:
    for service in engines("embedded").values():
        arguments = parse(service["command"])
        assert (arguments.host, arguments.port, arguments.model) == ("0.0.0.0", PORT, "demo")


@real_profiles
@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "mistralai/Mistral-7B-Instruct-v0.3"])
def test_engines_serve_the_gateways_model(profile: str, model: str) -> None:
    given = {"PLAIT_MODEL": model}
    for service in engines(profile, given).values():
        command = served(profile, service)
        assert options(command)["--host"] == "0.0.0.0"
        assert options(command)["--port"] == str(PORT)
        assert (command[4] if profile == "vllm" else options(command)["--model-path"]) == model
    assert [configured.name for configured in config(profile, given).models] == [model]


def test_sglang_engines_settings_are_taken() -> None:
    for service in engines("sglang").values():
        assert serve_environment(service["command"], service["environment"])["PLAIT_SGLANG"] == "{}"


@real_profiles
def test_the_tokenizer_is_where_the_gateway_looks_for_it(profile: str) -> None:
    given = {"PLAIT_MODEL": "some/model"}
    started = services(profile, given)
    (model,) = config(profile, given).models
    command = started["tokenizer"]["command"]
    assert command[0] == model.name
    assert options(command)["--local-dir"] == model.tokenizer
    assert started["tokenizer"]["volumes"] == ["models:/models"]
    assert started[GATEWAYS[profile]]["volumes"] == ["models:/models:ro"]
    assert Path(model.tokenizer).is_relative_to("/models")
    assert "models" in compose()["volumes"]


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
    assert named == set(REAL)
