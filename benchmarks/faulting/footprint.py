"""What a gateway's process holds: memory, file descriptors, threads, and its tasks where it counts them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_TASKS = re.compile(r"^plait_tasks ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Footprint:
    """At `at_s` seconds after the begin. `tasks` is None if the gateway does not say."""

    at_s: float
    rss_bytes: int
    descriptors: int
    threads: int
    tasks: float | None


def footprint(pid: int, at_s: float, metrics: str) -> Footprint:
    """Of a process on this machine whose metrics are these."""
    process = Path("/proc", str(pid))
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    tasks = _TASKS.search(metrics)
    return Footprint(
        at_s,
        1024 * int(fields["VmRSS"].split()[0]),
        len(list((process / "fd").iterdir())),
        int(fields["Threads"]),
        None if tasks is None else float(tasks[1]),
    )
