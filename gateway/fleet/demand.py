"""What is asked of the fleet: calls by model and by task group, the lengths of their answers, and retries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.situation import NOTHING_COMES, NOTHING_PASSED, Arrivals, Passed, Situation, Traffic
from plait.policy.prefix.prefix_tree import Segment
from plait.policy.types import Call, TaskGroup

ACTIVE_SHARE = 0.2
LEAST_RETRIES = 3
"""Envoy's defaults. Envoy keeps a retry budget for each cluster, which is a model here."""


class Demand:
    """Calls by model and by task group.

    The calls of task groups have a mean output length of their own: the parts of a program are not as long as chat.
    `prior_output_tokens` is expected before calls have ended. A mean forgets over `window_s`. `active` counts the calls
    of each model that are on engines.
    """

    def __init__(self, window_s: float, prior_output_tokens: float) -> None:
        self._window_s = window_s
        self._prior_output_tokens = prior_output_tokens
        self._nothing = Traffic(window_s, prior_output_tokens)
        self._traffic: dict[tuple[str, bool], Traffic] = {}
        self._placed: Counter[str] = Counter()
        self._arrivals: dict[str, Arrivals] = {}
        self._groups: Counter[str] = Counter()
        self.active: Counter[str] = Counter()

    def placed(self, call: Call, now_s: float) -> None:
        """The call is on an engine from now on."""
        self._placed[call.model] += 1
        self.active[call.model] += 1
        arrivals = self._arrivals.get(call.model)
        if arrivals is None:
            arrivals = self._arrivals[call.model] = Arrivals(now_s)
        arrivals.came(call.prompt_tokens, now_s)
        if call.group is not None:
            self._groups[call.group.group_id] += 1

    def others_came(self, models: Iterable[str], prompt_tokens: int, now_s: float) -> None:
        """A call came to an engine of these models from elsewhere. It may be of any that is called here."""
        for model in self._arrivals.keys() & models:
            self._arrivals[model].came(prompt_tokens, now_s)

    def refined(self, before: Call, after: Call) -> None:
        """The objectives of a call on an engine have changed: it may be in another task group."""
        if after.group is not None:
            self._groups[after.group.group_id] += 1
        if before.group is not None:
            self._leave_group(before.group.group_id)

    def left(self, call: Call) -> None:
        """The call is on no engine any more."""
        self.active[call.model] -= 1
        if call.group is not None:
            self._leave_group(call.group.group_id)

    def answered(self, call: Call, output_tokens: int, now_s: float) -> None:
        """The call got its whole answer."""
        kind = call.model, call.group is not None
        traffic = self._traffic.get(kind)
        if traffic is None:
            traffic = self._traffic[kind] = Traffic(self._window_s, self._prior_output_tokens)
        traffic.ended(output_tokens, now_s)

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
            self._traffic.get((call.model, call.group is not None), self._nothing),
            0 if call.group is None else self.siblings(call.group),
            passed,
            NOTHING_COMES if arrivals is None else arrivals.coming(len(engines), now_s),
        )

    def siblings(self, group: TaskGroup) -> int:
        """How many other calls of a call's task group still have to be placed."""
        return max(0, group.calls - 1 - self._groups[group.group_id])

    def _leave_group(self, group_id: str) -> None:
        self._groups[group_id] -= 1
        if not self._groups[group_id]:
            del self._groups[group_id]

    def check(self, active_calls: int) -> None:
        """Assert the invariants for a fleet with this many calls on its engines; for tests."""
        assert all(count > 0 for count in self._groups.values())
        assert self._groups.total() <= active_calls


class RetryBudgets:
    """Retries may be a share of a model's `active` calls, so that sick engines are not asked ever more."""

    def __init__(self, active: Mapping[str, int]) -> None:
        self._active = active
        self._retrying: Counter[str] = Counter()

    def take(self, model: str) -> bool:
        """Ask for a retry of a call that has just left its engine; False if the budget is used up.

        A retry that was granted is ended by `give_back`.
        """
        if self._retrying[model] >= max(LEAST_RETRIES, ACTIVE_SHARE * (self._active.get(model, 0) + 1)):
            return False
        self._retrying[model] += 1
        return True

    def give_back(self, model: str) -> None:
        """A retry has ended."""
        assert self._retrying[model] > 0
        self._retrying[model] -= 1

    def check(self, active_calls: int) -> None:
        """Assert the invariants for a fleet with this many calls on its engines; for tests."""
        assert sum(self._active.values()) == active_calls
        assert all(count >= 0 for count in (*self._active.values(), *self._retrying.values()))
