"""What is asked of the fleet: the calls so far, the lengths of answers, and the task groups that are on their way."""

from __future__ import annotations

from collections import Counter

from plait.policy.placement.traffic import Traffic
from plait.policy.types import Call


class Demand:
    """Calls by model and by task group.

    The calls of task groups have a mean output length of their own: the parts of a program are not as long as chat.
    `prior_output_tokens` is expected before calls have ended. A mean forgets over `window_s`.
    """

    def __init__(self, window_s: float, prior_output_tokens: float) -> None:
        self._window_s = window_s
        self._prior_output_tokens = prior_output_tokens
        self._nothing = Traffic(window_s, prior_output_tokens)
        self._traffic: dict[tuple[str, bool], Traffic] = {}
        self._placed: Counter[str] = Counter()
        self._groups: Counter[str] = Counter()

    def placed(self, call: Call) -> None:
        """The call is on an engine from now on."""
        self._placed[call.model] += 1
        self._enter(call)

    def refined(self, before: Call, after: Call) -> None:
        """The objectives of a call on an engine have changed: it may be in another task group."""
        self._enter(after)
        self.left(before)

    def left(self, call: Call) -> None:
        """The call is on no engine any more."""
        if call.group is not None:
            group_id = call.group.group_id
            self._groups[group_id] -= 1
            if not self._groups[group_id]:
                del self._groups[group_id]

    def answered(self, call: Call, output_tokens: int, now_s: float) -> None:
        """The call got its whole answer."""
        kind = _kind(call)
        if kind not in self._traffic:
            self._traffic[kind] = Traffic(self._window_s, self._prior_output_tokens)
        self._traffic[kind].ended(output_tokens, now_s)

    def turn(self, model: str) -> int:
        """Calls of the model that were placed so far."""
        return self._placed[model]

    def traffic(self, call: Call) -> Traffic:
        """The traffic that the call is a part of."""
        return self._traffic.get(_kind(call), self._nothing)

    def siblings(self, call: Call) -> int:
        """The other calls of its task group that still have to be placed."""
        if call.group is None:
            return 0
        return max(0, call.group.calls - 1 - self._groups[call.group.group_id])

    def _enter(self, call: Call) -> None:
        if call.group is not None:
            self._groups[call.group.group_id] += 1

    def check(self, active_calls: int) -> None:
        """Assert the invariants for a fleet with this many calls on its engines; for tests."""
        assert all(count > 0 for count in self._groups.values())
        assert self._groups.total() <= active_calls


def _kind(call: Call) -> tuple[str, bool]:
    return call.model, call.group is not None
