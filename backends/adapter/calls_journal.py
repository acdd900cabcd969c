"""The engine's side of the calls in the cache-state report: those that it has, and the changes since a cursor.

Only calls that say which gateway has sent them are reported: a gateway could not tell others from its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

import msgspec

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.protocol.cache_state import OutstandingCall

MAX_ENDED = 16_384
"""So many ends are remembered: at 1,000 calls a second those of the last 16 s, and a poll is at most as long."""

MAX_HASHES = 4_096
"""Of a longer prompt the first blocks are reported."""


class LatestChanges(msgspec.Struct, frozen=True, array_like=True):
    """The cursors of the latest changes: of blocks, of the calls `by` one gateway, and before of any other's calls."""

    blocks: int
    calls: int = 0
    by: str = ""
    before: int = 0

    def are_news(self, cursor: int, asking: str | None) -> bool:
        """Whether a report since a cursor that is remembered would say anything to the gateway that is `asking`."""
        return max(self.blocks, self.before if self.by == asking else self.calls) > cursor


@dataclass(slots=True)
class _Here:
    """A call that is in the engine. Its tree blocks are `find`ed when it is first reported."""

    number: int
    gateway: str
    prompt_tokens: int
    is_urgent: bool
    find: Callable[[], Sequence[int]]
    cursor: int
    is_computed: bool = False
    hashes: Sequence[int] | None = None


class CallsJournal:
    """The engine's calls in the order of their last change, so that a delta is the tail of that order.

    It counts its changes on the cursor of `cache`, so one cursor is enough for a report. The blocks of `lower` tiers
    need not be computed either. `key` is the engine's name for a call.
    """

    def __init__(self, cache: CacheJournal, block_tokens: int, lower: Sequence[Container[int]] = ()) -> None:
        self._cache = cache
        self._tiers = cache.stored, *lower
        self._block_tokens = block_tokens
        self._here: OrderedDict[Hashable, _Here] = OrderedDict()
        self._numbers = count(1)
        self._ended: OrderedDict[int, tuple[int, str]] = OrderedDict()
        self._latest = self._before = 0
        self._by = ""

    def __len__(self) -> int:
        return len(self._here)

    def arrived(
        self,
        key: Hashable,
        gateway: str | None,
        prompt_tokens: int,
        hashes: Callable[[], Sequence[int]],
        *,
        is_urgent: bool,
    ) -> None:
        """A call has arrived. `hashes` are asked for when it is reported. One without a gateway is not reported."""
        if not gateway:
            return
        cursor = self._changed(gateway)
        self._here[key] = _Here(next(self._numbers), gateway, prompt_tokens, is_urgent, hashes, cursor)

    def computed(self, key: Hashable) -> None:
        """A call has its first token. No effect if it had it before, or has ended."""
        call = self._here.get(key)
        if call is not None and not call.is_computed:
            call.is_computed, call.cursor = True, self._changed(call.gateway)
            call.find, call.hashes = tuple, None
            self._here.move_to_end(key)

    def ended(self, key: Hashable) -> None:
        """A call has finished or was aborted. No effect if it had ended before."""
        call = self._here.pop(key, None)
        if call is None:
            return
        self._ended[call.number] = self._changed(call.gateway), call.gateway
        if len(self._ended) > MAX_ENDED:
            self._cache.forget_until(self._ended.popitem(last=False)[1][0])

    def retain(self, present: Container[Hashable]) -> None:
        """All calls have ended except those whose keys are in `present`."""
        for key in [key for key in self._here if key not in present]:
            self.ended(key)

    @property
    def latest(self) -> LatestChanges:
        return LatestChanges(self._cache.changed_at, self._latest, self._by, self._before)

    def has_news(self, cursor: int, asking: str | None) -> bool:
        """Whether a report since a cursor would say anything to the gateway that is `asking`."""
        return not self._cache.remembers(cursor) or self.latest.are_news(cursor, asking)

    def since(self, cursor: int | None, asking: str | None) -> tuple[list[OutstandingCall], list[int]]:
        """The calls that came or were computed since a cursor that is remembered, and the numbers of those that ended.

        None: all calls, and no ends. A gateway that is `asking` knows its own calls.
        """
        if cursor is None:
            return [self._reported(call) for call in self._here.values() if call.gateway != asking], []
        changed = takewhile(lambda call: call.cursor > cursor, reversed(self._here.values()))
        calls = [self._reported(call) for call in changed if call.gateway != asking]
        return calls[::-1], list(self._ended_since(cursor, asking))

    def _changed(self, gateway: str) -> int:
        """A gateway's call has changed. Returns the new cursor."""
        if gateway != self._by:
            self._before, self._by = self._latest, gateway
        self._latest = self._cache.advance()
        return self._latest

    def _ended_since(self, cursor: int, asking: str | None) -> Iterator[int]:
        """The latest first."""
        for number, (at, gateway) in reversed(self._ended.items()):
            if at <= cursor:
                return
            if gateway != asking:
                yield number

    def _reported(self, call: _Here) -> OutstandingCall:
        if call.is_computed:
            return OutstandingCall(call.number, call.gateway, call.prompt_tokens, 0, call.is_urgent, True, [])
        hashes, tiers = call.hashes, self._tiers
        if hashes is None:
            hashes = call.hashes = call.find()[: min(call.prompt_tokens // self._block_tokens, MAX_HASHES)]
        missed = (place for place, block in enumerate(hashes) if not any(block in tier for tier in tiers))
        held = next(missed, len(hashes))
        missed_tokens = max(1, call.prompt_tokens - held * self._block_tokens)
        return OutstandingCall(
            call.number, call.gateway, call.prompt_tokens, missed_tokens, call.is_urgent, False, list(hashes)
        )
