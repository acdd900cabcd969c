"""Whether each line of a large batch has one answer when its gateways are killed, on real gateways."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import openai

from benchmarks.running.report import Report, table
from e2e.sdk import sync_client
from e2e.server_process import Server, eventually
from e2e.servers import Fleet, Launcher
from plait.lab.simulation.claim import Claim

LINES: Final = 50_000
WITHIN_S: Final = 600.0
TAKEN_OVER_S: Final = 10.0
AGAIN: Final = 1024
"""The most lines that may be in flight or not stored at a kill: the engines' slots."""
GOES_ON: Final = 128
"""So many further answers show that a batch goes on: more than one write has."""
STOPPED_S: Final = 15.0
"""A gateway that is stopped for so long has lost its batches."""

Hit = Literal["restarted", "killed", "stopped"]
"""What happens to the batch's gateway."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`again`: answers of engines beyond one a line; `pause_s`: the longest time without a new answer."""

    hit: Hit
    times: int
    status: str
    lines: int
    whole: bool
    """Whether the output has each line once, in the order of the file."""
    again: int
    pause_s: float
    seconds: float


def run(lines: int, kills: int) -> Iterator[Outcome]:
    """A folder and one gateway, a PostgreSQL and three; then one that is stopped past its lease."""
    yield _batch(lines, ["restarted"] * kills)
    yield _batch(lines, ["killed"] * kills)
    yield _batch(lines // 5, ["stopped"])


def _batch(lines: int, hits: Sequence[Hit]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder, Launcher(Path(folder)) as launch:
        engines = [launch.engine(f"engine-{number}", time_scale=2) for number in range(4)]
        if hits[0] != "restarted":
            gateway: Server = (balanced := launch.gateways(engines))
            members: Sequence[Server] = balanced.members
        else:
            kept = Path(folder) / "store"
            kept.mkdir(mode=0o700)
            gateway = launch.gateway(engines, store={"path": str(kept / "plait.db")})
            members = [gateway]
        Fleet(gateway, {engine.name: engine for engine in engines}).start()
        with sync_client(gateway, max_retries=20) as client:
            return _watched(client.with_options(timeout=5.0), members, lines, hits)


def _watched(client: openai.OpenAI, members: Sequence[Server], lines: int, hits: Sequence[Hit]) -> Outcome:
    file = client.files.create(file=("lines.jsonl", b"\n".join(map(_line, range(lines)))), purpose="batch")
    began_s = time.monotonic()
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    lost, pause_s = 0.0, 0.0
    for number, hit in enumerate(hits, 1):
        _until(client, batch.id, number * lines // (len(hits) + 1))
        owner = max((one for one in members if one.running), key=lambda one: one.metric("plait_batch_lines_total"))
        answered = owner.metric("plait_batch_lines_total")
        others = [one for one in members if one is not owner and one.running] or [owner]
        hit_s = time.monotonic()
        if hit == "stopped":
            owner.signal(signal.SIGSTOP)
        else:
            lost += answered
            owner.kill()
        if hit == "restarted":
            owner.start()
        _goes_on(others)
        pause_s = max(pause_s, time.monotonic() - hit_s)
        if hit == "stopped":
            time.sleep(max(0.0, STOPPED_S - pause_s))
            owner.signal(signal.SIGCONT)
    eventually(lambda: _counted(client, batch.id)[0] in {"completed", "failed", "expired"}, WITHIN_S)
    seconds, ended = time.monotonic() - began_s, client.batches.retrieve(batch.id)
    assert ended.output_file_id is not None
    told = [json.loads(one) for one in client.files.content(ended.output_file_id).iter_lines()]
    whole = [one["custom_id"] for one in told] == [str(number) for number in range(lines)]
    answered = lost + sum(one.metric("plait_batch_lines_total") for one in members if one.running)
    return Outcome(hits[0], len(hits), ended.status, lines, whole, int(answered) - lines, pause_s, seconds)


def _line(number: int) -> bytes:
    messages = [{"role": "user", "content": f"Question {number} of many."}]
    body: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 8}
    asked = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(asked).encode()


def _goes_on(members: Sequence[Server]) -> None:
    """Return once these gateways have answered lines since now, each without an answer so far."""
    eventually(lambda: sum(one.metric("plait_batch_lines_total") for one in members) >= GOES_ON, WITHIN_S)


def _until(client: openai.OpenAI, batch_id: str, completed: int) -> None:
    """Return once so many lines are answered."""
    eventually(lambda: _counted(client, batch_id)[1] >= completed, WITHIN_S)


def _counted(client: openai.OpenAI, batch_id: str) -> tuple[str, int]:
    found = client.batches.retrieve(batch_id)
    return found.status, 0 if found.request_counts is None else found.request_counts.completed


def report(outcomes: Sequence[Outcome]) -> Report:
    rows, claims = [], list[Claim]()
    for one in outcomes:
        where = f"{one.lines} lines, gateway {one.hit}, {one.times} times"
        rows.append([where, one.status, str(one.whole), str(one.again), f"{one.pause_s:.1f} s", f"{one.seconds:.0f} s"])
        claims.append(Claim("each line once, in order", float(one.whole), least=1.0, where=where))
        claims.append(Claim("lines answered again", one.again, most=one.times * AGAIN, where=where))
        claims.append(Claim("seconds until the batch goes on", one.pause_s, most=TAKEN_OVER_S, where=where))
    head = ["case", "status", "whole", "answered again", "goes on after", "took"]
    return Report(lines=list(table(head, rows)), claims=claims, results=list(map(asdict, outcomes)), is_timed=True)
