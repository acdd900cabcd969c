"""What is installed: the wheel and the sdist hold every tracked file of the package, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
FOLDERS = ("lab", "gateway", "backends", "policy", "client")
BESIDE_THE_PACKAGE = {
    *(".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "config.example.toml", "pyproject.toml"),
}
"""What an sdist holds at its top."""


def files(*folders: str) -> set[str]:
    """The folders' files, by git's account: tracked ones, and new ones that are not ignored."""
    listing = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    named = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for name in named if (ROOT / name).is_file()}


@pytest.fixture(scope="module", autouse=True)
def _has_history() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: which files belong to the package is git's to say")


def built(builder: WheelBuilder | SdistBuilder, folder: Path) -> Path:
    (path,) = builder.build(directory=str(folder))
    return Path(path)


def members(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    own = {"plait/__init__.py", "plait/py.typed"}
    wheel = built(WheelBuilder(str(ROOT)), tmp_path)
    assert members(wheel) == own | {f"plait/{name}" for name in files(*FOLDERS)}


def test_the_sdist_holds_the_folders_and_makes_the_same_wheel(tmp_path: Path) -> None:
    sdist = built(SdistBuilder(str(ROOT)), tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = (path for path in tmp_path.iterdir() if path.is_dir())
    held = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert held == files(*FOLDERS) | {"src/plait/__init__.py", "src/plait/py.typed"} | BESIDE_THE_PACKAGE
    wheels = [built(WheelBuilder(str(place)), tmp_path / name) for name, place in (("own", root), ("ours", ROOT))]
    assert members(wheels[0]) == members(wheels[1])


def test_the_packages_folder_links_to_each_of_the_four() -> None:
    links = {path.name: path.resolve() for path in (ROOT / "src" / "plait").iterdir() if path.is_symlink()}
    assert links == {name: ROOT / name for name in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_not_to_be_imported_by_its_own_name(folder: str) -> None:
    ruff = [str(Path(sys.executable).with_name("ruff")), "check", "--stdin-filename", "example.py", "-"]
    for source, refused in ((f"import {folder}.types", True), (f"from plait.{folder} import types", False)):
        checked = subprocess.run(ruff, input=source, capture_output=True, text=True, check=False, cwd=ROOT)
        assert (f"`{folder}` is banned" in checked.stdout) == refused, checked


def test_the_changelog_has_the_version() -> None:
    """Its top section, so that what a change notes is of the next release."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert next(line for line in lines if line.startswith("## ")).startswith(f"## {version} - ")
