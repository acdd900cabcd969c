"""Engines and routers as processes, and what these cost: for `python -m benchmarks dataplane`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.plain.answering_engine import MODEL
from benchmarks.plain.rows import ROWS, TEMPLATES
from benchmarks.train_tokenizer import corpus, save, train
from e2e.faults.raw_client import CHAT, Client
from e2e.ports import free_port
from e2e.server_process import eventually
from tests.waiting import WITHIN_S

VOCABULARY_TOKENS: Final = 48_000
CHUNK_MS: Final = "10"
"""Between the tokens of a paced stream."""

CACHE: Final = Path(__file__).parents[2] / ".cache" / "dataplane"
STOP_S: Final = 5.0


@dataclass(slots=True)
class Router:
    """A running router. `cpu_s` has the CPU seconds of a request by row, `first_ms` the first bytes' times by round."""

    name: str
    port: int
    pid: int
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    first_ms: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)

    def total_cpu_s(self) -> float:
        """The CPU seconds of its processes so far."""
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in _tree(self.pid))  # clock_getcpuclockid's of a pid

    def resident_mb(self) -> float:
        """The memory of its processes."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in _tree(self.pid))
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from _tree(int(child))


@contextmanager
def running_engine(log: Path) -> Iterator[str]:
    """An engine that answers from memory; gives its address."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.plain.answering_engine", str(port), CHUNK_MS]
    with _process(command, Path(__file__).parents[2], log):
        eventually(lambda: asyncio.run(answers(port)))
        yield f"http://127.0.0.1:{port}"


@contextmanager
def running_router(
    name: str, command: Callable[[int], list[str]], folder: Path, checkout: Path, start_s: float = WITHIN_S
) -> Iterator[Router]:
    """A router that `command` starts on a port, once it answers calls. A Plait is that of the `checkout`."""
    port = free_port()
    with _process(command(port), checkout, folder / f"{name}.log") as process:
        try:
            eventually(lambda: asyncio.run(answers(port)), start_s)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}: {(folder / f'{name}.log').read_text()[-2000:]}") from error
        yield Router(name, port, process.pid)


async def answers(port: int) -> bool:
    """Whether a server answers calls."""
    async with Client(port, 5.0) as client:
        return (await client.post(CHAT, ROWS[0].body(-1))).status == 200


def plait_command(
    template: str, engines: Sequence[str], folder: Path, port: int, *, workers: int = 1, settings: str = ""
) -> list[str]:
    """Plait as it ships but for `settings`, with a realistic tokenizer and a template of `TEMPLATES`."""
    config = folder / f"{port}.toml"
    lines = "".join(f'[[engines]]\nname = "e{number}"\nurl = "{url}"\n' for number, url in enumerate(engines))
    config.write_text(f'[[models]]\nname = "{MODEL}"\ntokenizer = "{_tokenizer(template)}"\n{lines}{settings}')
    command = [sys.executable, "-m", "plait.gateway.cli", "serve", "--config", str(config), "--port", str(port)]
    return command if workers == 1 else [*command, "--workers", str(workers)]


def _tokenizer(template: str) -> Path:
    """A folder with the tokenizer and a template. The tokenizer is trained once."""
    trained, folder = CACHE / "trained", CACHE / template.replace(" ", "-").replace("'", "")
    if not (trained / "tokenizer.json").exists():
        save(train(corpus(), VOCABULARY_TOKENS), trained)
    folder.mkdir(exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((trained / file).read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATES[template])
    return folder


@contextmanager
def _process(command: Sequence[str], checkout: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that imports `plait` from a checkout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout / "src"), str(checkout)])}
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)  # noqa: S603
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        process.kill()
        process.wait()
