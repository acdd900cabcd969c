"""Clients that misbehave: some read slowly or not at all, some leave, some send megabytes or what is no request.

docs/failures.md says how each of their requests ends. `undocumented` lists those that ended in another way.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, Final

import msgspec

from benchmarks.faulting.measurement import MODEL
from e2e.faults.completions import LARGE_MODEL, LONG_MODEL
from e2e.faults.hostile_requests import CASES, is_whole
from e2e.faults.raw_client import CHAT, Answer, Client, Connection, request
from e2e.faults.verdicts import complaints, is_good

SHORT_MODEL: Final = "short"
"""Its context is the engines' own, 32,768 tokens."""
LARGE_CONTEXT_TOKENS: Final = 1_000_000
"""The embedded engine's tokenizer makes 300,000 tokens of a megabyte of English."""
SETTINGS: Final = f"""
[[models]]
name = "{SHORT_MODEL}"
tokenizer = "embedded"
[[models]]
name = "{LARGE_MODEL}"
tokenizer = "embedded"
max_context_tokens = {LARGE_CONTEXT_TOKENS}
"""
"""What a gateway's configuration needs for these clients."""
MODELS: Final = (MODEL, SHORT_MODEL, LARGE_MODEL, LONG_MODEL)

SLOW_CLIENT_S: Final = 60.0
"""`server.slow_client_timeout_s`, its default."""
PAUSE_S: Final = (1.0, 50.0)
"""How long a slow reader stops."""
NEVER_S: Final = SLOW_CLIENT_S + 15.0
"""A client that has read nothing for so long has been dropped. It then looks."""
TIMEOUT_S: Final = 60.0
"""For the end of an answer that is read, as for a plain call."""
LEAVE_S: Final = (0.0, 1.5)
LARGE_PAUSE_S: Final = 5.0
"""Tokenizing a megabyte takes a core 0.2 s. The machine also has to do the rest."""
RECEIVE_BYTES: Final = 16 * 1024
"""The kernel's buffer at a client that does not read."""

_LINE: Final = "A line of a long prompt, with words.\n"
_CASES: Final[Mapping[str, tuple[str, int, str, int]]] = {
    "valid": (LARGE_MODEL, 200, _LINE, 2**20),
    "valid, without a place to cut": (LARGE_MODEL, 200, "a", 2**20),
    "over the context": (SHORT_MODEL, 400, _LINE, 2**18),
    "over the context by its bytes": (SHORT_MODEL, 400, _LINE, 5 * 2**20),
    "over a large context": (LARGE_MODEL, 400, _LINE, 5 * 2**20),
    "over the limit of a body": (LARGE_MODEL, 413, _LINE, 33 * 2**20),
}
"""A name, and then the model, the status that is due, and the text with its size in bytes."""
_CODES: Final = {400: "context_length_exceeded", 413: "body_too_large"}
HOSTILE: Final = [case for case in CASES if case.status != 408 and case.name != "more than fits"]
"""Without those that wait for a time-out, and the one for another context: prompts over the context are above."""
HOSTILE_PAUSE_S: Final = 0.5


class BadClients:
    """`fates` counts the requests by kind and end. `gone` counts clients that left or were dropped."""

    def __init__(self, port: int, dice: random.Random) -> None:
        self.fates: Counter[str] = Counter()
        self.undocumented: list[str] = []
        self.gone = 0
        self._port = port
        self._dice = dice
        self._numbers = count()
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Misbehave until `stop`."""
        self._over = asyncio.Event()
        slow = [self._pauses, self._pauses, self._never_reads, self._never_reads]
        kinds = [*slow, self._leaves, self._large, self._hostile]
        self._tasks = [asyncio.create_task(self._repeat(kind)) for kind in kinds]

    async def stop(self) -> None:
        """Wait until all have ended. Those that do not read now read on."""
        self._over.set()
        await asyncio.gather(*self._tasks)

    async def _repeat(self, kind: Callable[[int], Awaitable[None]]) -> None:
        while not self._over.is_set():
            await kind(next(self._numbers))

    async def _pauses(self, number: int) -> None:
        """A client that stops in the middle for a while: it gets the rest then."""
        await self._reads_late("pauses", number, self._dice.uniform(*PAUSE_S))

    async def _never_reads(self, number: int) -> None:
        """A client that reads no more: it is dropped."""
        await self._reads_late("never reads", number, NEVER_S)

    async def _reads_late(self, kind: str, number: int, pause_s: float) -> None:
        body = _body(LONG_MODEL, f"Answer {number} at length.")
        headers = {"plait-session": f"b{number}", "plait-output": "text"} if number % 2 else {}
        connection = await self._connected()
        reading = asyncio.create_task(connection.pause_after_first(self._over, pause_s))
        answer = await connection.exchange(request("POST", CHAT, body, headers), 0.0, pause_s + TIMEOUT_S)
        reading.cancel()
        connection.transport.abort()
        fate = _fate(body, answer)
        if pause_s > SLOW_CLIENT_S and answer.broken.startswith("closed"):
            fate = "dropped"
            self.gone += 1
        is_wrong = fate == "good" and pause_s > SLOW_CLIENT_S and not self._over.is_set()
        self._count(
            kind, "not dropped" if is_wrong else fate, answer, is_documented=not (is_wrong or fate == "unclean")
        )
        await self._end_session(headers)

    async def _leaves(self, number: int) -> None:
        """A client that closes the connection: while it sends, while it waits, or while it reads."""
        headers = {"plait-session": f"b{number}", "plait-output": "text"} if number % 2 else {}
        body = _body(LONG_MODEL, f"Answer {number} at length, if I stay. {'x' * 4096}")
        data = request("POST", CHAT, body, headers)
        if number % 3 == 0:
            data = data[:-1024]  # it leaves before it has sent all
        connection = await self._connected()
        answer = await connection.exchange(data, 0.0, self._dice.uniform(*LEAVE_S))
        connection.transport.abort()
        is_left = answer.broken.startswith("no end")
        self.gone += is_left
        fate = "left" if is_left else _fate(body, answer)
        self._count("leaves", fate, answer, is_documented=fate != "unclean")
        await self._end_session(headers)

    async def _large(self, number: int) -> None:
        """A prompt of megabytes, which is valid or refused."""
        name = self._dice.choice(list(_CASES))
        model, due, text, size = _CASES[name]
        body = _body(model, f"{number} {text * (size // len(text))}", is_streamed=self._dice.random() < 0.5)
        async with Client(self._port, TIMEOUT_S) as client:
            answer = await client.post(CHAT, body)
        fate = _fate(body, answer)
        if due in _CODES:
            is_documented = answer.status == due and _code(answer) == _CODES[due] and fate.startswith("failed cleanly")
        else:
            is_documented = fate != "unclean" and _code(answer) not in _CODES.values()
        self._count(name, fate, answer, is_documented=is_documented)
        await self._rest(LARGE_PAUSE_S)

    async def _hostile(self, _number: int) -> None:
        """Bytes that are refused: no HTTP, no JSON, too many levels, too large a head."""
        case = self._dice.choice(HOSTILE)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        raw = b""
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                writer.writelines(case.pieces)
                while not is_whole(raw) and (more := await reader.read(65_536)):
                    raw += more
        writer.transport.abort()
        head, _, body = raw.partition(b"\r\n\r\n")
        answer = Answer(0.0, int(head.split()[1]) if head else 0, body=body)
        is_documented = answer.status == case.status and (case.code is None or _code(answer) == case.code)
        self._count("hostile", f"refused: {answer.status}", answer, is_documented=is_documented)
        await self._rest(HOSTILE_PAUSE_S)

    async def _rest(self, time_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), time_s)

    def _count(self, kind: str, fate: str, answer: Answer, *, is_documented: bool) -> None:
        self.fates[f"{kind}: {fate}"] += 1
        if not is_documented:
            self.undocumented.append(f"{kind}: {fate}: {answer.status} {answer.broken} {answer.body[-300:]!r}")

    async def _connected(self) -> _LateReader:
        loop = asyncio.get_running_loop()
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        own.setblocking(False)
        await loop.sock_connect(own, ("127.0.0.1", self._port))
        _, connection = await loop.create_connection(_LateReader, sock=own)
        return connection

    async def _end_session(self, headers: Mapping[str, str]) -> None:
        if headers:
            async with Client(self._port, TIMEOUT_S) as client:
                await client.delete(f"/v1/sessions/{headers['plait-session']}")


class _LateReader(Connection):
    """A connection that can stop reading in the middle of an answer."""

    def __init__(self) -> None:
        super().__init__()
        self._first = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._first.set()

    async def pause_after_first(self, over: asyncio.Event, time_s: float) -> None:
        """Read nothing for `time_s` seconds from the first bytes on, or until `over`."""
        await self._first.wait()
        self.transport.pause_reading()
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), time_s)
        if not self.is_lost:
            self.transport.resume_reading()


def _body(model: str, text: str, *, is_streamed: bool = True) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    fields = {} if model == LONG_MODEL else {"max_tokens": 8}
    return {"model": model, "messages": messages, "stream": is_streamed, **fields}


def _fate(body: Mapping[str, Any], answer: Answer) -> str:
    """`good`, `failed cleanly` with the status, or `unclean`."""
    found = set(complaints(answer, frozenset()))
    if not found and is_good(body, answer):
        return "good"
    if not found and (answer.status != 200 or b'"error"' in answer.body):
        return f"failed cleanly: {answer.status if answer.status != 200 else 'event'}"
    return "unclean"


def _code(answer: Answer) -> str | None:
    with suppress(msgspec.DecodeError, KeyError, TypeError):
        code: str | None = msgspec.json.decode(answer.body)["error"]["code"]
        return code
    return None
