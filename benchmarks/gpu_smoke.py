"""Starts three vLLM servers on this machine's GPU and asks each for a completion: `python -m benchmarks gpu_smoke`.

A and B have Plait's adapter, S is stock. They keep running, for `python -m benchmarks gpu_run`. The last line is
`SMOKE OK`, or why not. `--rehearse` starts small ones on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from benchmarks.gpu.engines import APART_S, CPU, GPU, Device, Engine, wait_until_healthy
from benchmarks.gpu.machine import described
from benchmarks.gpu.model import TINY, write_model

LOG_LINES = 60


def main() -> int:
    """Start, ask, and report; returns 1 if an engine does not serve."""
    arguments = _arguments()
    logs: Path = arguments.logs
    logs.mkdir(parents=True, exist_ok=True)
    print(json.dumps(described(), indent=1), flush=True)
    engines = [Engine(name, port, is_stock=name == "S") for name, port in zip("ABS", arguments.ports, strict=True)]
    ends_s = time.monotonic() + arguments.seconds
    problem = _start(engines, CPU if arguments.rehearse else GPU, _model(arguments), logs, ends_s) or _ask(engines)
    for engine in engines:
        print(f"--- {engine.name}\n{_tail(logs / f'{engine.name}.log')}")
    print(f"SMOKE FAILED: {problem}" if problem else "SMOKE OK", flush=True)
    return int(bool(problem))


def _start(engines: Sequence[Engine], device: Device, model: Path, logs: Path, ends_s: float) -> str:
    """Start with the first attention backend that works; returns the problem with the last one."""
    problem = ""
    for attention in device.attention:
        began_s = time.monotonic()
        for engine in engines:
            engine.start(device, attention, model, logs / f"{engine.name}.log")
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
    parser.add_argument("--ports", type=int, nargs=3, default=(8001, 8002, 8003), help="of A, B and S")
    parser.add_argument("--seconds", type=float, default=180.0, help="until all answer (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
