"""A gateway over an engine that answers when a test tells it to, asked over plain ASGI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

from starlette.types import Scope

from plait.backends.errors import EngineError, NoEngineError
from plait.gateway.app import Gateway
from plait.gateway.asgi import Sink
from plait.gateway.calls.call import Asked, Ending, Outcome
from plait.gateway.calls.open_answers import OpenAnswers
from plait.gateway.calls.records import CallRecords
from plait.gateway.calls.relay import Relay
from plait.gateway.config.file import parse_config
from plait.gateway.guests.programs.chained_calls import ChainedCalls
from plait.policy.types import Call
from tests.invariants import check

CHAT, SUBMIT, GET = "/v1/chat/completions", "/v1/submit", "/v1/get"
KEYS = ["one", "two"]
EVENT_STREAM = (b"content-type", b"text/event-stream")


class Engine:
    """Stands for relay and engines: holds every call until the test ends it, by the text at its end.

    It runs where it continues, or else on the first engine of `up`, unless it avoids that; `places` has where it did.
    """

    def __init__(self) -> None:
        self.running: dict[str, tuple[Asked, Sink, asyncio.Future[Ending]]] = {}
        self.delivered: list[str] = []
        self.begun: set[str] = set()
        self.places: dict[str, str] = {}
        self.up = ["e", "f"]
        self.refined: list[tuple[str, Call]] = []
        self.open_answers = OpenAnswers(10**9)
        self.is_stopping = False
        self.holdings: Any = SimpleNamespace(records=CallRecords(()))

    async def run(self, asked: Asked, sink: Sink) -> Ending:
        if not self.up:
            raise NoEngineError("no engine is up", retry_after_s=1.0)
        text, wanted = prompt_of(asked), [asked.slot.continues_on, *self.up]
        self.delivered.append(text)
        self.places[text] = next((name for name in wanted if name in self.up and name not in asked.avoids), self.up[0])
        ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.running[text] = (asked, sink, ended)
        try:
            await sink.flush(ended)
            return ended.result()
        finally:
            del self.running[text]
            self.begun.discard(text)

    def refine(self, handle: str, call: Call) -> None:
        self.refined.append((handle, call))

    async def deliver(self, asked: Asked, sink: Sink) -> Ending:
        return await self.run(asked, sink)

    async def answer(self, prompt: str, text: str, finish_reason: str = "stop") -> None:
        """A completion, in two pieces if it is streamed."""
        asked, sink, _ = self.running[prompt]
        if asked.slot.text is not None:
            asked.slot.text.was_cut = finish_reason == "length"
        if json.loads(asked.body.original).get("stream"):
            await self._stream(prompt, text[:2], text[2:])
            sink.end(b"data: [DONE]\n\n")
        else:
            body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
            if asked.slot.text is not None:
                asked.slot.text.whole(body)
            sink.whole(200, [(b"plait-engine", self.places[prompt].encode())], body)
        await self._end(prompt, None)

    async def begin(self, prompt: str, piece: str) -> None:
        """A piece of a stream, and everything that it leads to."""
        await self._stream(prompt, piece)
        await settle()

    async def break_off(self, prompt: str, text: str) -> None:
        """A stream that ends in the middle."""
        await self._stream(prompt, text)
        await settle()
        lost = EngineError(f"engine {self.places[prompt]}: stream lost")
        self.running[prompt][1].end(b"data: " + lost.body() + b"\n\n")
        await self._end(prompt, lost)

    async def refuse(self, prompt: str, status: int = 400) -> None:
        self.running[prompt][1].whole(status, [], b'{"error":{"message":"too long"}}')
        await self._end(prompt, f"refused with status {status}: too long")

    async def lose(self, prompt: str) -> None:
        """Before anything of its answer has come."""
        await self._end(prompt, EngineError(f"engine {self.places[prompt]}: connection lost"), is_told=False)

    async def _stream(self, prompt: str, *pieces: str) -> None:
        asked, sink, _ = self.running[prompt]
        if prompt not in self.begun:
            self.begun.add(prompt)
            headers = [EVENT_STREAM, (b"plait-engine", self.places[prompt].encode())]
            sink.start(200, headers)
        for piece in pieces:
            event = b"data: " + json.dumps({"choices": [{"delta": {"content": piece}}]}).encode() + b"\n\n"
            if asked.slot.text is not None:
                asked.slot.text.feed(event)
            sink.write(event)

    async def _end(self, prompt: str, problem: EngineError | str | None, *, is_told: bool = True) -> None:
        outcome: Outcome = "ok" if problem is None else "failed" if isinstance(problem, EngineError) else "refused"
        asked, _, ended = self.running[prompt]
        ending = Ending(outcome, 200, self.places[prompt], is_told, None, problem)
        if asked.slot.begins_anew is not None:
            asked.slot.begins_anew(ending)
        ended.set_result(ending)
        await settle()


def prompt_of(asked: Asked) -> str:
    body = json.loads(asked.body.original)
    return "|".join(message["content"] for message in body["messages"]) if "messages" in body else str(body["prompt"])


class Exchange:
    """One request under way: what the gateway sent so far, and the client's going away."""

    def __init__(self, gateway: Gateway, method: str, path: str, body: Any, headers: dict[str, str]) -> None:
        self.messages: list[Any] = []
        self.begun = asyncio.Event()
        self._body: bytes | None = b"" if body is None else json.dumps(body).encode()
        self._gone = asyncio.Event()
        self._reads = asyncio.Event()
        self._reads.set()
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        path, _, query = path.partition("?")
        scope: Scope = {"type": "http", "method": method, "path": path, "headers": raw, "query_string": query.encode()}
        scope["raw_path"] = quote(path, errors="surrogatepass").encode()
        self.task = asyncio.ensure_future(gateway.app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self._reads.wait()
        self.messages.append(message)
        self.begun.set()

    def pause(self) -> None:
        """The client reads no more."""
        self._reads.clear()

    async def leave(self) -> None:
        self._gone.set()
        await settle()

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        assert len(dict(self.messages[0]["headers"])) == len(self.messages[0]["headers"])
        return dict(self.messages[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def refusal(self) -> tuple[int, str]:
        return self.status, self.json["error"]["code"]

    @property
    def text(self) -> str:
        return str(self.json["choices"][0]["message"]["content"])


def events(exchange: Exchange) -> list[Any]:
    """What a stream has brought."""
    found = [line.removeprefix(b"data: ") for line in exchange.body.split(b"\n\n") if line.startswith(b"data: ")]
    return [data.decode() if data == b"[DONE]" else json.loads(data) for data in found]


async def settle() -> None:
    """Until everything waits for something that the test has to do."""
    for _ in range(20):
        await asyncio.sleep(0)


class Served:
    """A gateway whose one engine is the test's."""

    def __init__(self, store: Path | None = None, more: Mapping[str, Any] | None = None, **sessions: Any) -> None:
        sections: dict[str, Any] = {
            "server": {"api_keys": KEYS},
            "engines": [{"name": "e", "url": "http://127.0.0.1:1"}],
            "models": [{"name": "m", "tokenizer": "embedded"}],
            "sessions": {"gather_ms": 0, "max_attempts": 1, **sessions},
        }
        if store is not None:
            sections["store"] = {"path": str(store)}
        sections.update(more or {})
        self.gateway = Gateway(parse_config(sections, "test"), b"a secret that stays" * 2)
        self.gateway.kernel.router.health.answered("e", {"m": 1_000})
        self.engine = Engine()
        self.engine.holdings = self.gateway.kernel.relay.holdings
        chained = self.gateway.house[ChainedCalls]
        self.executor = chained.executor
        self.exchanges: list[Exchange] = []
        self.registry = self.gateway.kernel.registry
        chained.runner = replace(chained.runner, relay=cast("Relay", self.engine))

    async def send(
        self, path: str, body: Any = None, *, key: str = "one", method: str = "POST", **headers: str
    ) -> Exchange:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        exchange = Exchange(self.gateway, method, path, body, {"authorization": f"Bearer {key}", **named})
        self.exchanges.append(exchange)
        await settle()
        return exchange

    async def chat(self, text: str, *, inputs: str = "", output: str = "", session: str = "s", **more: Any) -> Exchange:
        """A call; `key` and `objective` are as they say, other fields go into the body."""
        headers = {"plait_session": session, "key": more.pop("key", "one")}
        headers |= {"plait_inputs": inputs} if inputs else {}
        headers |= {"plait_output": output} if output else {}
        headers |= {"plait_objective": more.pop("objective")} if "objective" in more else {}
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
        return await self.send(CHAT, body, **headers)

    async def get(self, variable: str, **more: Any) -> Exchange:
        key = more.pop("key", "one")
        return await self.send(GET, {"session_id": "s", "semantic_var_id": variable, **more}, key=key)

    async def submit(self, prompt: Any, *outputs: str, inputs: tuple[str, ...] = (), **more: Any) -> Exchange:
        """A text, or messages."""
        named = [{"name": name, "in_out": True} for name in outputs] + [{"name": name} for name in inputs]
        kind = "messages" if isinstance(prompt, list) else "prompt"
        body = {"session_id": "s", "model": "m", kind: prompt, "placeholders": named, **more}
        return await self.send(SUBMIT, body)

    async def value(self, variable: str, value: str, **headers: str) -> Exchange:
        body = {"session_id": "s", "semantic_var_id": variable, "value": value}
        return await self.send("/v1/variables", body, **headers)


@asynccontextmanager
async def served_calls(**sessions: Any) -> AsyncIterator[Served]:
    """A gateway of its own; afterwards nothing may be running or left behind."""
    served = Served(**sessions)
    yield served
    check(served.executor)
    await served.gateway.house[ChainedCalls].close()
    await settle()
    assert (served.engine.running, len(served.executor.sessions)) == ({}, 0)
    assert served.gateway.house[ChainedCalls].runner.tasks == set()
    assert all(exchange.task.done() for exchange in served.exchanges)
