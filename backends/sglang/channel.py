"""The channel between SGLang's API server and a scheduler: queries, and reports that the scheduler pushes (`News`).

Queries are in the id of SGLang's request for the scheduler's internal state, the only free field of that request. A
scheduler with the plugin answers under `STATE_KEY`. A scheduler without the plugin answers with its internal state, so
an answer also proves that the plugin is active. All ranks get the request. The leading scheduler of each data-parallel
rank answers the queries for its rank. SGLang waits for all of them before it sends its next request.

A busy scheduler answers a query only after its step. By then, a client whose answer has ended may have sent its next
call, and the gateway would place this call by an old report. So the scheduler pushes a report when the cache or the
calls have changed: between steps, and before a batch runs, because its prompts may have evicted blocks. The message is
a datagram, so the scheduler never blocks. A datagram may be lost, so the API server also sends a query after some time
without news. The API server makes the socket and puts its name into the environment before it starts the schedulers.

A pushed report has the changes of the last few messages, so that a gateway which has missed some can apply it; applying
a change twice has no effect. One message serves all gateways: the API server leaves out a gateway's own calls, and does
not answer a gateway while only its own calls have changed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from plait.backends.adapter.calls_journal import LatestChanges
from plait.backends.protocol.cache_state import CacheState, OutstandingCall

PREFIX: Final = "plait "
STATE_KEY: Final = "plait"


class ReportSince(msgspec.Struct, frozen=True, tag="report"):
    """Asks a rank for its cache-state report since a cursor of an epoch, for a gateway. The answer is msgpack."""

    since: int | None = None
    epoch: str | None = None
    gateway: str | None = None
    rank: int = 0


class ChangeObjectives(msgspec.Struct, frozen=True, tag="objectives"):
    """Changes objectives of calls in a rank, by a valid body of `POST /call_objectives`. The answer is how many."""

    body: str
    rank: int = 0


SchedulerQuery = ReportSince | ChangeObjectives


def id_of(queries: Sequence[SchedulerQuery]) -> str:
    """The request id that has these queries."""
    return PREFIX + msgspec.json.encode(queries).decode()


def parse_queries(request_id: str | None) -> list[SchedulerQuery] | None:
    """The queries in a request id; None for any other id."""
    if request_id is None or not request_id.startswith(PREFIX):
        return None
    return msgspec.json.decode(request_id.removeprefix(PREFIX), type=list[SchedulerQuery])


VARIABLE: Final = "PLAIT_SGLANG_NEWS"

COVERED: Final = 16
"""How many messages back a message's changes reach. A step sends at most two, and a gateway asks again 20 ms after an
answer: one step later, or a few.
"""

MAX_BYTES: Final = 2**18
"""The longest message that is read. Linux sends at most 200 KB."""


Report = Callable[[int, str | None], CacheState]
"""Makes the report since a cursor of an epoch (None: the current one)."""


class News(msgspec.Struct, frozen=True, array_like=True):
    """A pushed report, as msgpack, with the changes after the cursor `since` up to `cursor`.

    `calls` are not in the report, because each gateway gets other ones. `latest` says whose calls have changed.
    """

    since: int
    cursor: int
    epoch: str
    report: bytes
    calls: list[OutstandingCall]
    latest: LatestChanges
    rank: int

    def for_gateway(self, gateway: str | None) -> bytes:
        """The report, as msgpack, without this gateway's calls."""
        calls = [call for call in self.calls if call.gateway != gateway]
        fields = _FIELDS.decode(self.report)
        return msgspec.msgpack.encode(fields | {"calls": msgspec.Raw(msgspec.msgpack.encode(calls))})


_FIELDS = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_DECODER = msgspec.msgpack.Decoder(News)


class NewsReceiver:
    """The API server's end. The socket is in Linux's abstract namespace, so it leaves no file behind."""

    def __init__(self) -> None:
        self.name = f"plait-sglang-{uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self.name}")
        self._latest: dict[int, News] = {}
        self._next: dict[int, asyncio.Future[None]] = {}
        self._reads = False

    def announce(self) -> None:
        """Put the name in the environment of the processes that this one will start."""
        os.environ[VARIABLE] = self.name

    def next(self, rank: int) -> asyncio.Future[None]:
        """A future that ends with the next news of a rank."""
        loop = asyncio.get_running_loop()
        if not self._reads:
            loop.add_reader(self._socket, self._read)
            self._reads = True
        return self._next.setdefault(rank, loop.create_future())

    def follows(self, rank: int, cursor: int, epoch: str | None) -> bool:
        """Whether the rank's latest news has all changes since this cursor, even if there are none."""
        latest = self._latest.get(rank)
        return latest is not None and latest.epoch == epoch and latest.since <= cursor <= latest.cursor

    def report_after(self, rank: int, cursor: int, epoch: str | None, gateway: str | None = None) -> bytes | None:
        """The rank's latest report, as msgpack, if `follows` holds and the report has a change for the gateway."""
        if not self.follows(rank, cursor, epoch) or not self._latest[rank].latest.are_news(cursor, gateway):
            return None
        return self._latest[rank].for_gateway(gateway)

    def close(self) -> None:
        """Close the socket. News is lost from now on."""
        if self._reads:
            asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self._take(self._socket.recv(MAX_BYTES))

    def _take(self, message: bytes) -> None:
        with suppress(msgspec.DecodeError):  # not from a scheduler
            news = _DECODER.decode(message)
            self._latest[news.rank] = news
            told = self._next.pop(news.rank, None)
            if told is not None:
                told.set_result(None)


class NewsSender:
    """A scheduler's end. Without a socket's name in the environment, it sends nothing."""

    def __init__(self, environment: Mapping[str, str] = os.environ, rank: int = 0) -> None:
        self._rank = rank
        self._socket: socket.socket | None = None
        if VARIABLE in environment:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._address = f"\0{environment[VARIABLE]}"
        self._told = deque([0], maxlen=COVERED)

    def tell(self, cursor: int, report: Report, latest: LatestChanges) -> None:
        """Send a report if the journals' `cursor` has moved since the last message. `latest` goes with it."""
        if self._socket is None or cursor == self._told[-1]:
            return
        state = report(self._told[0], None)
        encoded = msgspec.msgpack.encode(msgspec.structs.replace(state, calls=None))
        news = News(self._told[0], state.cursor, state.epoch, encoded, state.calls or [], latest, self._rank)
        self._told.append(state.cursor)
        with suppress(OSError):  # the receiver's buffer is full, or it has gone, or the message is too long
            self._socket.sendto(msgspec.msgpack.encode(news), self._address)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
