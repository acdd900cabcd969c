"""The store of responses that clients continue by `previous_response_id`: an LRU cache for each tenant.

A response is stored with its own input only and a link to the response before it, so memory is linear in the length of
a conversation, not quadratic. A response is dropped when it has not been used for the time to live, or when its tenant
exceeds its bytes. Synchronous: each method gets the time as an argument. With a log, responses outlive the process.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
import structlog
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from plait.backends.errors import CallerError, NotFoundError, PlaitError
from plait.gateway.ids import RESPONSE_ID
from plait.gateway.intake.turns import Pieces
from plait.gateway.streams import RESPONSE, Change, StoredStream, StreamKey

Item = dict[str, Any]

T = TypeVar("T")

SHOWN = 80
"""Characters of an id in messages."""

FAILED_BYTES = 1_000
"""The size of a failed response without output, besides its request."""

USES = 16
"""A use is logged at most this often in a time to live, so that reads write little."""


log = structlog.get_logger(__name__)


class ResponseLog(Protocol):
    """The log of responses (`gateway/guests/durability`)."""

    def check(self, *, is_whole: bool = False) -> None:
        """Raise `PlaitError` while the log is being read; with `is_whole`, also while what was read is restored."""

    def make(self, tenant: str, response_id: str) -> None:
        """Restore a response now, if it was read and not restored yet."""

    def append(self, changes: Sequence[Change]) -> None:
        """Append in order. Returns at once; the commit follows."""

    async def committed(self, stream: StreamKey) -> bool:
        """Wait until all that was appended is stored. False if it cannot be. Raises `PlaitError` in a shared store."""

    def together(self) -> AbstractContextManager[None]:
        """Make one batch of what is appended in the block: all of it is stored or nothing."""

    def unix_s(self, now_s: float) -> float: ...


@dataclass(slots=True)
class StoredResponse:
    """One response. `items` is its own input, `answer` the response object, both JSON. Times are in seconds."""

    previous: str | None
    items: bytes
    answer: bytes
    used_s: float
    written_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        """What counts against the tenant's limit."""
        return len(self.items) + len(self.answer)


class _Kept(msgspec.Struct, frozen=True, array_like=True, tag="response"):
    previous: str | None
    items: bytes
    answer: bytes


class _Used(msgspec.Struct, frozen=True, array_like=True, tag="used"):
    pass


_WRITTEN: msgspec.msgpack.Decoder[_Kept | _Used] = msgspec.msgpack.Decoder(_Kept | _Used)


class _Output(msgspec.Struct):
    output: list[Item] = []


class _NamedItem(msgspec.Struct, gc=False):
    id: Any = None


class _ItemNames(msgspec.Struct):
    output: list[_NamedItem] = []


_NAMES: msgspec.json.Decoder[_ItemNames] = msgspec.json.Decoder(_ItemNames)


@dataclass(slots=True)
class _Tenant:
    responses: dict[str, StoredResponse] = field(default_factory=dict)
    size_bytes: int = 0

    by_use: list[tuple[float, str]] = field(default_factory=list)
    """A heap of times of use and ids. An entry may be old: it is set right when it comes first."""

    items: dict[str, str] = field(default_factory=dict)
    """The id of an output item -> the id of its response."""


class StoredResponses:
    """The stored responses of all tenants: at most `max_bytes` a tenant, each for `ttl_s` after its last use."""

    def __init__(self, max_bytes: int, ttl_s: float, log: ResponseLog | None = None) -> None:
        self.unnamed = 0
        """Responses that were not stored, because their engine gave them no valid id."""
        self._log = log
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._tenants: defaultdict[str, _Tenant] = defaultdict(_Tenant)

    @property
    def stores(self) -> bool:
        return self._max_bytes > 0

    def size_bytes(self, tenant: str) -> int:
        return self._tenants[tenant].size_bytes if tenant in self._tenants else 0

    def check_background(self, request: bytes) -> None:
        """Raise `CallerError` if no response to this request could be stored for its client, not even a failed one."""
        if len(request) + FAILED_BYTES > self._max_bytes:
            raise CallerError(
                f"A response in the background is stored, and this gateway stores at most {self._max_bytes} bytes of a "
                "key's responses, less than one to this request may have. Leave 'background' out.",
                param="background",
            )

    def put(
        self, tenant: str, response_id: str, *, previous: str | None, items: bytes, answer: bytes, now_s: float
    ) -> bool:
        """Store a response. Returns False, and stores nothing, if it is larger than the tenant's limit."""
        if self.has(tenant, response_id):
            self._drop(tenant, response_id)
        stored = StoredResponse(previous, items, answer, now_s, now_s)
        fits = stored.size_bytes <= self._max_bytes
        if fits:
            self._keep(tenant, response_id, stored)
            self._write(tenant, response_id, _Kept(previous, items, answer), now_s)
        self._trim(tenant, now_s)
        return fits

    def leave_out(self, given: object) -> None:
        """Count a response that is not stored, because `given` is no valid id."""
        self.unnamed += 1
        log.warning(
            "response not stored: its engine gave it no id", given=repr(given)[:SHOWN], expected=RESPONSE_ID.rule
        )

    def clear(self) -> None:
        """Forget all: another gateway owns them now."""
        self._tenants.clear()

    def has(self, tenant: str, response_id: str) -> bool:
        if self._log is not None:
            self._log.make(tenant, response_id)
        return tenant in self._tenants and response_id in self._tenants[tenant].responses

    def stream(self, tenant: str, response_id: str) -> StreamKey:
        return StreamKey(RESPONSE, tenant, response_id)

    async def once_stored(
        self, tenant: str, response_id: str, answer: T, unstored: Callable[[T], T], *, in_background: bool = False
    ) -> T:
        """Wait for the commit of a response or its deletion. Returns `answer`, or `unstored(answer)` if storing fails.

        A response never changes, so a client may get it while the store is out of reach. A response generated
        `in_background` is different: until it is stored, another gateway may generate it again. So the store's
        `PlaitError` is raised.
        """
        try:
            is_stored = self._log is None or await self._log.committed(self.stream(tenant, response_id))
        except PlaitError:
            if in_background:
                raise
            is_stored = False
        return answer if is_stored else unstored(answer)

    def together(self) -> AbstractContextManager[None]:
        """Make one batch of what is written in the block: all of it is stored or nothing."""
        return nullcontext() if self._log is None else self._log.together()

    def restore(self, stream: StoredStream, offset_s: float, now_s: float) -> None:
        """Take over a response from the log. Its times are Unix times: `offset_s` later than those of this clock."""
        first = _WRITTEN.decode(stream.events[0].data or b"")
        if isinstance(first, _Kept):
            used_s = stream.events[-1].at_unix_s - offset_s
            _, tenant, response_id = stream.key
            if tenant in self._tenants and response_id in self._tenants[tenant].responses:
                return  # a recovery that began again has restored it before
            self._keep(tenant, response_id, StoredResponse(first.previous, first.items, first.answer, used_s, used_s))
            self._trim(tenant, now_s)

    def get(self, tenant: str, response_id: str, now_s: float) -> StoredResponse:
        """A response. Counts as a use. Raises `NotFoundError`."""
        if self._log is not None:
            self._log.check()
            self._log.make(tenant, response_id)
        self._trim(tenant, now_s)
        stored = self._tenants[tenant].responses.get(response_id) if tenant in self._tenants else None
        if stored is None:
            raise NotFoundError(f"There is no response '{response_id[:SHOWN]}', or not any more.", param="response_id")
        stored.used_s = now_s
        if now_s - stored.written_s > self._ttl_s / USES:
            stored.written_s = now_s
            self._write(tenant, response_id, _Used(), now_s)
        return stored

    def items(
        self, tenant: str, item_ids: Collection[str], hold: Callable[[int], object], now_s: float
    ) -> Pieces[dict[str, Item]]:
        """The items of stored responses' outputs that have these ids. Each response is held, and decoded once."""
        of_tenant = self._tenants[tenant].items if tenant in self._tenants else {}
        if self._log is not None and not all(item_id in of_tenant for item_id in item_ids):
            self._log.check(is_whole=True)  # what is not restored yet may have it
        found: dict[str, Item] = {}
        for response_id in dict.fromkeys(of_tenant[item_id] for item_id in item_ids if item_id in of_tenant):
            with suppress(NotFoundError):  # an earlier `get` of this loop may have dropped it as expired
                answer = self.get(tenant, response_id, now_s).answer
                hold(len(answer))
                output = msgspec.json.decode(answer, type=_Output).output
                found |= {item["id"]: item for item in output if item.get("id") in item_ids}
            yield
        return found

    def delete(self, tenant: str, response_id: str, now_s: float) -> None:
        """Forget a response. Raises `NotFoundError`."""
        self.get(tenant, response_id, now_s)
        self._drop(tenant, response_id)

    def said_before(
        self, tenant: str, response_id: str, hold: Callable[[int], object], now_s: float
    ) -> Pieces[list[Item]]:
        """All inputs and outputs up to a response, the oldest first. Counts as a use of each response.

        `hold` is called with the bytes of each before any is decoded, and may raise an error. Raises `CallerError` if
        one of them is not stored.
        """
        chain: dict[str, StoredResponse] = {}
        wanted: str | None = response_id
        while wanted is not None and wanted not in chain:  # engines choose the ids, so the links may have a cycle
            try:
                stored = chain[wanted] = self.get(tenant, wanted, now_s)
            except NotFoundError:
                continues = "" if wanted == response_id else f", which '{response_id[:SHOWN]}' continues,"
                raise CallerError(
                    f"Previous response with id '{wanted[:SHOWN]}'{continues} not found: it was not stored, or is not "
                    "any more.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                ) from None
            hold(stored.size_bytes)
            wanted = stored.previous
            yield
        said: list[Item] = []
        for stored in reversed(chain.values()):
            said += msgspec.json.decode(stored.items, type=list[Item])
            yield
            said += msgspec.json.decode(stored.answer, type=_Output).output
            yield
        return said

    def _trim(self, tenant: str, now_s: float) -> None:
        """Drop expired responses, and the least recently used ones above the tenant's limit."""
        kept = self._tenants.get(tenant)
        if kept is None:
            return
        while kept.responses:
            used_s, response_id = kept.by_use[0]
            first = kept.responses.get(response_id)
            if first is None:
                heapq.heappop(kept.by_use)
            elif first.used_s > used_s:
                heapq.heapreplace(kept.by_use, (first.used_s, response_id))
            elif kept.size_bytes <= self._max_bytes and now_s - used_s <= self._ttl_s:
                return
            else:
                self._drop(tenant, response_id)
        del self._tenants[tenant]

    def _keep(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        kept = self._tenants[tenant]
        kept.responses[response_id] = stored
        heapq.heappush(kept.by_use, (stored.used_s, response_id))
        kept.size_bytes += stored.size_bytes
        kept.items |= dict.fromkeys(_item_ids(stored), response_id)

    def _drop(self, tenant: str, response_id: str) -> None:
        kept = self._tenants[tenant]
        dropped = kept.responses.pop(response_id)
        kept.size_bytes -= dropped.size_bytes
        for item_id in _item_ids(dropped):
            if kept.items.get(item_id) == response_id:  # engines choose the ids, so two items may share one
                del kept.items[item_id]
        if len(kept.by_use) > 2 * len(kept.responses) + 64:
            kept.by_use = [(stored.used_s, name) for name, stored in kept.responses.items()]
            heapq.heapify(kept.by_use)
        if self._log is not None:
            self._log.append([Change(StreamKey(RESPONSE, tenant, response_id), 0.0, None)])

    def _write(self, tenant: str, response_id: str, event: _Kept | _Used, now_s: float) -> None:
        if self._log is not None:
            stream, data = StreamKey(RESPONSE, tenant, response_id), msgspec.msgpack.encode(event)
            self._log.append([Change(stream, self._log.unix_s(now_s), data)])


def _item_ids(stored: StoredResponse) -> list[str]:
    """The ids of the output's items. Engines may write anything, so an invalid output has none."""
    try:
        return [item.id for item in _NAMES.decode(stored.answer).output if isinstance(item.id, str)]
    except msgspec.DecodeError:
        return []


class ResponsesCollector(Collector):
    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored

    def collect(self) -> Iterator[Metric]:
        what = "Responses that were not stored, because their engine gave them no id of the form"
        yield CounterMetricFamily("plait_unnamed_responses", what, self._stored.unnamed)
