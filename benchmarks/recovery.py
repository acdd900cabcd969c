"""How long a gateway takes to read its sessions when it starts: `python -m benchmarks recovery [--sessions N]`.

Each session has values of 3 KB, and, in every second run, a call that was interrupted. The time counts until requests
for sessions are answered. Then sessions are made one by one, and one that is asked for at once; the interrupted calls
start when all are there.
"""

from __future__ import annotations

import asyncio
import cProfile
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
import uvloop

from benchmarks.chaining.served import MODEL, Served
from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from plait.gateway.config.sections import StoreConfig
from plait.gateway.config.sessions import SessionsConfig
from plait.gateway.guests.programs.core.held_call import KeptRequest
from plait.gateway.guests.programs.core.record import Opened, SessionEvent, Started, Submitted, ValueSet
from plait.gateway.guests.store.sqlite_keeper import SqliteKeeper
from plait.gateway.log.events import configure_logging
from plait.gateway.server.full_collections import FullCollections
from plait.gateway.streams import SESSION, Change, StreamKey
from plait.lab.simulation.claim import Claim

MOST_S: Final = 2.0
VALUES: Final = 3
VALUE: Final = "x" * 3_000
_ENCODER: Final = msgspec.msgpack.Encoder()
_BODY: Final = msgspec.json.encode(
    {
        "model": MODEL,
        "prompt": "Go on after {{v0}}: {{OUT}}",
        "max_tokens": 10,
        "placeholders": [
            {"name": "v0", "semantic_var_id": "v0"},
            {"name": "OUT", "in_out": True, "semantic_var_id": "o"},
        ],
    }
)


Recovery = tuple[float, float]
"""Seconds until sessions can be used, and until all are there."""


def main() -> int:
    """Measure, print, write what was asked for; returns 1 if a claim fails."""
    parser = timed_parser(__doc__, rounds=3)
    parser.add_argument("--sessions", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument(
        "--profile", action="store_true", help="of one recovery with interrupted calls: print where its time goes"
    )
    arguments = parser.parse_args()
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        configure_logging("info", "json")
        if arguments.profile:
            return _profiled(arguments.sessions)
        times = {
            kind: [_recovered_s(arguments.sessions, is_open=is_open) for _ in range(arguments.rounds)]
            for is_open, kind in ((False, "without calls"), (True, "with an interrupted call each"))
        }
    lines, claims = [], []
    for kind, found in times.items():
        usable_s, all_s = (median(one) for one in zip(*found, strict=True))
        lines.append(f"{arguments.sessions:,} sessions {kind} are there after {all_s:.2f} s")
        claims.append(Claim(f"{arguments.sessions:,} sessions {kind} can be used after (s)", usable_s, most=MOST_S))
    report = Report(lines=lines, claims=claims, results=[{"recovered_s": times}], is_timed=True)
    return finish("recovery", report, arguments)


def _profiled(sessions: int) -> int:
    profile = cProfile.Profile()
    _recovered_s(sessions, is_open=True, profile=profile)
    pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(45)
    return 0


def _recovered_s(sessions: int, *, is_open: bool, profile: cProfile.Profile | None = None) -> Recovery:
    """One recovery."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store", "s.db")
        _write(path, sessions, is_open=is_open)
        return uvloop.run(_recover(path, profile))


async def _recover(path: Path, profile: cProfile.Profile | None) -> Recovery:
    FullCollections(asyncio.get_running_loop()).start()  # as the gateway does
    served = Served(StoreConfig(path=str(path)), SessionsConfig(max_sessions=1_000_000))
    began_s = time.perf_counter()
    if profile is not None:
        profile.enable()
    recovering = asyncio.ensure_future(served.recover())
    usable_s = await _usable(served) - began_s
    await recovering
    if profile is not None:
        profile.disable()
    all_s = time.perf_counter() - began_s
    await served.close()
    return usable_s, all_s


async def _usable(served: Served) -> float:
    """When requests for sessions are answered: a client comes again each 5 ms."""
    while True:
        request = served.get("s-0", "v0", None)
        await request.task
        if request.status == 200:
            return time.perf_counter()
        await asyncio.sleep(0.005)


def _write(path: Path, sessions: int, *, is_open: bool) -> None:
    keeper = SqliteKeeper(path)
    keeper.open()
    for number in range(sessions):
        stream = StreamKey(SESSION, "", f"s-{number}")
        now_s = time.time()
        keeper.write([Change(stream, now_s, _ENCODER.encode(event)) for event in _events(number, is_open=is_open)])
    keeper.close()


def _events(number: int, *, is_open: bool) -> Iterator[SessionEvent]:
    yield Opened(3_600.0)
    for value in range(VALUES):
        yield ValueSet(f"v{value}", VALUE)
    if is_open:
        request = KeptRequest("submission", "/v1/completions", ((b"content-type", b"application/json"),), _BODY)
        yield Submitted(f"call-{number}", ("v0",), ("o",), b"0" * 32, request)
        yield Started(f"call-{number}")


if __name__ == "__main__":
    sys.exit(main())
