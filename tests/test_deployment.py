"""Dockerfile and compose file, checked without a container engine: what they start must parse as what Plait takes."""

import tomllib
from pathlib import Path

import yaml

from plait.gateway.cli import parse
from plait.gateway.config_file import parse_config

ROOT = Path(__file__).parent.parent


def compose() -> dict[str, dict[str, dict[str, object]]]:
    loaded: dict[str, dict[str, dict[str, object]]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def test_compose_config_names_the_engine_services() -> None:
    services = compose()["services"]
    content = compose()["configs"]["gateway"]["content"]
    assert isinstance(content, str)
    config = parse_config(tomllib.loads(content), "docker-compose.yml")
    engines = [name for name in services if name.startswith("engine-")]
    assert [engine.name for engine in config.engines] == engines
    assert services["gateway"]["depends_on"] == engines
    for engine in config.engines:
        assert engine.url == f"http://{engine.name}:8100"


def test_compose_engine_commands_parse() -> None:
    for name, service in compose()["services"].items():
        if name.startswith("engine-"):
            arguments = parse(service["command"])  # type: ignore[arg-type]
            assert (arguments.host, arguments.port, arguments.model) == ("0.0.0.0", 8100, "demo")


def test_image_runs_the_gateway_on_the_mounted_config() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert 'ENTRYPOINT ["plait"]' in lines
    command = next(line for line in lines if line.startswith("CMD "))
    arguments = parse(yaml.safe_load(command.removeprefix("CMD ")))
    assert arguments.config == Path("/etc/plait/config.toml")
    mounted = compose()["services"]["gateway"]["configs"]
    assert mounted == [{"source": "gateway", "target": "/etc/plait/config.toml"}]


def test_image_holds_everything_it_copies() -> None:
    copied = [
        word
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in allowed
