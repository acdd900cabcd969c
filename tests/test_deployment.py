"""Dockerfiles, checked without a container engine: they hold what the package needs, and start what Plait takes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
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


UNIT = ROOT / "deploy" / "systemd" / "plait.service"
REFERENCE = re.compile(r"\$\{(\w+)\}")


def test_the_unit_of_systemd_is_short_and_starts_what_plait_takes() -> None:
    text = UNIT.read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if line and not line.startswith("#")]) <= 14
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    assert unit.sections() == ["Unit", "Service", "Install"]
    assert unit["Unit"]["Wants"] == unit["Unit"]["After"], "the order alone starts nothing"
    program, *arguments = unit["Service"]["ExecStart"].split()
    assert Path(program).name == "plait"
    assert parse(arguments).config == Path("/etc/plait/config.toml")
    assert "-HUP" in unit["Service"]["ExecReload"]
    assert unit["Service"]["StateDirectoryMode"] == "0700", "as a store asks for"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/plait/bin/plait", sys.executable))
    ran = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_page_installs_no_file_of_the_service_that_others_may_read() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    installed = [line.split() for line in page.splitlines() if line.startswith("install ")]
    modes = {words[-1]: words[words.index("-m") + 1] for words in installed}
    (unit,) = [place for place in modes if place.startswith("/etc/systemd")]
    assert modes.pop(unit) == "644"
    assert modes
    assert all(mode.endswith("00") for mode in modes.values())
    (folder,) = [words for words in installed if "-d" in words]
    assert folder[folder.index("-o") + 1] == "plait", "the gateway writes plait.secret there"
    for line in installed:
        assert "config.toml" in line or "-d" in line or (ROOT / line[-2]).is_file()


def test_the_service_can_be_given_all_that_an_example_of_the_configuration_refers_to() -> None:
    named = set(REFERENCE.findall((ROOT / "config.example.toml").read_text(encoding="utf-8"))) - {"NAME"}
    environment = UNIT.with_name("environment").read_text(encoding="utf-8")
    assert set(re.findall(r"^#(\w+)=$", environment, re.MULTILINE)) == {*named, "PGPASSWORD"}
    assert f"EnvironmentFile=-/etc/plait/{UNIT.with_name('environment').name}\n" in UNIT.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "deploy").glob("*/*.*")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_what_a_shipped_configuration_refers_to_is_set_beside_it(path: Path) -> None:
    """By another file of its folder, or of the whole project's compose file. Dashboards have variables of their own."""
    text = path.read_text(encoding="utf-8")
    named = {name for name in REFERENCE.findall(text) if path.suffix != ".json" and name not in {"NAME", "1"}}
    beside = [*path.parent.iterdir(), *([ROOT / "docker-compose.yml"] if path.parent.name == "several" else [])]
    told = "\n".join(REFERENCE.sub("", one.read_text(encoding="utf-8")) for one in beside)
    assert {name for name in named if not re.search(rf"\b{name}\b", told)} == set()


FETCHES = {"benchmarks/gpu/archive.py", "e2e/real_schedulers/versions.py"}
"""These fetch the files of named packages, and install nothing to run Plait in."""


def test_plait_is_installed_with_what_it_needs() -> None:
    option = "--no-" + "deps"
    found = subprocess.run(["git", "grep", "-l", "--", option], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) == FETCHES
