"""Dockerfiles, checked without a container engine: they hold what the package needs, and start what Plait takes."""

from __future__ import annotations

import re
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

from plait.gateway.cli import parse
from tests.extras import distributions_of
from tests.source_tree import ROOT

DOCKERFILES = ("Dockerfile", "deploy/vllm/Dockerfile", "deploy/sglang/Dockerfile")
dockerfiles = pytest.mark.parametrize("dockerfile", DOCKERFILES)


def lines(dockerfile: str) -> list[str]:
    return (ROOT / dockerfile).read_text(encoding="utf-8").splitlines()


def copied(dockerfile: str) -> list[str]:
    """What the image takes from the repository."""
    copies = [line for line in lines(dockerfile) if line.startswith("COPY ") and "--from" not in line]
    return [word for line in copies for word in line.split()[1:-1]]


def wheel(root: Path, folder: Path) -> set[str]:
    """The files of the wheel that is built from `root`."""
    (path,) = WheelBuilder(str(root)).build(directory=str(folder))
    with ZipFile(path) as archive:
        return {name for name in archive.namelist() if not name.endswith("/RECORD")}


def test_image_runs_the_gateway_on_the_mounted_config() -> None:
    assert 'ENTRYPOINT ["plait"]' in lines("Dockerfile")
    command = next(line for line in lines("Dockerfile") if line.startswith("CMD "))
    arguments = parse(yaml.safe_load(command.removeprefix("CMD ")))
    assert arguments.config == Path("/etc/plait/config.toml")


def test_the_images_user_may_keep_tokenizers_that_engines_offer() -> None:
    text = "\n".join(lines("Dockerfile"))
    (folder,) = re.findall(r"XDG_CACHE_HOME=(\S+)", text)
    assert f"install --directory --owner plait --mode 0700 {folder}\nUSER plait\n" in text


@dockerfiles
def test_image_may_copy_what_it_copies(dockerfile: str) -> None:
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for name in copied(dockerfile):
        assert (ROOT / name).exists()
        assert f"!{name}" in allowed


@dockerfiles
def test_image_holds_everything_that_the_wheel_needs(dockerfile: str, tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    for name in copied(dockerfile):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, context / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, context)
    assert wheel(context, tmp_path / "copied") == wheel(ROOT, tmp_path / "whole")


@pytest.mark.parametrize(("engine", "image"), [("vllm", "vllm/vllm-openai"), ("sglang", "lmsysorg/sglang")])
def test_an_engines_image_has_the_version_that_is_tested(engine: str, image: str) -> None:
    environment = (ROOT / "e2e" / engine / "environment.py").read_text(encoding="utf-8")
    (version,) = re.findall(rf'^{engine.upper()}: Final = "([\d.]+)"$', environment, re.MULTILINE)
    text = lines(f"deploy/{engine}/Dockerfile")
    assert f"FROM {image}:v{version}" in text
    assert f'ENTRYPOINT ["plait", "{engine}"]' in text
    assert any(line.partition(" && ")[0].endswith("-m pip install --no-cache-dir . \\") for line in text)


def test_the_gateways_image_has_what_a_fleet_of_real_engines_needs() -> None:
    (line,) = [line for line in lines("Dockerfile") if "pip install" in line]
    extras = set(line.rpartition("[")[2].partition("]")[0].split(","))
    assert {"uvicorn", "transformers", "psycopg"} <= {name for extra in extras for name in distributions_of(extra)}


def test_the_unit_of_systemd_is_short_and_starts_what_plait_takes() -> None:
    text = (ROOT / "deploy/systemd/plait.service").read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if line and not line.startswith("#")]) <= 10
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    assert unit.sections() == ["Unit", "Service", "Install"]
    program, *arguments = unit["Service"]["ExecStart"].split()
    assert Path(program).name == "plait"
    assert parse(arguments).config == Path("/etc/plait/config.toml")
    assert "-HUP" in unit["Service"]["ExecReload"]


FETCHES = {"benchmarks/gpu/archive.py", "e2e/real_schedulers/versions.py"}
"""These fetch the files of named packages, and install nothing to run Plait in."""


def test_plait_is_installed_with_what_it_needs() -> None:
    option = "--no-" + "deps"
    found = subprocess.run(["git", "grep", "-l", "--", option], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) == FETCHES
