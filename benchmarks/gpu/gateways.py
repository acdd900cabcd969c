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
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.gpu.engines import HOST, MODEL, Engine
from e2e.ports import free_port
from e2e.servers import toml

READY_S: Final = 20.0


@asynccontextmanager
async def gateway(
    engines: Sequence[Engine], folder: Path, *, policy: str | None = None, tokenizer: Path | None = None
) -> AsyncIterator[str]:
    """A gateway that is ready: its URL. `policy` places instead of the default one.

    Stock engines offer no tokenizer, so their gateway needs one. Raises ValueError if it does not become ready or finds
    an engine degraded.
    """
    port = free_port()
    url, name = f"http://{HOST}:{port}", f"gateway-{port}"
    command = [sys.executable, "-m", "plait.gateway.cli", "serve", "--port", str(port), "--host", HOST]
    if policy is None and tokenizer is None:
        command += [engine.url for engine in engines]
    else:
        path = folder / f"{name}.toml"
        path.write_text(_config(engines, policy, tokenizer), encoding="utf-8")
        command += ["--config", str(path)]
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    try:
        await _wait_until_ready(url, len(engines), process)
        yield url
    finally:
        with suppress(ProcessLookupError):
            process.kill()  # nothing is lost: its calls have ended, or the section was cut off
        await process.wait()


def _config(engines: Sequence[Engine], policy: str | None, tokenizer: Path | None) -> str:
    config: dict[str, Any] = {"engines": [{"name": engine.name, "url": engine.url} for engine in engines]}
    config |= {} if policy is None else {"placement": {"policy": policy}}
    config |= {} if tokenizer is None else {"models": [{"name": MODEL, "tokenizer": str(tokenizer)}]}
    return toml(config)


async def _wait_until_ready(url: str, engines: int, process: Process) -> None:
    ends_s, said = time.monotonic() + READY_S, "no answer"
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        while time.monotonic() < ends_s:
            if process.returncode is not None:
                raise ValueError(f"the gateway ended with {process.returncode}")
            try:
                said = (await client.get("/ready")).text
                answer = json.loads(said)
                if answer["ready"] and answer["engines_up"].get(MODEL) == engines:
                    if "degraded" in answer:
                        raise ValueError(f"degraded: {answer['degraded']}")
                    return
            except httpx.TransportError:
                pass  # not listening yet
            await asyncio.sleep(0.1)
    raise ValueError(f"the gateway is not ready: {said}")
