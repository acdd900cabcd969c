"""A copy of the project, in which a recipe of CONTRIBUTING is followed: only what the recipe names may change."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from e2e.ports import free_ports
from tests.waiting import WITHIN_S

ROOT = Path(__file__).parents[2]
COPIED = ("policy", "backends", "gateway", "client", "lab", "src", "tests", "benchmarks", "e2e", "docs")


class CopiedTree:
    """The copy, in `folder`. `recipe` is the title of a paragraph under "How to add a part"."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self._folder = folder
        text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## How to add a part")[2]
        (paragraph,) = re.findall(rf"^\*\*{recipe}\.\*\* (.*?)\n\n", text, re.DOTALL | re.MULTILINE)
        self._quoted = [" ".join(quoted.split()) for quoted in re.findall(r"`([^`]+)`", paragraph)]
        ignored = shutil.ignore_patterns("__pycache__", "node_modules", "images")
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        for file in ROOT.glob("*.*"):
            if file.is_file():
                shutil.copy(file, folder)

    def add(self, path: str, text: str) -> None:
        """A new file. The recipe names it, or its folder."""
        assert self._names(path), f"the recipe does not say that {path} is added"
        file = self._folder / path
        assert not file.exists()
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def insert(self, path: str, after: str, text: str) -> None:
        """Text behind another one, which is there once, in a file that the recipe names."""
        assert self._names(path), f"the recipe does not say that {path} changes"
        file = self._folder / path
        source = file.read_text(encoding="utf-8")
        assert source.count(after) == 1, f"{after!r} stands {source.count(after)} times in {path}"
        file.write_text(source.replace(after, after + text), encoding="utf-8")

    def run(self, command: str, *more: str, name: str = "NAME") -> str:
        """What a command prints that the recipe names, with some `more` words. Raises if it fails.

        `name` stands where the recipe has NAME.
        """
        assert command in self._quoted, f"the recipe does not name {command!r}, but {self._quoted}"
        return self._run(*shlex.split(command.replace("NAME", name)), *more)

    def check(self, *tests: str) -> None:
        """Tests that the recipe names pass in the copy."""
        assert self._names(tests[0].partition("::")[0]), f"the recipe does not name {tests[0]}"
        self._run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)

    @contextmanager
    def served(self, engine: str = "http://127.0.0.1:9") -> Iterator[str]:
        """The copy's gateway before an engine, which need not be there, and its URL: `plait serve URL`."""
        (port,) = free_ports(1)
        with self.started("plait serve URL", "--port", str(port), name=engine):
            url = f"http://127.0.0.1:{port}"
            until(lambda: get(f"{url}/health"))
            yield url

    @contextmanager
    def started(self, command: str, *more: str, name: str) -> Iterator[None]:
        """A server by a command that the recipe names, with `name` where the recipe has NAME or URL."""
        assert command in self._quoted, f"the recipe does not name {command!r}"
        words = [*shlex.split(re.sub("NAME|URL", name, command)), *more]
        words = [word for word in words if word != "ARGUMENTS"]
        with subprocess.Popen(self._words(words), env=self._environment, cwd=self._folder) as process:
            try:
                yield
            finally:
                process.terminate()

    def _names(self, path: str) -> bool:
        return path in self._quoted or any(path.startswith(quoted) for quoted in self._quoted if quoted.endswith("/"))

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self._folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}

    def _words(self, words: list[str]) -> list[str]:
        if words[0] == "plait":
            return [sys.executable, "-c", "from plait.gateway.cli import main; raise SystemExit(main())", *words[1:]]
        return [sys.executable, *words[1:]]

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            self._words([*words]), env=self._environment, cwd=self._folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def get(url: str, sent: object = None) -> str:
    """What an HTTP server answers to a GET, or to a POST of what is `sent` as JSON."""
    body = None if sent is None else json.dumps(sent).encode()
    with urlopen(Request(url, body, {"content-type": "application/json"}), timeout=WITHIN_S) as answer:
        text: str = answer.read().decode()
    return text


def until(look: Callable[[], object]) -> None:
    """Look until that gives something, and no error of a server that does not listen yet."""
    ends_s = time.monotonic() + WITHIN_S
    while time.monotonic() < ends_s:
        with suppress(URLError):  # of a server that does not listen yet, or has no engine yet
            if look():
                return
        time.sleep(0.1)
    raise AssertionError(f"it was not so within {WITHIN_S:g} s")
