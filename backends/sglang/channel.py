"""The channel between SGLang's API server and a scheduler: questions, and news without a question.

A question is in the id of a request for the scheduler's internal state. That request has no other free field. A
scheduler without the plugin answers with its internal state as usual. With the plugin, it answers only with what was
asked for, under `STATE_KEY`. So the answer also proves that the plugin is active. All tensor-parallel ranks get the
request.

News is a change of the scheduler's cache or of its calls. A busy scheduler answers a question only after the next step.
By then, the client of an answer that has ended may have sent its next call, which would be placed by an old report. So
when its journals have changed, the scheduler sends its report: between steps, and before a batch runs, whose prompts
may have evicted blocks. The message is a datagram, so the scheduler never waits. It may be lost, so the API server also
asks when there has been no news for a while. The API server makes the socket and puts its name in the environment,
before it starts the schedulers.

A report sent covers the last steps, not only the last one: it has news for everyone who knows one of them. Applied
again, changes change nothing. It is for all gateways. The API server leaves out a gateway's own calls, and keeps it
waiting while only these change.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from plait.backends.adapter.calls_journal import LatestChanges
from plait.backends.protocol.cache_state import CacheState, OutstandingCall

PREFIX: Final = "plait "
STATE_KEY: Final = "plait"


class ReportSince(msgspec.Struct, frozen=True, tag="report"):
    """Asks for the cache-state report as msgpack, since the cursor and epoch of the latest known one, for a gateway."""

    since: int | None = None
    epoch: str | None = None
    gateway: str | None = None


class ChangeObjectives(msgspec.Struct, frozen=True, tag="objectives"):
    """Changes objectives of calls, by a valid body of `POST /call_objectives`. Asks how many calls are known."""

    body: str


SchedulerQuery = ReportSince | ChangeObjectives


def query_id(query: SchedulerQuery) -> str:
    return PREFIX + msgspec.json.encode(query).decode()


def parse_query(request_id: str | None) -> SchedulerQuery | None:
    """The query in a request id; None for any other id."""
    if request_id is None or not request_id.startswith(PREFIX):
        return None
    query: SchedulerQuery = msgspec.json.decode(request_id.removeprefix(PREFIX), type=SchedulerQuery)
    return query


VARIABLE: Final = "PLAIT_SGLANG_NEWS"

COVERED: Final = 16
"""A message has the changes since this many messages before. Gateways ask anew after 20 ms: one step, or a few. A step
has two messages at most.
"""

MAX_BYTES: Final = 2**18
"""Of a message. Linux takes 200 KB."""


Report = Callable[[int, str | None], CacheState]
"""Makes the report since a cursor of an epoch, for None the current one."""


class News(msgspec.Struct, frozen=True, array_like=True):
    """The report at one time, as msgpack, with the changes after the cursor `since` up to `cursor`.

    Its calls are apart: they are not for everyone. `latest` says whose calls have changed.
    """

    since: int
    cursor: int
    epoch: str
    report: bytes
    calls: list[OutstandingCall]
    latest: LatestChanges

    def for_gateway(self, gateway: str | None) -> bytes:
        """The report, as msgpack, without this gateway's calls."""
        calls = [call for call in self.calls if call.gateway != gateway]
        fields = _FIELDS.decode(self.report)
        return msgspec.msgpack.encode(fields | {"calls": msgspec.Raw(msgspec.msgpack.encode(calls))})


_FIELDS = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_DECODER = msgspec.msgpack.Decoder(News)


class NewsReceiver:
    """The API server's end. Its socket is in Linux's abstract namespace: it leaves no file behind."""

    def __init__(self) -> None:
        self.name = f"plait-sglang-{uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self.name}")
        self._latest: News | None = None
        self._next = asyncio.Event()
        self._reads = False

    def announce(self) -> None:
        """Put the name in the environment of the processes that this one will start."""
        os.environ[VARIABLE] = self.name

    def next(self) -> asyncio.Event:
        """An event that is set by the next news."""
        if not self._reads:
            asyncio.get_running_loop().add_reader(self._socket, self._read)
            self._reads = True
        return self._next

    def follows(self, cursor: int, epoch: str | None) -> bool:
        """Whether the latest news has what is new to one who knows the report with this cursor, be it nothing."""
        latest = self._latest
        return latest is not None and latest.epoch == epoch and latest.since <= cursor <= latest.cursor

    def report_after(self, cursor: int, epoch: str | None, gateway: str | None = None) -> bytes | None:
        """The latest report, as msgpack, if it has news for the gateway that knows the report with this cursor."""
        latest = self._latest
        if latest is None or not self.follows(cursor, epoch) or not latest.latest.are_news(cursor, gateway):
            return None
        return latest.for_gateway(gateway)

    def close(self) -> None:
        """Close the socket. News is lost from now on."""
        if self._reads:
            asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _read(self) -> None:
        message = b""
        with suppress(BlockingIOError):
            while True:
                message = self._socket.recv(MAX_BYTES)
        with suppress(msgspec.DecodeError):  # not from a scheduler
            self._latest = _DECODER.decode(message)
            told, self._next = self._next, asyncio.Event()
            told.set()


class NewsSender:
    """A scheduler's end. Without a name in the environment it tells nobody."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._socket: socket.socket | None = None
        if VARIABLE in environment:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._address = f"\0{environment[VARIABLE]}"
        self._told = deque([0], maxlen=COVERED)

    def tell(self, cursor: int, report: Report, latest: LatestChanges) -> None:
        """Tell what `report` says since a cursor, if the `cursor` of the journals has changed; `latest`: by what."""
        if self._socket is None or cursor == self._told[-1]:
            return
        state = report(self._told[0], None)
        encoded = msgspec.msgpack.encode(msgspec.structs.replace(state, calls=None))
        news = News(self._told[0], state.cursor, state.epoch, encoded, state.calls or [], latest)
        self._told.append(state.cursor)
        with suppress(OSError):  # the receiver has much unread news or has gone, or the message is too long
            self._socket.sendto(msgspec.msgpack.encode(news), self._address)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
