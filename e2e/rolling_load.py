"""A steady load of every kind of call, which notes how each call ended."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from e2e.server_process import NO_TLS, Server
from tests.waiting import WITHIN_S

CHAT = "/v1/chat/completions"
REFUSED = "connection refused"


@dataclass
class Ended:
    """How a request ended: `complete`, `503 gateway_stopping`, `event gateway_stopping`, or what went wrong."""

    how: str
    at_s: float
    retry_after: str | None = None


@dataclass
class Load:
    """Workers that each send one call after the other. `ended` has each kind of call with how it ended."""

    server: Server
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    stopping: bool = False

    async def work(self, number: int) -> None:
        """Send calls until stopped, or until nobody listens any more."""
        kinds: list[tuple[str, Callable[[httpx.AsyncClient, str], Awaitable[Ended]]]] = [
            ("stream", lambda http, name: post(http, chat(name, stream=True))),
            ("whole", lambda http, name: post(http, chat(name))),
            ("chained", chained),
            ("get", submitted),
        ]
        async with client(self.server) as http:
            for turn in itertools.count(number):
                if self.stopping:
                    return
                kind, send = kinds[turn % len(kinds)]
                ended = await send(http, f"s-{number}-{turn}")
                self.ended[kind, ended.how] += 1
                if ended.how == REFUSED:
                    return

    def lost(self) -> dict[tuple[str, str], int]:
        """The calls that did not get a whole answer."""
        return {key: count for key, count in self.ended.items() if key[1] not in ("complete", REFUSED)}


@asynccontextmanager
async def steady_load(server: Server, workers: int = 6) -> AsyncIterator[Load]:
    """Calls while the context lasts; afterwards every one of them has ended."""
    load = Load(server)
    tasks = [asyncio.create_task(load.work(number)) for number in range(workers)]
    try:
        yield load
    finally:
        load.stopping = True
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*tasks)


def client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, verify=NO_TLS, trust_env=False, timeout=WITHIN_S)


def chat(text: str, max_tokens: int = 20, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{text}: tell me more."}]
    return {"model": "demo", "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, **fields}


async def chained(http: httpx.AsyncClient, session: str) -> Ended:
    """A call that waits for the output of another.

    If one of the two was refused a connection, that is how the pair ended: the gateway never had both.
    """
    needs = post(http, chat("Use {{v}}", stream=True), plait_session=session, plait_inputs="v")
    makes = post(http, chat("Make it"), plait_session=session, plait_output="v")
    ended = await asyncio.gather(needs, makes)
    return min(ended, key=lambda one: (one.how != REFUSED, one.how == "complete"))


async def submitted(http: httpx.AsyncClient, session: str) -> Ended:
    """A submission, and a get of its output."""
    body = {"session_id": session, "model": "demo", "prompt": "Say {{v}}", "max_tokens": 20, "ignore_eos": True}
    accepted = await post(http, {**body, "placeholders": [{"name": "v", "in_out": True}]}, "/v1/submit")
    if accepted.how != "complete":
        return accepted
    return await get(http, session, "v")


async def get(http: httpx.AsyncClient, session: str, variable: str) -> Ended:
    return await post(http, {"session_id": session, "semantic_var_id": variable}, "/v1/get")


async def post(http: httpx.AsyncClient, body: dict[str, Any], path: str = CHAT, **annotations: str) -> Ended:
    """One request to its end. Nothing is raised: what goes wrong is its result."""
    headers = {name.replace("_", "-"): value for name, value in annotations.items()}
    try:
        answer = await http.post(path, json=body, headers=headers)
    except httpx.ConnectError:
        return _ended(REFUSED)
    except httpx.HTTPError as error:
        return _ended(f"{type(error).__name__}: {error}")
    retry_after = answer.headers.get("retry-after")
    if answer.status_code != 200:
        return _ended(f"{answer.status_code} {_code(answer.content)}", retry_after)
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return _ended("complete")
    events = [event for event in answer.text.split("\n\n") if event.startswith("data: ")]
    last = events[-1].removeprefix("data: ") if events else ""
    return _ended("complete" if last == "[DONE]" else f"event {_code(last.encode())}")


def _ended(how: str, retry_after: str | None = None) -> Ended:
    return Ended(how, asyncio.get_running_loop().time(), retry_after)


def _code(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["code"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"not OpenAI's error: {body[:60]!r}"
