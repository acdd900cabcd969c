"""The engine's calls in its cache-state report, for gateways that share the engine.

The driver calls `arrived`, `computed` (at the first token) and `ended`. Each of them counts as a change on the cursor
of the cache's journal, so one cursor is enough for a report. A gateway gets the changes of other gateways' calls since
its cursor. A call without a gateway's id is not reported: its own gateway would take it for another's.
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
"""How many ended calls are remembered: those of 16 s at 1,000 calls a second. A poll waits 1 s by default."""

MAX_HASHES = 4_096
"""How many of a prompt's tree blocks are reported at most: the first ones."""


class LatestChanges(msgspec.Struct, frozen=True, array_like=True):
    """Cursors of the latest changes, which tell each gateway whether a report would have anything but its own calls."""

    blocks: int
    """The latest change of a block."""
    calls: int = 0
    """The latest change of a call."""
    by: str = ""
    """The gateway that sent this call."""
    before: int = 0
    """The latest change of a call from any other gateway."""

    def are_news(self, cursor: int, asking: str | None) -> bool:
        """Whether a report since a cursor (see `CacheJournal.remembers`) has a change for the gateway `asking`."""
        return max(self.blocks, self.before if self.by == asking else self.calls) > cursor


@dataclass(slots=True)
class _Here:
    """A call in the engine, last changed at `cursor`.

    `find` hashes the prompt into tree blocks, once another gateway asks; the result is kept as `hashes`.
    """

    number: int
    gateway: str
    prompt_tokens: int
    is_urgent: bool
    find: Callable[[], Sequence[int]]
    cursor: int
    is_line: bool
    is_computed: bool = False
    hashes: Sequence[int] | None = None


class CallsJournal:
    """The engine's calls in the order of their last change, so that a delta is the tail of that order.

    Blocks of the `lower` tiers count as cached, since the engine loads them. `key` is the engine's name for a call.
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
        is_line: bool = False,
    ) -> None:
        """A call has arrived. `hashes` finds its prompt's tree blocks, if the call is reported."""
        if not gateway:
            return
        cursor = self._changed(gateway)
        self._here[key] = _Here(next(self._numbers), gateway, prompt_tokens, is_urgent, hashes, cursor, is_line)

    def computed(self, key: Hashable) -> None:
        """A call has its first token. No effect if it had one before, or has ended."""
        call = self._here.get(key)
        if call is not None and not call.is_computed:
            call.is_computed, call.cursor = True, self._changed(call.gateway)
            call.find, call.hashes = tuple, None  # its blocks are reported as cached now; `find` may keep a request
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
        """Whether a report since a cursor would have a change for the gateway `asking`."""
        return not self._cache.remembers(cursor) or self.latest.are_news(cursor, asking)

    def since(self, cursor: int | None, asking: str | None) -> tuple[list[OutstandingCall], list[int]]:
        """The calls that arrived or got a first token since a cursor, and the numbers of those that ended.

        `cursor` is one that the cache remembers, or None for all calls and no ends. The calls of the gateway `asking`
        are left out.
        """
        if cursor is None:
            return [self._reported(call) for call in self._here.values() if call.gateway != asking], []
        changed = takewhile(lambda call: call.cursor > cursor, reversed(self._here.values()))
        calls = [self._reported(call) for call in changed if call.gateway != asking]
        return calls[::-1], list(self._ended_since(cursor, asking))

    def _changed(self, gateway: str) -> int:
        """Count a change of a gateway's call. Returns the new cursor."""
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
            return OutstandingCall(
                call.number, call.gateway, call.prompt_tokens, 0, call.is_urgent, True, [], call.is_line
            )
        hashes, tiers = call.hashes, self._tiers
        if hashes is None:
            hashes = call.hashes = call.find()[: min(call.prompt_tokens // self._block_tokens, MAX_HASHES)]
        missed = (place for place, block in enumerate(hashes) if not any(block in tier for tier in tiers))
        held = next(missed, len(hashes))
        missed_tokens = max(1, call.prompt_tokens - held * self._block_tokens)
        return OutstandingCall(
            call.number, call.gateway, call.prompt_tokens, missed_tokens, call.is_urgent, False, list(hashes),
            call.is_line,
        )  # fmt: skip
