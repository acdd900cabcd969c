"""What is asked of the fleet: the calls so far, the lengths of answers, and the task groups that are on their way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.situation import NOTHING_PASSED, Passed, Situation
from plait.policy.placement.traffic import NOTHING_COMES, Arrivals, Traffic
from plait.policy.prefix.prefix_tree import Segment
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
        self._arrivals: dict[str, Arrivals] = {}
        self._groups: Counter[str] = Counter()

    def placed(self, call: Call, now_s: float) -> None:
        """The call is on an engine from now on."""
        self._placed[call.model] += 1
        if call.model not in self._arrivals:
            self._arrivals[call.model] = Arrivals(now_s)
        self._arrivals[call.model].came(call.prompt_tokens, now_s)
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

    def situation(
        self,
        call: Call,
        path: Sequence[Segment],
        engines: Sequence[EngineView],
        now_s: float,
        passed: Passed = NOTHING_PASSED,
    ) -> Situation:
        """What a policy is told of the call, whose prompt matches `path`. `engines` are all that may take it."""
        arrivals = self._arrivals.get(call.model)
        return Situation(
            path,
            engines,
            self._placed[call.model],
            now_s,
            self.traffic(call),
            self.siblings(call),
            passed,
            NOTHING_COMES if arrivals is None else arrivals.coming(len(engines), now_s),
        )

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
