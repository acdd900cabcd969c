"""What asks and what answers beside a full gateway, both in C: h2load's connections, and nginx as an engine.

Written in Python, clients or engines would be full before the gateway is.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.plain.answering_engine import MODEL
from benchmarks.plain.peers import nginx

KEY: Final = "flood"
WARM_S: Final = 2.0
"""Not counted: connections are opened."""

ANSWER: Final = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": MODEL,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "token " * 8}, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 100, "completion_tokens": 8, "total_tokens": 108},
}
MODELS: Final = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 131_072}]}


@dataclass(frozen=True, slots=True)
class Came:
    """What came of requests: how many by status, in so many seconds. Status 0: no whole answer."""

    statuses: dict[int, int]
    seconds: float

    @property
    def good_per_s(self) -> float:
        """Calls that were answered, a second."""
        return self.statuses.get(200, 0) / self.seconds

    @property
    def refused(self) -> int:
        """Requests that got no good answer."""
        return sum(self.statuses.values()) - self.statuses.get(200, 0)


def body(text: str, characters: int) -> dict[str, Any]:
    """A call whose prompt begins with the text."""
    text += " Tell me how a gateway places calls." * (1 + characters // 36)
    return {"model": MODEL, "messages": [{"role": "user", "content": text[:characters]}], "max_tokens": 8}


def engine_command(port: int, folder: Path) -> list[str]:
    """How nginx is started as an engine that answers each call from memory."""
    folder.mkdir()
    json_of = "default_type application/json; return 200"
    return nginx(
        folder,
        f"server {{ listen 127.0.0.1:{port}; keepalive_requests 100000000; keepalive_timeout 600s;"
        f"location = /health {{ {json_of} '{{}}'; }}"
        f"location = /v1/models {{ {json_of} '{json.dumps(MODELS)}'; }}"
        f"location = /v1/chat/completions {{ {json_of} '{json.dumps(ANSWER)}'; }}"
        "location / { return 404; } }",
    )


async def ask(port: int, folder: Path, *, clients: int, per_s: float | None, seconds: float, characters: int) -> Came:
    """Ask over so many connections, so often in all; None: each again at once. A connection waits for its answers."""
    sent, log = folder / "body.json", folder / "h2load.log"
    sent.write_text(json.dumps(body("flood", characters)), encoding="utf-8")
    rate = [] if per_s is None else [f"--rps={per_s / clients:.4f}"]
    words = [
        *_pinned("h2load"), "--h1", f"--clients={clients}", f"--duration={seconds:g}s", f"--warm-up-time={WARM_S:g}s",
        *rate, f"--data={sent}", f"--header=authorization: Bearer {KEY}", "--header=content-type: application/json",
        f"--log-file={log}", f"http://127.0.0.1:{port}/v1/chat/completions",
    ]  # fmt: skip
    log.unlink(missing_ok=True)
    load = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.DEVNULL)
    if await load.wait():
        raise RuntimeError(f"h2load ended with {load.returncode}")
    statuses = Counter(max(0, int(line.split("\t")[1])) for line in log.read_text(encoding="utf-8").splitlines())
    return Came(dict(statuses), seconds)


def pinned_to(core: int, command: list[str]) -> list[str]:
    """The command on that core alone: what asks takes nothing from what is measured."""
    return ["taskset", "--cpu-list", str(core), *command]


def _pinned(program: str) -> list[str]:
    path = shutil.which(program)
    if path is None:
        raise RuntimeError(f"{program} is not installed")
    return pinned_to(1, [path])
