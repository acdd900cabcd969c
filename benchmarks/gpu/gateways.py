"""Gateways over running engines, as a user starts them: processes with the default configuration."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.gpu.engines import HOST, MODEL, Engine
from e2e.ports import free_port
from e2e.servers import toml

READY_S: Final = 150.0
"""Beside torch, transformers takes seconds to import, and a minute on busy cores."""


@dataclass(frozen=True)
class Settings:
    """What a gateway is started with. `policy` places instead of the default one, `profile` is a cost profile's name.

    Stock engines offer no tokenizer, so their gateway is told of one.
    """

    engines: Sequence[Engine]
    policy: str | None = None
    tokenizer: Path | None = None
    profile: str | None = None

    def arguments(self, file: Path) -> list[str]:
        """The arguments of `plait serve`. The configuration is written to the file."""
        model = {} if self.tokenizer is None else {"tokenizer": str(self.tokenizer)}
        model |= {} if self.profile is None else {"profile": self.profile}
        config: dict[str, Any] = {"engines": [{"name": engine.name, "url": engine.url} for engine in self.engines]}
        config |= {} if self.policy is None else {"placement": {"policy": self.policy}}
        config |= {"models": [{"name": MODEL, **model}]} if model else {}
        file.write_text(toml(config), encoding="utf-8")
        return ["--config", str(file)]


@asynccontextmanager
async def gateways(folder: Path, *wanted: Settings) -> AsyncIterator[list[str]]:
    """Gateways that are ready, started at the same time: their URLs. Logs go to the folder.

    Raises ValueError if one does not become ready or finds an engine degraded.
    """
    async with AsyncExitStack() as stack:
        ports = [free_port() for _ in wanted]
        urls = [f"http://{HOST}:{port}" for port in ports]
        processes = [
            await stack.enter_async_context(_process(folder, port, settings))
            for port, settings in zip(ports, wanted, strict=True)
        ]
        for url, settings, process in zip(urls, wanted, processes, strict=True):
            await _wait_until_ready(url, len(settings.engines), process)
        yield urls


@asynccontextmanager
async def _process(folder: Path, port: int, settings: Settings) -> AsyncIterator[Process]:
    arguments = settings.arguments(folder / f"gateway-{port}.toml")
    command = [sys.executable, "-m", "plait.gateway.cli", "serve", "--host", HOST, "--port", str(port), *arguments]
    with (folder / f"gateway-{port}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()  # its calls have ended, or the section was cut off
        await process.wait()


async def _wait_until_ready(url: str, engines: int, process: Process) -> None:
    ends_s, said = time.monotonic() + READY_S, "no answer"
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        while time.monotonic() < ends_s:
            if process.returncode is not None:
                raise ValueError(f"the gateway ended with {process.returncode}")
            with suppress(httpx.TransportError):  # not listening yet
                said = (await client.get("/ready")).text
                answer = json.loads(said)
                if answer["ready"] and answer["engines_up"].get(MODEL) == engines and "degraded" not in answer:
                    return
            await asyncio.sleep(0.1)
    raise ValueError(f"the gateway is not ready, or finds engines degraded: {said}")
