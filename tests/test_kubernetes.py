"""The manifests, checked without a cluster: they are valid, and Plait takes what they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from plait.backends.sglang.launch import serve_command as sglang_command
from plait.backends.vllm.launch import serve_command as vllm_command
from plait.gateway.commands.server_secret import known_secret
from plait.gateway.config.file import load_config
from plait.gateway.server.http_server import AFTER_CUT_S
from tests.source_tree import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
VERSION = "1.31"
ENGINES = {"vllm": vllm_command, "sglang": sglang_command}


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def of_kind(name: str, kind: str) -> dict[str, Any]:
    return next(one for one in manifests(name) if one["kind"] == kind)


@pytest.mark.parametrize("name", ["gateway", "gateways", *ENGINES])
def test_the_manifests_are_valid(name: str) -> None:
    for manifest in manifests(name):
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_all_that_is_applied_is_there() -> None:
    (applied,) = manifests("kustomization")
    assert {FOLDER / name for name in applied["resources"]} <= set(FOLDER.iterdir())


def test_the_gateway_takes_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_API_KEY", "key")
    monkeypatch.setenv("PLAIT_SECRET", "0123456789abcdef" * 4)
    file = tmp_path / "config.toml"
    file.write_text(of_kind("gateway", "ConfigMap")["data"]["config.toml"])
    config = load_config(file)
    assert known_secret(config, file) is not None
    pod = of_kind("gateway", "StatefulSet")["spec"]["template"]["spec"]
    server = config.server
    assert pod["terminationGracePeriodSeconds"] > server.drain_delay_s + server.shutdown_grace_s + AFTER_CUT_S
    (container,) = pod["containers"]
    assert container["ports"][0]["containerPort"] == server.port
    mounts = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
    assert config.store.path is not None
    assert any(Path(config.store.path).is_relative_to(mount) for mount in mounts)
    assert [service.url for service in config.services] == ["http://vllm-engines:8100"]


def test_gateways_that_share_a_store_take_their_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = of_kind("gateways", "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [variable["name"] for variable in container["env"]] == ["POD_IP"]
    monkeypatch.setenv("POD_IP", "10.1.2.3")
    for name in ("PLAIT_API_KEY", "PLAIT_SECRET", "PLAIT_PEER_KEY"):
        monkeypatch.setenv(name, f"{name:x<40}")
    file = tmp_path / "config.toml"
    file.write_text(of_kind("gateways", "ConfigMap")["data"]["config.toml"])
    config = load_config(file)
    assert config.store.url is not None
    assert config.server.advertise_url == f"http://10.1.2.3:{container['ports'][0]['containerPort']}"
    assert (
        pod["terminationGracePeriodSeconds"]
        > config.server.drain_delay_s + config.server.shutdown_grace_s + AFTER_CUT_S
    )
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/etc/plait"], "no state but the store's"


@pytest.mark.parametrize("name", ENGINES)
def test_the_engines_are_started_as_their_commands_take_it(name: str) -> None:
    spec = of_kind(name, "StatefulSet")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert ENGINES[name](container["args"])
    service = of_kind(name, "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"]
    assert spec["serviceName"] == service["metadata"]["name"]
