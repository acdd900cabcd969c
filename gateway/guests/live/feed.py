"""The live screen's record of calls: bounded, and kept only while a client watches.

In: the relay calls `placed` and `ended`. Out: `news` and `rates`, which watchers poll. The record has no texts of
prompts or answers and no keys. Of names that a client chose it has request ids and agents (`intake/agents.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from statistics import median
from time import time
from typing import Final, Literal, NamedTuple

import msgspec

from plait.backends.errors import LimitError
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.relay import Relay
from plait.gateway.fleet.booking import Booking
from plait.gateway.fleet.router import Router
from plait.gateway.timer import loop_time_s

MOST_WATCHERS: Final = 8
MOST_CALLS: Final = 200
"""The most calls in the record: those of the last seconds at any rate that a gateway can take."""

MOST_SENT: Final = 50
"""The most calls in one event: the newest."""

MOST_ID: Final = 128
"""A longer request id is cut, as in receipts."""

RATE_S: Final = 10.0
"""The time over which rates are computed."""


class CallRow(msgspec.Struct, omit_defaults=True):
    """A call as watchers see it. A later row with the same number replaces the earlier one."""

    number: int
    at: float
    """The arrival, in seconds since 1970. Other times are in seconds from the arrival."""
    model: str
    tenant: str
    prompt_tokens: int
    state: Literal["running", "ended"] = "running"
    engine: str | None = None
    reason: str | None = None
    prefix: str | None = None
    """The hot prefix with which the prompt begins."""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    waited_s: float | None = None
    waited_for: str | None = None
    """The reason of its longest wait."""
    ttft_s: float | None = None
    e2e_s: float | None = None
    status: int | None = None
    outcome: str | None = None
    agent: str = ""
    parent_agent: str = ""
    id: str = ""
    """The request id, by which the call's receipt is found; empty: no receipts are kept."""
    program: str = ""
    """The call's program (`Slot.program`), and the calls that made its inputs."""
    made_by: tuple[str, ...] = ()


class CallNews(msgspec.Struct):
    """The event `calls`: the newest calls that were placed or have ended, and how many ended ones are left out."""

    calls: list[CallRow]
    left_out: int


@dataclass(slots=True)
class Watcher:
    """A reader's position: the number of the latest change, and of ended calls."""

    changes: int = 0
    ended: int = 0


class _Totals(NamedTuple):
    at_s: float
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of the last seconds. `hit_rate` and `ttft_s` (the median) are None without answers."""

    calls_per_s: float
    output_tokens_per_s: float
    hit_rate: float | None
    ttft_s: float | None


class Feed:
    """The record of the calls of `relay`. `label` returns a tenant's label for operators.

    `prefixes` are the ids of the hot prefixes by their last block: a call gets the longest with which its prompt
    begins. `recent` has the first blocks of the latest prompts.
    """

    def __init__(
        self, router: Router, relay: Relay, label: Callable[[str], str], *, keeps_receipts: bool = True
    ) -> None:
        self.label = label
        self.keeps_receipts = keeps_receipts
        self.watchers = 0
        self.prefixes: dict[int, str] = {}
        self.recent: deque[int] = deque(maxlen=64)
        self._router = router
        self._relay = relay
        self._clear(0.0)

    def _clear(self, now_s: float) -> None:
        self._rows: dict[int, tuple[int, CallRow]] = {}  # by number: the latest change, and the row; oldest first
        self._open: dict[Delivery, CallRow] = {}
        self._changes = self._numbers = 0
        self._totals = _Totals(now_s)
        self._history: deque[_Totals] = deque([self._totals], maxlen=64)
        self.recent.clear()

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        """A watcher for the duration of the context. Raises `LimitError` beyond `MOST_WATCHERS`."""
        if self.watchers >= MOST_WATCHERS:
            raise LimitError(f"{MOST_WATCHERS} clients watch already.", code="too_many_watchers")
        self.watchers += 1
        if self.watchers == 1:
            self._clear(loop_time_s())
            self._relay.holdings.watch = self
        try:
            yield Watcher(0, self._totals.calls)
        finally:
            self.watchers -= 1
            if not self.watchers:
                self._relay.holdings.watch = None
                self._clear(0.0)

    # Events of the relay: `ended` for every call, `placed` once for each attempt.

    def placed(self, delivery: Delivery) -> None:
        assert delivery.attempt is not None
        booking = delivery.attempt.booking
        row, hashes = self._row_of(delivery), delivery.call.block_hashes
        row.state = "running"
        _place(row, delivery, booking)
        if hashes:
            self.recent.append(hashes[0])
        on_path = (self.prefixes.get(node.hashes[-1]) for node in booking.leaf.path())
        row.prefix = next(filter(None, on_path), None)
        self._changed(row)

    def ended(self, delivery: Delivery) -> None:
        row, attempt, ending, usage = self._row_of(delivery), delivery.attempt, delivery.ending, delivery.usage
        assert ending is not None
        now_s = ending.ended_s
        del self._open[delivery]
        row.state, row.status, row.outcome = "ended", ending.status, ending.outcome
        row.e2e_s = round(now_s - delivery.arrived_s, 4)
        waits = delivery.waited_for()
        if attempt is not None:
            booking = attempt.booking
            _place(row, delivery, booking)  # the record may have begun after the call was placed
            first_s = booking.first_token_s
            row.ttft_s = None if first_s is None else round(first_s - delivery.arrived_s, 4)
            if usage is not None:
                row.output_tokens = usage.output_tokens
                row.cached_tokens = row.cached_tokens if usage.cached_tokens is None else usage.cached_tokens
        if waits is not None:
            row.waited_s, row.waited_for = round(sum(waits.values()), 4), max(waits, key=waits.__getitem__)
        self._count(row, now_s)
        self._changed(row)

    def _row_of(self, delivery: Delivery) -> CallRow:
        row = self._open.get(delivery)
        if row is None:
            self._numbers += 1
            call = delivery.call
            model = call.model if call.model in self._router.models.names else ""  # an unknown name is a client's text
            at = time() - (loop_time_s() - delivery.arrived_s)
            row = CallRow(self._numbers, round(at, 3), model, self.label(delivery.asked.tenant), call.prompt_tokens)
            row.agent, row.parent_agent = delivery.asked.agent.name, delivery.asked.agent.parent
            if self.keeps_receipts:
                slot = delivery.asked.slot
                row.id, row.program = call.call_id[:MOST_ID], slot.program
                row.made_by = tuple([made_by[:MOST_ID] for made_by in slot.made_by])
            self._open[delivery] = row
        return row

    def _changed(self, row: CallRow) -> None:
        self._changes += 1
        self._rows.pop(row.number, None)
        self._rows[row.number] = (self._changes, row)
        if len(self._rows) > MOST_CALLS:
            del self._rows[next(iter(self._rows))]

    def _count(self, row: CallRow, now_s: float) -> None:
        answered = row.outcome == "ok"
        last = self._totals
        self._totals = _Totals(
            now_s,
            last.calls + 1,
            last.prompt_tokens + answered * row.prompt_tokens,
            last.cached_tokens + answered * min(row.cached_tokens or 0, row.prompt_tokens),
            last.output_tokens + (row.output_tokens or 0),
        )

    # What watchers read.

    def news(self, watcher: Watcher) -> CallNews:
        """The changes since the watcher's last call of this method; a slow watcher gets only the newest."""
        changed = [row for change, row in reversed(self._rows.values()) if change > watcher.changes]
        sent = list(islice(changed, MOST_SENT))[::-1]
        ended = self._totals.calls - watcher.ended
        left_out = max(0, ended - sum(row.state == "ended" for row in sent))
        watcher.changes, watcher.ended = self._changes, self._totals.calls
        return CallNews(sent, left_out)

    def rates(self, now_s: float) -> Rates:
        """The rates of the last `RATE_S`, or since watching began. Read them about twice a second."""
        while len(self._history) > 1 and self._history[1].at_s <= now_s - RATE_S:
            self._history.popleft()
        first, last = self._history[0], self._totals
        self._history.append(last._replace(at_s=now_s))
        seconds = max(1.0, now_s - first.at_s)
        prompt_tokens = last.prompt_tokens - first.prompt_tokens
        times = [row.ttft_s for _, row in self._rows.values() if row.ttft_s is not None]
        return Rates(
            (last.calls - first.calls) / seconds,
            (last.output_tokens - first.output_tokens) / seconds,
            (last.cached_tokens - first.cached_tokens) / prompt_tokens if prompt_tokens else None,
            median(times) if times else None,
        )


def _place(row: CallRow, delivery: Delivery, booking: Booking) -> None:
    placement = booking.placement
    row.engine, row.reason, row.cached_tokens = placement.engine_id, str(placement.reason), placement.cached_tokens
    row.waited_s = max(0.0, round(booking.sent_s - delivery.arrived_s, 4))
