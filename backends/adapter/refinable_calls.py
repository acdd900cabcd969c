"""An engine's calls whose objectives may change, by the gateway's handle for them.

A change and its call come on different connections. So a change may come before its call; it is kept for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable

from plait.backends.protocol.call_annotations import EngineAnnotations
from plait.policy.scheduling.plan import LocalCall

EARLY_CHANGES = 1_024
"""At most so many changes of unknown calls are kept. A call is unknown for as long as its prompt is tokenized."""


class RefinableCalls:
    """The calls by handle. A request with several completions has one handle for several calls.

    `key` is the engine's name for a call.
    """

    def __init__(self) -> None:
        self._calls: dict[str, dict[Hashable, LocalCall]] = {}
        self._handles: dict[Hashable, str] = {}
        self._early: OrderedDict[str, EngineAnnotations] = OrderedDict()

    def received(self, key: Hashable, call: LocalCall, handle: str | None) -> None:
        """A call has arrived. It gets the objectives of a change that came before it."""
        if handle is None:
            return
        self._calls.setdefault(handle, {})[key] = call
        self._handles[key] = handle
        early = self._early.get(handle)
        if early is not None:
            _refine(call, early)

    def refine(self, changes: Iterable[EngineAnnotations]) -> int:
        """Give calls their new objectives, from the next plan on. Returns how many changes name a call that is here."""
        known = 0
        for change in changes:
            assert change.handle is not None
            calls = self._calls.get(change.handle, {})
            for call in calls.values():
                _refine(call, change)
            known += bool(calls)
            if not calls or change.handle in self._early:
                self._keep(change.handle, change)
        return known

    def ended(self, key: Hashable) -> None:
        """A call has finished or was aborted. No effect if it had ended before."""
        handle = self._handles.pop(key, None)
        if handle is not None:
            calls = self._calls[handle]
            del calls[key]
            if not calls:
                del self._calls[handle]
                self._early.pop(handle, None)

    def retain(self, present: Container[Hashable]) -> None:
        """All calls have ended except those whose keys are in `present`."""
        for key in [key for key in self._handles if key not in present]:
            self.ended(key)

    def _keep(self, handle: str, change: EngineAnnotations) -> None:
        self._early[handle] = change
        self._early.move_to_end(handle)
        if len(self._early) > EARLY_CHANGES:
            self._early.popitem(last=False)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert self._handles == {key: handle for handle, calls in self._calls.items() for key in calls}
        assert all(self._calls.values())
        assert len(self._early) <= EARLY_CHANGES


def _refine(call: LocalCall, change: EngineAnnotations) -> None:
    call.slo, call.objective = change.slo, change.objective
