"""The blocks of a page, run in their order as a reader pastes them.

A block runs in the environment that the blocks before it on its page have installed (`pip install ...`), the first of
them README's. Where a block needs what no reader of the page has to have, a word behind the language of its fence says
so, which no reader sees: one of `NEEDS`. All others run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from e2e.pages.told_environments import Told, ToldEnvironments, told_by
from e2e.ports import free_port
from e2e.release.environment import NewEnvironment
from e2e.server_process import NO_TLS, eventually
from plait.backends.tokenization.chat_template import EMBEDDED_FOLDER
from tests.pages import Block
from tests.source_tree import ROOT
from tests.waiting import WITHIN_S

NEEDS: Final[Mapping[str, str]] = {
    "accounts": "a gateway with a store, tenants and an admin key: e2e/test_accounts.py",
    "checkout": "the developers' environment, and minutes: its commands are there, with their options",
    "client": "a released client, in its environment: e2e/clients/test_page.py and test_agents.py",
    "docker": "Docker Compose",
    "engines": "vLLM or SGLang in an environment of its own: `make e2e-vllm`, `make e2e-sglang`",
    "gpu": "a GPU, and what `python -m benchmarks gpu_archive` writes",
    "other": "the router that a reader comes from",
    "prometheus": "Prometheus: `make e2e-monitoring` gives it the query",
    "store": "the store of a gateway that has stopped",
    "systemd": "root on a machine with systemd",
}
"""What a block may need, by the word on its fence."""

DRAWN: Final = "mermaid"
"""The language of diagrams, which `make site` draws."""

LIKE_A_READER: Final = """
import json, sys
name, blocks = json.load(sys.stdin)
names = {"__name__": "__main__"}
for line, text in blocks:
    exec(compile("\\n" * (line - 1) + text, name, "exec"), names)
"""
"""Runs blocks one after the other, as one session of Python does."""

CHECKS: Final = """
import sys
from plait.gateway.cli import main
for file in sys.argv[1:]:
    if main(["check-config", "--config", file]):
        sys.exit(f"{file} is refused")
"""
"""Checks configurations; an import takes longer than a check."""

EMPTY_STORE: Final = """
import sqlite3, sys
from plait.gateway.guests.store.sqlite_schema import MIGRATIONS
database = sqlite3.connect(sys.argv[1])
for migration in MIGRATIONS:
    migration(database)
database.commit()
"""

SQLITE: Final = "#!{python}\nimport sqlite3, sys\nsqlite3.connect(sys.argv[1]).executescript(sys.argv[2])\n"
"""SQLite's program, where it is not installed."""

ENGINES: Final = '\n[[engines]]\nurl = "http://10.0.0.11:8000"\nname = "engine-1"\n'
"""What completes a part of a configuration."""

REFERENCE: Final = re.compile(r"\$\{(\w+)\}")
STANDS_ALONE: Final = re.compile(r"^\[\[(?:engines|services)\]\]", re.MULTILINE)
GATEWAY: Final = "127.0.0.1:8000"
"""Where README's gateway is."""
HOST: Final = re.compile(r"10\.0\.0\.1(?P<number>[1-4]):(?:8000|30000)")
"""An engine of the pages."""
DEMO: Final = "plait demo"
"""Runs already: README's first block has started it for all pages."""


class PageFailedError(AssertionError):
    """A block that does not do what its page says. The first line names page and line."""

    def __init__(self, block: Block, why: str) -> None:
        super().__init__(f"{block}: {why}\n{block.text}")


@dataclass(frozen=True, slots=True)
class Site:
    """Where a reader is: a demo that runs on `port`, with engines from `engine_port` on."""

    environments: ToldEnvironments
    readme: Told
    """What README's first command installs."""
    port: int
    engine_port: int
    starts_servers: bool
    """Whether each `plait serve` of a page is started; otherwise README's is."""

    def here(self, text: str) -> str:
        """The text with this machine's ports in place of the pages' addresses."""
        text = HOST.sub(lambda found: f"127.0.0.1:{self.engine_port + int(found['number']) - 1}", text)
        return text.replace(GATEWAY, f"127.0.0.1:{self.port}")


@dataclass
class PastedPage:
    """A reader of one page, in `folder`."""

    site: Site
    folder: Path
    told: Told = field(init=False)
    _python: list[Block] = field(default_factory=list)
    _configurations: list[tuple[Block, Told]] = field(default_factory=list)
    _said: str = ""
    """What the latest commands printed."""

    def __post_init__(self) -> None:
        self.told = self.site.readme
        (self.folder / "config.toml").write_text(self.site.here(ENGINES))  # a reader of these pages has one

    def run(self, blocks: Sequence[Block]) -> None:
        """Run the page's blocks. Raises `PageFailedError`."""
        for block in blocks:
            self._take(block)
        self._end_python()
        self._check_configurations()

    def _take(self, block: Block) -> None:
        """Run a block, or keep it for those that follow."""
        if block.needs:
            self._run_with_need(block)
        elif block.language == "python":
            self._python.append(block)
        elif block.language == "sh":
            self._end_python()
            self._run_commands(block)
        elif block.language == "toml":
            self._configurations.append((block, self.told))
        elif block.language == "http":
            self._send_header(block)
        elif block.language in {"json", "text"}:
            self._compare(block)
        elif block.language != DRAWN:
            raise PageFailedError(block, f"nothing runs {block.language or 'a block without a language'}: {NEEDS}")

    @property
    def _environment(self) -> NewEnvironment:
        return self.site.environments[self.told]

    def _run_with_need(self, block: Block) -> None:
        if block.needs not in NEEDS:
            raise PageFailedError(block, f"{block.needs!r} is none of {', '.join(NEEDS)}")
        if block.needs == "checkout":
            for command in _commands(block.text):
                _look_up(block, command)
        elif block.needs == "store":
            store, program = self.folder / "store.db", self._environment.folder / "bin" / "sqlite3"
            if not shutil.which("sqlite3"):
                program.write_text(SQLITE.format(python=self._environment.python))
                program.chmod(0o755)
            self._finished([self._environment.python, "-I", "-c", EMPTY_STORE, store], block)
            self._bash(block, block.text.replace("PATH", str(store)))

    def _run_commands(self, block: Block) -> None:
        """Run what installs and what starts servers; a block without these is the shell's."""
        commands = _commands(block.text)
        if not any(command == DEMO or command.startswith(("pip install ", "plait serve ")) for command in commands):
            self._said = self._bash(block, self.site.here(block.text))
            return
        for command in commands:
            if command.startswith("pip install "):
                self.told = told_by(command, self.told)
            elif command.startswith("plait serve "):
                if self.site.starts_servers or block.page.name == "README.md":
                    self._serve(block, command)
            elif command != DEMO:
                raise PageFailedError(block, f"give a block of its own to `{command}`")

    def _bash(self, block: Block, text: str) -> str:
        """What a script prints: no error, neither on stderr nor in JSON."""
        said = self._finished(["bash", "-euo", "pipefail", "-c", text], block)
        if re.search(r'"error":\s*\{', said):
            raise PageFailedError(block, said)
        return said

    def _serve(self, block: Block, command: str) -> None:
        """Start a gateway, have it answer a call, and stop it."""
        port = free_port()
        words = [*shlex.split(self.site.here(command), comments=True)[1:], "--port", str(port)]
        log = self.folder / "served.log"
        with (
            log.open("wb") as stderr,
            subprocess.Popen([self._environment.plait, *words], cwd=self.folder, stderr=stderr) as process,
        ):
            try:
                eventually(lambda: process.poll() is not None or _ask(port, "GET", "/ready").is_success)
                if process.poll() is not None or not _ask(port, "POST", "/v1/chat/completions", CHAT).is_success:
                    raise PageFailedError(block, log.read_text())
            finally:
                process.send_signal(signal.SIGINT)  # without the drain delay
                process.wait(WITHIN_S)

    def _send_header(self, block: Block) -> None:
        """Send a chat with the header. A transform may refuse the answer, which is the model's own all the same."""
        name, _, value = block.text.strip().partition(": ")
        headers = {name: value, "plait-session": "page"}
        answer = _ask(self.site.port, "POST", "/v1/chat/completions", CHAT, headers)
        if not answer.is_success:
            raise PageFailedError(block, answer.text)

    def _compare(self, block: Block) -> None:
        """JSON that a page shows is JSON. Behind commands that print one object, it has the fields of that.

        Other text is what programs print; examples of transforms are in the tests of transforms.
        """
        lines = [line.removeprefix("data: ") for line in block.text.splitlines()]
        shown = [block.text] if block.language == "json" else [line for line in lines if line.startswith("{")]
        said, self._said = self._said, ""
        try:
            objects = [json.loads(one) for one in shown]
        except ValueError as error:
            raise PageFailedError(block, str(error)) from error
        if said.startswith("{") and lines[0].startswith("{"):
            answer, end = json.JSONDecoder().raw_decode(said)
            if not said[end:].strip() and answer.keys() != objects[0].keys():
                raise PageFailedError(block, f"the answer is {said}")

    def _end_python(self) -> None:
        if not self._python:
            return
        blocks, self._python = self._python, []
        name = str(blocks[0].page.relative_to(ROOT))
        sent = json.dumps([name, [(block.line, self.site.here(block.text)) for block in blocks]])
        said = self._finished([self._environment.python, "-I", "-c", LIKE_A_READER], *blocks, sent=sent)
        if any("print(" in block.text for block in blocks) and not said.strip():
            raise PageFailedError(blocks[0], "nothing is printed")

    def _check_configurations(self) -> None:
        """Check all configurations of the page, those of an environment in one process."""
        if not self._configurations:
            return
        model = self.folder / "mistral-7b"
        shutil.copytree(EMBEDDED_FOLDER, model)
        files: dict[Told, dict[str, Block]] = {}
        for block, told in self._configurations:
            file = self.folder / f"line-{block.line}.toml"
            text = block.text if STANDS_ALONE.search(block.text) else block.text + ENGINES
            text = text.replace("/var/lib/plait", str(self.folder / "state")).replace("/models/mistral-7b", str(model))
            file.write_text(text)
            files.setdefault(told, {})[str(file)] = block
        for told, blocks in files.items():
            python = self.site.environments[told].python
            self._finished([python, "-I", "-c", CHECKS, *blocks], *blocks.values())

    def _finished(self, command: Sequence[str | Path], *blocks: Block, sent: str = "") -> str:
        """What a command prints that runs these blocks, ends well and warns of nothing."""
        named = {name for block in blocks for name in REFERENCE.findall(block.text)}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PLAIT", "PYTHON"))}
        path = f"{self._environment.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = inherited | {name: f"{name} of 32 characters and more".replace(" ", "-") for name in named}
        done = subprocess.run(
            list(map(str, command)),
            input=sent,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env={**environment, "PATH": path},
        )
        if done.returncode or done.stderr:
            said = f"{done.stdout}{done.stderr}"
            guilty = next((one for one in blocks if f"line-{one.line}.toml is refused" in said), blocks[0])
            raise PageFailedError(guilty, f"status {done.returncode}\n{said}")
        return done.stdout


CHAT: Final = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}


def _ask(
    port: int, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> httpx.Response:
    url = f"http://127.0.0.1:{port}{path}"
    return httpx.request(method, url, json=body, headers=headers, trust_env=False, verify=NO_TLS, timeout=WITHIN_S)


def _commands(text: str) -> list[str]:
    """The lines of a block for a shell, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := re.sub(r"(^| +)#.*", "", line).strip())]


def _look_up(block: Block, command: str) -> None:
    """Find a command of a checkout: a target, a benchmark with its options, or a file."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        shown = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        if shown.returncode:
            raise PageFailedError(block, shown.stderr)
    elif words[1:3] == ["-m", "benchmarks"]:
        asked = [sys.executable, "-m", "benchmarks", words[3], "--help"]
        shown = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
        if not all(option in shown.stdout for option in words[4:] if option.startswith("--")):
            raise PageFailedError(block, shown.stdout + shown.stderr)
    elif not (ROOT / words[0]).is_file():
        raise PageFailedError(block, f"{words[0]} is not there")
