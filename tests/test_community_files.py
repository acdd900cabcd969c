"""What a code host shows of the project: templates, workflow, and addresses."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.source_tree import ROOT

GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HOME = PROJECT["urls"]["Source"]
HOST = re.compile(r"https://github\.com/[\w-]*plait[\w-]*/[\w-]+")


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("form", ["bug", "idea"])
def test_an_issue_form_asks_for_what_is_needed(form: str) -> None:
    parsed = loaded(GITHUB / "ISSUE_TEMPLATE" / f"{form}.yml")
    assert {"name", "description", "body"} <= parsed.keys()
    ids = [part["id"] for part in parsed["body"] if part["type"] != "markdown"]
    assert len(ids) == len(set(ids))
    assert all(part["attributes"] for part in parsed["body"])


def test_the_workflow_runs_what_a_change_has_to_pass() -> None:
    jobs = loaded(GITHUB / "workflows" / "ci.yml")["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    (versions,) = [step["with"]["python-version"].split() for step in steps if "python-version" in step.get("with", {})]
    said = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one}
    assert set(versions) == said


def test_every_page_names_the_same_repository() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *GITHUB.rglob("*.*")]
    named = {found for page in pages for found in HOST.findall(page.read_text(encoding="utf-8"))}
    assert named == {HOME}
    assert all(url.startswith(HOME) for url in PROJECT["urls"].values())


def test_a_vulnerability_has_a_private_way() -> None:
    assert f"{HOME}/security/advisories/new" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
