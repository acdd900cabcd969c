"""Plait as users have it: its wheel in a copy of an environment, beside distributions that have its folders' names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from hatchling.builders.wheel import WheelBuilder

ROOT: Final = Path(__file__).parents[1]
CLASHING: Final = ("backends", "policy")
"""Import names that other distributions have."""


def copied_environment(python: Path, folder: Path) -> Path:
    """The Python of a new environment: Plait's wheel, then the clashing distributions, and all else from `python`'s.

    `folder` is made. What `python` has stands behind what is installed here, but its editable Plait is not active:
    Python does not follow .pth files in a folder that another .pth file has named.
    """
    site = _site_packages(python)
    subprocess.run([str(python), "-m", "venv", "--without-pip", "--symlinks", str(folder)], check=True)
    copied = folder / "bin" / "python"
    (_site_packages(copied) / "copied.pth").write_text(f"{site}\n")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder / "wheels"), versions=["standard"])
    stubs = [stub_wheel(name, folder / "wheels") for name in CLASHING]
    for installed in (Path(wheel), *stubs):
        _pip("--python", str(copied), "install", "--quiet", "--no-index", str(installed))
    return copied


def stub_wheel(name: str, folder: Path) -> Path:
    """A distribution whose one module cannot be used as ours."""
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def clashing_folder(folder: Path) -> Path:
    """A working directory with a user's own modules of our folders' names, which cannot be imported."""
    for name in ("policy", "gateway"):
        (folder / f"{name}.py").write_text(f"raise ImportError('the user has a module called {name}')\n")
    return folder


def _site_packages(python: Path) -> Path:
    """The folder that a Python has its packages in."""
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)
