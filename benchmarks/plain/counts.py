"""Python calls, files and rooms of one request: counts that do not depend on the machine."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.plain.answering_engine import MODEL
from benchmarks.plain.routers import answers, running_engine
from benchmarks.plain.rows import SLO, text
from e2e.faults.raw_client import CHAT, Client
from e2e.ports import free_port
from e2e.server_process import eventually

WARM_UP, REPEATS = 20, 9
ENGINES: Final = 4
"""With one engine there is nothing to choose."""
GATEWAYS: Final = (("any", ""), ("one at a time", "[admission]\nmax_running = 1\n"))
"""A folder for each, and what its configuration has besides models and engines."""
PAUSE_S: Final = 0.03
Send = Callable[[Client, str], Awaitable[None]]
"""Sends one request of a kind, which the text makes another one than all others."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a request went through: calls, distinct functions, their files and rooms, and changes of room.

    `modules` are those that the gateway has imported by then.
    """

    calls: int
    functions: int
    files: int
    rooms: int
    changes: int
    modules: int

    @classmethod
    def of(cls, called: Sequence[tuple[str, str]], modules: int) -> Counts:
        """From each call's file and function, in order. A room is a folder."""
        rooms = [str(Path(file).parent) for file, _ in called]
        changes = sum(one != other for one, other in pairwise(rooms))
        return cls(len(called), len(set(called)), len({file for file, _ in called}), len(set(rooms)), changes, modules)


def main() -> int:
    """Count, and print a table."""
    print("| | calls | functions | files | rooms | changes of room |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        engines = [stack.enter_context(running_engine(Path(name) / f"engine-{n}.log")) for n in range(ENGINES)]
        gateway, one_at_a_time = (
            _gateway(stack, Path(name) / folder, engines, settings) for folder, settings in GATEWAYS
        )
        for kind, send in KINDS.items():
            found = asyncio.run((one_at_a_time if send is _waiting else gateway).count(kind, send))
            print(f"| {kind} | {found.calls} | {found.functions} | {found.files} | {found.rooms} | {found.changes} |")
    return 0


def of_a_plain_call() -> Counts:
    """Those of a whole chat completion."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        engines = [stack.enter_context(running_engine(Path(name) / f"engine-{n}.log")) for n in range(ENGINES)]
        gateway = _gateway(stack, Path(name) / "gateway", engines, "")
        return asyncio.run(gateway.count("a plain call", _plain))


@dataclass(frozen=True, slots=True)
class _Gateway:
    """A gateway that counts, and the file that it writes its counts to."""

    process: subprocess.Popen[bytes]
    port: int
    noted: Path

    async def count(self, kind: str, send: Send) -> Counts:
        """The repeat with the fewest calls: what the gateway does for engines meanwhile is in the others."""
        async with Client(self.port) as client:
            for number in range(WARM_UP):
                await send(client, f"warm {kind} {number}")
            found = [await self._once(client, send, f"{kind} {number}") for number in range(REPEATS)]
        return min(found, key=lambda one: one.calls)

    async def _once(self, client: Client, send: Send, seed: str) -> Counts:
        begun, lines = self.noted.with_suffix(".begun"), _lines(self.noted)
        await asyncio.sleep(PAUSE_S)
        await asyncio.to_thread(begun.unlink, missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        await asyncio.to_thread(eventually, begun.exists)
        await send(client, seed)
        await asyncio.sleep(PAUSE_S)
        self.process.send_signal(signal.SIGUSR2)
        await asyncio.to_thread(eventually, lambda: _lines(self.noted) > lines)
        noted = json.loads(_last_line(self.noted))
        return Counts.of([(file, function) for file, function in noted["called"]], noted["modules"])


def _gateway(stack: ExitStack, folder: Path, engines: Sequence[str], settings: str) -> _Gateway:
    folder.mkdir()
    config, port, noted = folder / "config.toml", free_port(), folder / "noted"
    named = "".join(f'[[engines]]\nname = "e{number}"\nurl = "{url}"\n' for number, url in enumerate(engines))
    config.write_text(f'[[models]]\nname = "{MODEL}"\ntokenizer = "embedded"\n{named}{settings}')
    command = [sys.executable, "-m", "benchmarks.plain.counted_gateway", str(noted)]
    log = stack.enter_context((folder / "log").open("wb"))
    process = subprocess.Popen([*command, "serve", "--config", str(config), "--port", str(port)], stderr=log)  # noqa: S603
    stack.callback(process.wait)
    stack.callback(process.terminate)
    eventually(lambda: asyncio.run(answers(port)))
    return _Gateway(process, port, noted)


def _last_line(file: Path) -> str:
    return file.read_text().splitlines()[-1]


def _lines(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


def _body(seed: str, **more: Any) -> dict[str, Any]:
    content = more.pop("content", None) or f"{text('shared', 300)} {seed}"
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **more}


async def _plain(client: Client, seed: str) -> None:
    assert (await client.post(CHAT, _body(seed))).status == 200


async def _streamed(client: Client, seed: str) -> None:
    assert (await client.post(CHAT, _body(seed, stream=True))).status == 200


async def _with_slo(client: Client, seed: str) -> None:
    assert (await client.post(CHAT, _body(seed), SLO)).status == 200


async def _waiting(client: Client, seed: str) -> None:
    """Two calls, of which one waits in the line until the other has ended."""
    answers = await asyncio.gather(*(client.post(CHAT, _body(f"{seed} {which}")) for which in range(2)))
    assert [answer.status for answer in answers] == [200, 200], answers


async def _pair(client: Client, seed: str) -> None:
    session = seed.replace(" ", "-")
    await client.post("/v1/sessions", {"session_id": session})
    first = _body(seed, plait={"session": session, "output": "a"})
    second = _body(seed, content="Judge {{a}}", plait={"session": session, "inputs": ["a"]})
    answers = await asyncio.gather(client.post(CHAT, first), client.post(CHAT, second))
    assert [answer.status for answer in answers] == [200, 200], answers


async def _program(client: Client, seed: str) -> None:
    calls = [
        _prompt(f"Write {seed}: {{{{a}}}}", [_place("a", is_output=True)]),
        _prompt("Judge {{a}}: {{b}}", [_place("a"), _place("b", is_output=True)]),
    ]
    answer = await client.post("/v1/programs", {"calls": calls, "gets": {"b": None}})
    assert answer.status == 200, answer


def _prompt(prompt: str, places: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "placeholders": places, "max_tokens": 8}


def _place(name: str, *, is_output: bool = False) -> dict[str, Any]:
    return {"name": name, "in_out": is_output, "semantic_var_id": name}


KINDS: Final[Mapping[str, Send]] = {
    "a plain call": _plain, "a streamed call": _streamed, "a call with an SLO": _with_slo,
    "two calls, one in the line": _waiting, "a chained pair": _pair, "a program of two calls": _program,
}  # fmt: skip
