"""Starts three vLLM servers on this machine's GPU and asks each for a completion: `python -m benchmarks gpu_smoke`.

A and B have Plait's adapter, S is stock. They keep running, for `python -m benchmarks gpu_run`, and end when servers
are started with the same folder of logs. The last line is `SMOKE OK`, or why not. `--rehearse` starts small ones on the
CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx

from benchmarks.gpu.engines import APART_S, CPU, DEFAULT_GRAPHS, GPU, Device, Engine, wait_until_healthy
from benchmarks.gpu.machine import described
from benchmarks.gpu.model import TINY, write_model

LOG_LINES = 60
GRAPHS: Final = {"decodes": GPU, "default": DEFAULT_GRAPHS}
"""For decodes alone, or what vLLM does by itself."""


def main() -> int:
    """Start, ask, and report; returns 1 if an engine does not serve."""
    arguments = _arguments()
    logs: Path = arguments.logs
    logs.mkdir(parents=True, exist_ok=True)
    print(json.dumps(described(), indent=1), flush=True)
    engines = [Engine(name, port, is_stock=name == "S") for name, port in zip("ABS", arguments.ports, strict=True)]
    ends_s = time.monotonic() + arguments.seconds
    _end_earlier(logs)
    device = CPU if arguments.rehearse else GRAPHS[arguments.graphs]
    problem = _start(engines, device, _model(arguments), logs, ends_s) or _ask(engines)
    for engine in engines:
        print(f"--- {engine.name}\n{_tail(logs / f'{engine.name}.log')}")
    print(f"SMOKE FAILED: {problem}" if problem else "SMOKE OK", flush=True)
    return int(bool(problem))


def _end_earlier(logs: Path) -> None:
    """End the servers that an earlier run started: they have the GPU's memory."""
    for file in logs.glob("*.pid"):
        pid = int(file.read_text())
        with suppress(OSError):
            if b"vllm" in Path(f"/proc/{pid}/cmdline").read_bytes():  # else the number is another process's by now
                os.killpg(pid, signal.SIGKILL)
                time.sleep(APART_S)
        file.unlink()


def _start(engines: Sequence[Engine], device: Device, model: Path, logs: Path, ends_s: float) -> str:
    """Start with the first attention backend that works; returns the problem with the last one."""
    problem = ""
    for attention in device.attention:
        began_s = time.monotonic()
        for engine in engines:
            engine.start(device, attention, model, logs / f"{engine.name}.log")
            (logs / f"{engine.name}.pid").write_text(str(engine.pid))
            time.sleep(0 if engine is engines[-1] else APART_S)
        problem = wait_until_healthy(engines, ends_s)
        print(f"{attention or 'default'} attention: {problem or 'healthy'} after {time.monotonic() - began_s:.0f} s")
        if not problem or time.monotonic() > ends_s:
            return problem
        for engine in engines:
            print(f"--- {engine.name}\n{_tail(logs / f'{engine.name}.log')}", flush=True)
            engine.kill()
    return problem


def _ask(engines: Sequence[Engine]) -> str:
    """A completion from each, and the reports of those with the adapter; returns the first problem."""
    for engine in engines:
        try:
            began_s = time.monotonic()
            text = engine.complete(range(300, 600), 4)
            print(f"{engine.name}: {text!r} in {time.monotonic() - began_s:.2f} s")
            if engine.name != "S":
                state = engine.cache_state()
                print(f"{engine.name}: {state.kv}, {state.scheduler}, {state.iteration}")
        except (httpx.HTTPError, ValueError) as error:
            return f"{engine.name}: {type(error).__name__}: {error}"
    return ""


def _model(arguments: argparse.Namespace) -> Path:
    """The given model; a rehearsal makes a tiny one."""
    model: Path = arguments.model
    if arguments.rehearse:
        model = arguments.logs / "tiny"
        if not model.is_dir():
            write_model(model, TINY)
    return model.absolute()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]) if log.exists() else ""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu_smoke")
    parser.add_argument("--model", type=Path, default=Path(".gpu/model"), help="a folder (default: %(default)s)")
    parser.add_argument("--logs", type=Path, default=Path(".gpu/logs"), help="a folder (default: %(default)s)")
    parser.add_argument("--graphs", choices=GRAPHS, default="decodes", help="CUDA graphs (default: %(default)s)")
    parser.add_argument("--ports", type=int, nargs=3, default=(8001, 8002, 8003), help="of A, B and S")
    parser.add_argument("--seconds", type=float, default=180.0, help="until all answer (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
