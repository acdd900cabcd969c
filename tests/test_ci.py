"""`.ci/run` and `.ci/nightly` with a `make` that only says what it was asked for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.source_tree import ROOT

PARTS = ("soak", "release", "tiers")
MAKE = f"""#!/bin/sh
while case "$1" in --*) true ;; *) false ;; esac; do shift; done
case "$*" in
    nightly-parts) echo {" ".join(PARTS)} ;;
    "$FAILS") echo "$* says what is wrong"; exit 1 ;;
    *) echo "made $*" ;;
esac
"""


class Checkout:
    """A repository with the scripts and three commits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / ".ci", folder / ".ci")
        self.green.write_text("")
        (folder / "bin").mkdir()
        (folder / "bin" / "make").write_text(MAKE)
        (folder / "bin" / "make").chmod(0o755)
        self.git("init", "-q")
        for number in range(3):
            self.commit(f"docs/page-{number}", age_days=9 - 3 * number)

    @property
    def green(self) -> Path:
        return self.folder / ".ci" / "last-green"

    def commit(self, file: str, age_days: int = 1) -> None:
        (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / file).touch()
        self.git("add", file)
        day = f"2026-01-{20 - age_days:02} 12:00:00"
        self.git("commit", "-qm", "Change", GIT_COMMITTER_DATE=day, GIT_AUTHOR_DATE=day)

    def git(self, *arguments: str, **more: str) -> None:
        who = {
            f"GIT_{role}_{what}": "nobody@localhost" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
        }
        subprocess.run(["git", *arguments], cwd=self.folder, check=True, env={**os.environ, **who, **more})

    def run(self, script: str, *arguments: str, fails: str = "") -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        command = [str(self.folder / ".ci" / script), *arguments]
        env = {**os.environ, "PATH": path, "FAILS": fails}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_each_part_has_a_rule() -> None:
    options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True}
    options["env"] = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    named = subprocess.run(["make", "--silent", "nightly-parts"], check=True, **options)
    targets = [f"nightly-{part}" for part in named.stdout.split()]
    assert len(targets) > 20
    dry = subprocess.run(["make", "--dry-run", *targets], check=False, **options)
    assert dry.returncode == 0, dry.stderr


def test_a_run_makes_each_step_and_one_part_and_ends_with_their_times(checkout: Checkout) -> None:
    done = checkout.run("run")
    assert done.returncode == 0, done.stdout + done.stderr
    *_, table = done.stdout.partition("minutes, CPU minutes, step:")
    for target in ("test", "lint types", "e2e", "mission", "vllm-smoke", "sglang-smoke", "e2e-clients", "e2e-faults"):
        assert f" make {target}" in table
    assert ".ci/nightly soak" in table, "three commits, three parts"
    assert "made weight" in table
    checkout.commit("more")
    assert ".ci/nightly release" in checkout.run("run").stdout


@pytest.mark.parametrize(
    "file", ["backends/vllm/plugin.py", "policy/scheduling/slo_scheduler.py", "e2e/real_engines/fleet.py"]
)
def test_a_change_of_an_adapter_brings_a_third_of_its_suite(checkout: Checkout, file: str) -> None:
    thirds = set[str]()
    for changed in (file, "docs/more-1", "docs/more-2"):
        checkout.commit(changed, age_days=0)
        made = checkout.run("run").stdout
        thirds |= set(re.findall(r"made ((?:vllm|sglang)-\d)\n", made))
    assert {f"vllm-{third}" for third in (1, 2, 3)} <= thirds
    assert any(third.startswith("sglang") for third in thirds) == ("vllm" not in file)


def test_a_failed_step_ends_the_run_and_is_told_last(checkout: Checkout) -> None:
    done = checkout.run("run", fails="e2e-clients")
    assert done.returncode == 1
    assert "sglang-smoke" not in done.stdout
    *_, says, failed, exits = done.stdout.splitlines()
    assert (says, failed) == ("e2e-clients says what is wrong", "failed: make e2e-clients")
    assert exits.startswith("exit 1 after")


def test_a_part_is_noted_when_it_is_green(checkout: Checkout) -> None:
    done = checkout.run("nightly", "soak", "tiers", "release", fails="nightly-tiers")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "failed: tiers"
    assert "tiers never" in done.stdout
    lines = checkout.green.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["release", "soak"]
    assert checkout.run("nightly", "soak").returncode == 0
    assert len(checkout.green.read_text().splitlines()) == 2
