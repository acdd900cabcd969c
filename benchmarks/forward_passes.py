"""Times forward passes of a Llama-shaped model on the GPU of this machine: `python -m benchmarks forward_passes`.

Needs torch, which Plait does not, and nothing of Plait: the folder `benchmarks` alone runs anywhere. What it writes,
`python -m benchmarks forward_profile` fits a cost profile to. All iterations are timed once in each round, so that a
disturbance affects one round of many points. The file is written after each point: a run that is cut short leaves its
points.

Without a GPU, `--shape tiny` rehearses it on the CPU. Such times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.timing.work import SHAPES, Group, Work, planned

SPARED_BYTES = 8 << 30
"""Of the device's memory, not for the benchmark's KV cache: an iteration takes it twice, once in its graph."""

TINY_KV_TOKENS = 20_000

LARGEST = Group(1, 16_384)
"""The iteration that determines how much memory activations take."""


class Record:
    """What was measured, in a file. A point's time is the median over the rounds of the median in each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._points: dict[Work, dict[str, Any]] = {}
        self.facts: dict[str, Any] = {}

    def add(self, work: Work, seconds: list[float], kernels: list[str]) -> float:
        """Add the times of a round; returns the median."""
        if work not in self._points:
            self._points[work] = {**work._asdict(), "attention": kernels, "rounds_s": []}
        point = self._points[work]
        point["rounds_s"].append(float(f"{median(seconds):.6g}"))
        point["seconds"] = median(point["rounds_s"])
        self.write()
        return median(seconds)

    def write(self) -> None:
        """Replace the file: each fact and each point on a line."""
        lines = [f'"{name}": {json.dumps(value)}' for name, value in self.facts.items()]
        points = ",\n".join(json.dumps(point) for point in self._points.values())
        self._path.write_text("{\n" + ",\n".join([*lines, f'"points": [\n{points}\n]']) + "\n}\n")


def main() -> None:
    """Check the kernels, time all iterations, and write the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks forward_passes")
    parser.add_argument("--out", type=Path, required=True, help="write the measurements there, as JSON")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--point-seconds", type=float, default=0.2, help="replays of a point (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=400.0, help="begin no point later (default: %(default)s)")
    measure(parser.parse_args())


def measure(arguments: argparse.Namespace) -> None:
    """Measure everything, or what the time is enough for."""
    import torch  # noqa: PLC0415 - no dependency of Plait

    from benchmarks.timing.forward_pass import ForwardPass  # noqa: PLC0415 - needs torch
    from benchmarks.timing.measurement import Bench, ceilings  # noqa: PLC0415 - needs torch

    ends_s = time.monotonic() + arguments.seconds
    shape, has_gpu = SHAPES[arguments.shape], torch.cuda.is_available()
    torch._dynamo.config.cache_size_limit = 64  # noqa: SLF001 - one and many calls or tokens are compiled by themselves
    record = Record(arguments.out)
    record.facts = {"device": device(), "shape": asdict(shape), "ceilings": ceilings() if has_gpu else {}}
    with torch.inference_mode():
        model = ForwardPass(shape, "cuda" if has_gpu else "cpu")
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] - SPARED_BYTES if has_gpu else 0
        kv_tokens = free // shape.kv_token_bytes if has_gpu else TINY_KV_TOKENS
        model.allocate(kv_tokens)
        bench = Bench(model, kv_tokens, arguments.point_seconds)
        record.facts["errors"] = bench.check()
        record.facts["one_iteration_or_two"] = bench.difference(96, 32)
        record.facts["memory"] = {
            "weight_bytes": model.weight_bytes(),
            "activation_bytes": bench.activation_bytes(LARGEST) if has_gpu else 0,
            "kv_tokens_here": kv_tokens,
        }
        record.write()
        print(json.dumps(record.facts))
        for number in range(arguments.rounds):
            for work in planned():
                if time.monotonic() > ends_s:
                    print(f"out of time in round {number + 1}, before {work}")
                    return
                _time(record, bench, work)


def _time(record: Record, bench: Any, work: Work) -> None:
    began_s = time.monotonic()
    seconds = bench.times_s(work)
    if seconds:
        kernels = bench.kernels(work)
        took_ms = record.add(work, seconds, kernels) * 1e3
        sizes = " + ".join(f"{group.batch} x {group.new} behind {group.context}" for group in work.groups)
        wall_s = time.monotonic() - began_s
        print(f"{sizes:<44}{took_ms:>10.3f} ms  {', '.join(kernels):<22}{wall_s:>5.1f} s", flush=True)


def device() -> dict[str, Any]:
    """What it was measured on."""
    import torch  # noqa: PLC0415 - no dependency of Plait

    found = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    if not torch.cuda.is_available():
        return found | {"name": "CPU", "memory_bytes": 0}
    properties = torch.cuda.get_device_properties(0)
    return found | {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


if __name__ == "__main__":
    main()
