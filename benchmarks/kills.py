"""A gateway with a store, killed again and again in the middle of programs: `python -m benchmarks kills`.

`python -m benchmarks kills [--kills N] [--seed N] [--json PATH]`. Two embedded engines, MetaGPT-like programs and
map-reduces, nine at a time, sent as whole programs, as submissions, and as calls with headers. Each round kills the
gateway (SIGKILL) at a random moment and starts it again at once. Returns 1 if a value that a client was told of is
lost or another, if a program does not end as undisturbed, or if a call was started more than `max_attempts` times.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from e2e.killing import MAX_ATTEMPTS, Findings, killed
from e2e.servers import Launcher
from plait.lab.simulation.claim import Claim


def main() -> int:
    """Kill, print, write what was asked for."""
    parser = timed_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Launcher(Path(folder)) as launch:
        findings = asyncio.run(killed(launch, Path(folder), arguments.kills, arguments.seed, [_progress]))
    recovery = sorted(findings.recovery_s)
    found = {
        "kills": findings.kills,
        "programs": findings.programs,
        "told": findings.told,
        "sent_again": findings.again,
        "restart_s": {"median": round(median(recovery), 3), "longest": round(recovery[-1], 3)},
        "calls_by_starts": dict(sorted(findings.starts.items())),
        "max_attempts": MAX_ATTEMPTS,
        "problems": findings.problems,
    }
    claim = Claim("problems", len(findings.problems), most=0)
    lines = [f"{name}: {value}" for name, value in found.items()]
    return finish("kills", Report(lines=lines, claims=[claim], results=[found], is_timed=True), arguments)


def _progress(findings: Findings) -> None:
    if findings.kills % 10 == 0:
        print(f"{findings.kills} kills, {findings.told} told, {len(findings.problems)} problems", flush=True)


if __name__ == "__main__":
    sys.exit(main())
