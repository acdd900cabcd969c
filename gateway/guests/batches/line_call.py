"""One line of a batch as a call: sent on the road of all calls, behind all others, and answered nowhere."""

from __future__ import annotations

import asyncio
from typing import Any, Final, NamedTuple

import msgspec
from starlette.types import Message

from plait.backends.errors import PlaitError
from plait.gateway.api.call_api import CallApi, ForwardedApi, Preparer
from plait.gateway.asgi import Client, ClientGoneError, MessageSink, WatchedReceive
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.calls.routes import KINDS
from plait.gateway.guests.batches.batch import Batch
from plait.gateway.guests.batches.checking import Line
from plait.gateway.intake.open_bodies import OpenBody
from plait.gateway.timer import loop_time_s

LATER: Final = frozenset((429, 503))
"""The line may be sent again: nothing is wrong with it, and no engine has failed it."""

HEADERS: Final = [(b"content-type", b"application/json"), (b"plait-objective", b"throughput")]


class Outcome(NamedTuple):
    """What a line has come to. `retry_after_s`: for an answer of `LATER`, when to try again."""

    status: int
    body: bytes
    retry_after_s: float = 1.0


class CollectedAnswer(MessageSink):
    """The sink of an answer that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.status = 0
        self.is_whole = False
        self._parts: list[bytes] = []

    def put(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self._parts.append(bytes(message.get("body", b"")))
            self.is_whole = not message.get("more_body", False)

    async def send(self, message: Message) -> None:
        """ASGI's send."""
        self.put(message)

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)


async def ask(api: CallApi, batch: Batch, line: Line, request_id: str, engine: str | None) -> Outcome:
    """Send a line, and wait for its answer. It prefers this engine; None: its batch is late, so it waits for its turn
    as any call for throughput.
    """
    incoming = Incoming(
        batch.endpoint,
        HEADERS,
        bytes(line.body),
        request_id,
        loop_time_s(),
        batch.identity,
        key=batch.key,
        is_line=True,
        is_late=engine is None,
        prefer=engine,
    )
    sink, receive, open_body = CollectedAnswer(), WatchedReceive(_never, Client()), OpenBody(api.bodies, batch.identity)
    completions = api.completions
    preparer: Preparer = completions
    if batch.endpoint not in KINDS:
        preparer = api.preparers.get(batch.endpoint) or ForwardedApi(completions)
    with open_body:
        try:
            answer = await preparer.prepared(incoming, open_body, receive, sink)
            await answer()
        except PlaitError as error:
            if not sink.status:
                return Outcome(error.status, error.body(), error.retry_after_s or 1.0)
        except ClientGoneError:
            return Outcome(503, b"{}")
    return Outcome(sink.status, sink.body) if sink.is_whole else Outcome(502, b"{}")


async def _never() -> Message:
    """A client that says no more and never goes."""
    forever: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await forever


def answered(line: Line, request_id: str, outcome: Outcome) -> bytes:
    """The line of the output, or of the errors, for an answer."""
    return _written(line, request_id, outcome, None)


def unanswered(line: Line, request_id: str, code: str, message: str, last: Outcome | None = None) -> bytes:
    """The line of the errors for one that was given up; `last` is what it had come to, if it was tried."""
    return _written(line, request_id, last, {"code": code, "message": message})


def _written(line: Line, request_id: str, outcome: Outcome | None, error: dict[str, str] | None) -> bytes:
    response = outcome and {"status_code": outcome.status, "request_id": request_id, "body": _json(outcome.body)}
    return msgspec.json.encode({"id": request_id, "custom_id": line.custom_id, "response": response, "error": error})


def _json(body: bytes) -> Any:
    """An answer as it stands, if it is JSON."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode(errors="replace")
    return msgspec.Raw(msgspec.json.format(body, indent=-1) if b"\n" in body else body)


class _Answer(msgspec.Struct, frozen=True):
    usage: dict[str, Any] | None = None


_ANSWER: Final = msgspec.json.Decoder(_Answer)


def usage_of(body: bytes) -> tuple[int, int, int, int]:
    """As in `Batch.usage`, from the usage of a chat, a response or a message; nothing for an answer that tells none.

    The prompt of a message leaves out what is cached.
    """
    try:
        usage = _ANSWER.decode(body).usage or {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        usage = {}
    counts = dict(usage)
    for details in usage.values():
        counts |= details if isinstance(details, dict) else {}

    def total(*names: str) -> int:
        return sum(int(found) for name in names if isinstance(found := counts.get(name), int | float))

    return (
        total("prompt_tokens", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
        total("cached_tokens", "cache_read_input_tokens"),
        total("completion_tokens", "output_tokens"),
        total("reasoning_tokens", "thinking_tokens"),
    )
