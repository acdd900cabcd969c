"""Environments with what a page tells its reader to install, and nothing else of what is installed here."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from e2e.release.environment import WHEEL, NewEnvironment

LAUNCHER: Final = "#!{python}\nimport sys\nfrom plait.gateway.cli import main\nsys.exit(main())\n"
"""The `plait` command, as pip writes it."""

Told = frozenset[str]
"""Requirements, as a page writes them; `.` is Plait."""


def told_by(command: str, before: Told) -> Told:
    """What is installed after a `pip install` command. One of Plait replaces what was there, others add to it."""
    words = shlex.split(command, comments=True)
    assert words[:2] == ["pip", "install"], command
    told = frozenset(words[2:])
    return told if any(_extras(one) is not None for one in told) else before | told


class ToldEnvironments:
    """Environments below `folder`, each made once. In `make nightly` pip installs them, from an index.

    Otherwise they are links to what is installed here and to the unpacked wheel, so that one takes a tenth of a second.
    What a page does not tell to install is in neither.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plait = folder / "wheel"
        self._made: dict[Told, NewEnvironment] = {}
        with ZipFile(WHEEL) as wheel:
            wheel.extractall(self._plait)

    def __getitem__(self, told: Told) -> NewEnvironment:
        if told not in self._made:
            folder = self._folder / f"environment-{len(self._made)}"
            is_installed = "PLAIT_NIGHTLY" in os.environ
            self._made[told] = _installed(folder, told) if is_installed else _linked(folder, told, self._plait)
        return self._made[told]


def _installed(folder: Path, told: Told) -> NewEnvironment:
    environment = NewEnvironment.create(folder)
    command = [str(environment.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *(_named(one, str(WHEEL)) for one in sorted(told))], check=True)
    return environment


def _linked(folder: Path, told: Told, plait: Path) -> NewEnvironment:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(folder)], check=True)
    environment = NewEnvironment(folder)
    for entry in plait.iterdir():
        (environment.site / entry.name).symlink_to(entry)
    environment.plait.write_text(LAUNCHER.format(python=environment.python))
    environment.plait.chmod(0o755)
    for found in _closure(environment.site, told):
        _link(found, environment.site)
    return environment


def _extras(requirement: str) -> str | None:
    """`[EXTRAS]` of a requirement of Plait, `""` without extras; None if it is of another distribution."""
    name, bracket, extras = requirement.partition("[")
    return f"{bracket}{extras}" if name in {".", "plait"} else None


def _named(requirement: str, plait: str) -> str:
    """A requirement as pip or its metadata write it, where Plait has the name `plait`."""
    extras = _extras(requirement)
    return requirement if extras is None else f"{plait}{extras}"


def _closure(site: Path, told: Told) -> list[Distribution]:
    """The distributions that requirements bring, of those that are installed here. `site` has Plait's own metadata."""
    (plait,) = (one for one in distributions(path=[str(site)]) if one.name == "plait")
    found = {"plait": plait}
    left = [(Requirement(_named(one, "plait")), "") for one in told]
    seen: set[tuple[str, str]] = set()
    while left:
        requirement, extra = left.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        found[name] = found.get(name) or distribution(name)
        for asked in {"", *requirement.extras}:
            if (name, asked) not in seen:
                seen.add((name, asked))
                left += [(Requirement(line), asked) for line in found[name].requires or ()]
    del found["plait"]
    return list(found.values())


def _link(found: Distribution, site: Path) -> None:
    """Link the top-level files and folders of a distribution."""
    for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
        if top != "__pycache__" and not (site / top).exists():
            (site / top).symlink_to(Path(str(found.locate_file(top))))
