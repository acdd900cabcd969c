"""Scripted engines behind a gateway, as processes, and how a test speaks to them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from e2e.faults.modes import HEALTHY
from e2e.faults.raw_client import Client
from e2e.ports import free_ports
from e2e.server_process import Server
from e2e.servers import PATIENT, Launcher

KEY = "sk-engine"


@dataclass(frozen=True)
class ScriptedEngine:
    """One engine: where it serves, and where it is told what to do."""

    name: str
    models: Sequence[str]
    port: int
    control_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def entry(self, **fields: Any) -> dict[str, Any]:
        """Its entry in a gateway's configuration."""
        return {"name": self.name, "url": self.url, **fields}

    async def set_mode(self, mode: str | Sequence[str], **fields: Any) -> None:
        """Misbehave like this from now on; `healthy` ends it."""
        async with Client(self.control_port) as client:
            answer = await client.put("/mode", {"mode": mode, **fields})
        assert answer.status == 200, answer

    async def heal(self) -> None:
        """Misbehave no more."""
        await self.set_mode(HEALTHY)

    async def stats(self, *, times: bool = False) -> dict[str, Any]:
        """What it has counted."""
        async with Client(self.control_port) as client:
            answer = await client.get("/stats?times=1" if times else "/stats")
        stats: dict[str, Any] = msgspec.json.decode(answer.body)
        return stats


class ScriptedServer(Server):
    """One process with scripted engines: `engines` maps names to models. Not started yet."""

    def __init__(self, name: str, engines: Mapping[str, Sequence[str]], folder: Path, *pace: str) -> None:
        ports = iter(free_ports(2 * len(engines)))
        self.engines = {
            engine: ScriptedEngine(engine, models, next(ports), next(ports)) for engine, models in engines.items()
        }
        first = next(iter(self.engines.values()))
        super().__init__(name, first.control_port, (), folder / f"{name}.log", ready_path="/stats")
        command = [sys.executable, "-m", "e2e.faults.scripted_engine", *pace]
        for engine in self.engines.values():
            command += ["--name", engine.name, "--model", ",".join(engine.models)]
            command += ["--port", str(engine.port), "--control-port", str(engine.control_port)]
        self._command = command


@contextmanager
def two_engines(folder: Path, *pace: str) -> Iterator[tuple[Server, ScriptedEngine]]:
    """A gateway with default time-outs (`PATIENT`), and one of two engines `a` and `b` that serve `demo` behind it."""
    with engines_of_demo(folder, "ab", *pace) as (gateway, engines):
        yield gateway, engines[0]


@contextmanager
def engines_of_demo(folder: Path, names: str, *pace: str) -> Iterator[tuple[Server, Sequence[ScriptedEngine]]]:
    """A gateway with its default time-outs (`PATIENT`), and the engines of these names that serve `demo` behind it."""
    scripted = ScriptedServer("engines", {name: ["demo"] for name in names}, folder, *pace)
    with ExitStack() as stack:
        stack.callback(scripted.stop)
        launch = stack.enter_context(Launcher(folder))
        entries = [engine.entry() for engine in scripted.engines.values()]
        gateway = launch.gateway(entries, upstream=PATIENT)
        for server in (scripted, gateway):
            server.start()
        for server in (scripted, gateway):
            server.wait_until_ready()
        yield gateway, [*scripted.engines.values()]
