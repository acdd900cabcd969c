"""What is known when a call is placed: the engines, the call's path in the prefix tree, and the traffic of its model.

The traffic is how long answers are, and what comes. `Demand` knows it of all models. Nothing of it changes while an
engine is chosen. `engines` holds only eligible engines: healthy, not draining, serving the model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import exp
from typing import Final, NamedTuple

from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.tier_views import Loads
from plait.policy.prefix.prefix_tree import Segment
from plait.policy.types import Call, Compared, Cost, Placement, PlacementReason, TaskGroup

PRIOR_CALLS = 4.0
"""The expected output counts as so many calls until calls have ended."""

COMPARED = 3
"""So many of the best engines are known of a call that is compared."""

ARRIVALS_S = 60.0
"""Calls of about the last minute say how many come a second."""


class Coming(NamedTuple):
    """What is expected to come: calls a second to each engine, and the mean length of their prompts.

    An engine gets the more the faster it computes prompts, by its cost model. `rate_s` is that of one that computes the
    engines' mean of `tokens_per_s`.
    """

    rate_s: float
    prompt_tokens: float
    tokens_per_s: float


def nothing_comes() -> Coming:
    """What is expected where no call has come."""
    return Coming(0.0, 0.0, 1.0)


class Traffic:
    """How long the answers to one model's calls are, over the whole fleet.

    A mean that forgets exponentially over `window_s`: O(1) in time and memory. An engine's own mean would make an
    engine look fast that happened to get calls with short answers.
    `prior_output_tokens` is expected of an answer before any call has ended.
    """

    __slots__ = ("_ended", "_ended_s", "_output_tokens", "_prior", "_window_s")

    def __init__(self, window_s: float, prior_output_tokens: float) -> None:
        self._window_s = window_s
        self._prior = prior_output_tokens
        self._ended = 0.0
        self._ended_s = 0.0
        self._output_tokens = 0.0

    def ended(self, output_tokens: int, now_s: float) -> None:
        """A call got its whole answer."""
        kept = exp((self._ended_s - now_s) / self._window_s) if self._ended else 1.0
        self._ended = self._ended * kept + 1
        self._output_tokens = self._output_tokens * kept + output_tokens
        self._ended_s = now_s

    def expected_output_tokens(self, limit: int | None) -> float:
        """The mean length of an answer, or the call's output `limit` if that is less."""
        mean_tokens = (self._prior * PRIOR_CALLS + self._output_tokens) / (PRIOR_CALLS + self._ended)
        return mean_tokens if limit is None else min(mean_tokens, limit)


class Arrivals:
    """How many calls come a second, and how long their prompts are.

    Means that forget exponentially over `ARRIVALS_S`: O(1) in time and memory.
    """

    __slots__ = ("_began_s", "_calls", "_latest_s", "_prompt_tokens", "_speed", "_speed_of")

    def __init__(self, now_s: float) -> None:
        self._began_s = self._latest_s = now_s
        self._calls = self._prompt_tokens = 0.0
        self._speed = 1.0
        self._speed_of: Sequence[EngineView] = ()

    def came(self, prompt_tokens: int, now_s: float) -> None:
        """A call has come."""
        kept = exp((self._latest_s - now_s) / ARRIVALS_S)
        self._calls = 1.0 + self._calls * kept
        self._prompt_tokens = prompt_tokens + self._prompt_tokens * kept
        self._latest_s = now_s

    def coming(self, engines: Sequence[EngineView], now_s: float) -> Coming:
        """What the `engines` have to expect. At least a second counts: the first calls are no burst."""
        known = 1.0 - exp(min(self._began_s - now_s, -1.0) / ARRIVALS_S)
        rate_s = self._calls * exp((self._latest_s - now_s) / ARRIVALS_S) / (ARRIVALS_S * known)
        return Coming(rate_s / len(engines), self._prompt_tokens / self._calls, self._mean_speed(engines))

    def _mean_speed(self, engines: Sequence[EngineView]) -> float:
        """The engines' mean, computed once for a list of them.

        Speeds are those of cost models. An engine that is slow now is mostly so for a while, and calls come there too.
        """
        if engines is not self._speed_of:
            self._speed = sum(engine.cost_model.tokens_per_s for engine in engines) / len(engines)
            self._speed_of = engines
        return self._speed


NO_TRAFFIC = Traffic(1.0, 0.0)
"""Of a model that nobody has called."""


class Passed(NamedTuple):
    """The calls that wait in the gateway for engines, and that a new call goes before, because its tenant may.

    `shares` is, by engine, their part of what waits for it. `calls` is how many they are for an engine on average. It
    counts for every engine alike: the new call delays them wherever it goes.
    """

    shares: Mapping[str, float]
    calls: float


NOTHING_PASSED: Final = Passed({}, 0.0)


class Situation(NamedTuple):
    """A policy's input at the time `now_s`.

    `path` is the call's matched path. `engines` are the eligible engines in a fixed order. `turn` is the number of
    calls placed before this one. `traffic` is that of calls like this one. `siblings` counts the other calls of its
    task group that still have to be placed. `passed` are the calls that wait in the gateway behind this one.
    `coming` returns the calls of its model that each engine has to expect. So many of the best
    engines are to be known in the end as it `compares`: a policy that looks at few engines goes on until they are.
    """

    path: Sequence[Segment]
    engines: Sequence[EngineView]
    turn: int
    now_s: float = 0.0
    traffic: Traffic = NO_TRAFFIC
    siblings: int = 0
    passed: Passed = NOTHING_PASSED
    coming: Callable[[], Coming] = nothing_comes
    compares: int = 0


class Demand:
    """Calls by model and by task group.

    The calls of task groups have a mean output length of their own: the parts of a program are not as long as chat.
    `prior_output_tokens` is expected before calls have ended. A mean forgets over `window_s`. `active` counts the calls
    of each model that are on engines. Of one call in `compare_each` (0: of none) the best `COMPARED` engines are found.
    """

    def __init__(self, window_s: float, prior_output_tokens: float) -> None:
        self.compare_each = 0
        self._window_s = window_s
        self._prior_output_tokens = prior_output_tokens
        self._nothing = Traffic(window_s, prior_output_tokens)
        self._traffic: dict[tuple[str, bool], Traffic] = {}
        self._placed: defaultdict[str, int] = defaultdict(int)
        self._arrivals: dict[str, Arrivals] = {}
        self._groups: Counter[str] = Counter()
        self.active: defaultdict[str, int] = defaultdict(int)

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

    def left(self, call: Call, now_s: float, output_tokens: int | None = None) -> None:
        """The call is on no engine any more. Its whole answer had `output_tokens`, if it got one."""
        self.active[call.model] -= 1
        if call.group is not None:
            self._leave_group(call.group.group_id)
        if output_tokens is not None:
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
        *,
        compares: int = 0,
    ) -> Situation:
        """What a policy is told of the call, whose prompt matches `path`. `engines` are all that may take it."""
        arrivals, turn = self._arrivals.get(call.model), self._placed[call.model]
        if self.compare_each and turn % self.compare_each == 0 and compares < COMPARED:
            compares = COMPARED
        return Situation(
            path,
            engines,
            turn,
            now_s,
            self._traffic.get((call.model, call.group is not None), self._nothing),
            0 if call.group is None else self.siblings(call.group),
            passed,
            nothing_comes if arrivals is None else partial(arrivals.coming, engines, now_s),
            compares,
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


def cached_prefix(call: Call, situation: Situation, engine: EngineView) -> int:
    """Blocks of the prompt that the engine is expected to have in any tier, less one with the last prompt token."""
    cached_blocks = engine.tiers.lowest.cached_blocks(situation.path)
    return cached_blocks if cached_blocks * call.block_tokens < call.prompt_tokens else call.cacheable_blocks


def loads_of(call: Call, situation: Situation, engine: EngineView) -> Loads:
    """What need not be computed: what is on the accelerator, and what is worth bringing back from lower tiers."""
    if not engine.tiers.views:
        return Loads(cached_prefix(call, situation, engine))
    most_blocks, path = call.cacheable_blocks, situation.path
    return engine.tiers.loads(
        lambda one: one.cached_blocks(path), most_blocks, call.block_tokens, engine.cost_model, situation.now_s
    )


def placed(
    call: Call,
    engine: EngineView,
    reason: str | None,
    cached_blocks: int,
    cost: Cost | None = None,
    *,
    meets_slo: bool | None = None,
    first_token_s: float = 0.0,
    decode_s: float = 0.0,
    compared: Compared | None = None,
) -> Placement:
    """The placement of `call` on `engine`, which has `cached_blocks` of its prompt.

    Without a `reason`, the call exploits the cache if more than half of its prompt is there, and explores else.
    """
    cached_tokens = cached_blocks * call.block_tokens
    if reason is None:
        reason = PlacementReason.EXPLOIT if 2 * cached_tokens > call.prompt_tokens else PlacementReason.EXPLORE
    missed_tokens = call.prompt_tokens - cached_tokens
    return Placement(
        engine.engine_id, reason, cached_tokens, missed_tokens, cost, meets_slo, first_token_s, decode_s, (), compared
    )
