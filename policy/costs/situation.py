"""What is known when a call is placed: the engines, the call's path in the prefix tree, and the traffic of its model.

`Demand` counts the calls of all models: when they are placed, change groups, and leave their engines. From the counts,
`Demand.situation` makes a policy's input, which nothing changes while the policy chooses an engine.
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
"""The prior output length weighs as much as this many ended calls."""

ARRIVALS_S = 60.0
"""The time constant of the arrival rate's exponential decay."""


class Coming(NamedTuple):
    """The expected arrivals at an engine. Faster engines (by cost model) are expected to get more calls."""

    rate_s: float
    """Calls a second to an engine of mean speed."""
    prompt_tokens: float
    """The mean length of a prompt."""
    tokens_per_s: float
    """The engines' mean speed of prefill."""


def nothing_comes() -> Coming:
    return Coming(0.0, 0.0, 1.0)


class Traffic:
    """How long the answers to one model's calls are, over the whole fleet.

    A mean with exponential decay over `window_s` takes O(1) time and memory. With a mean for each engine, one that
    happened to get short answers would look fast.
    """

    __slots__ = ("_ended", "_ended_s", "_output_tokens", "_prior", "_window_s")

    def __init__(self, window_s: float, prior_output_tokens: float) -> None:
        self._window_s = window_s
        self._prior = prior_output_tokens
        self._ended = 0.0
        self._ended_s = 0.0
        self._output_tokens = 0.0

    def ended(self, output_tokens: int, now_s: float) -> None:
        kept = exp((self._ended_s - now_s) / self._window_s) if self._ended else 1.0
        self._ended = self._ended * kept + 1
        self._output_tokens = self._output_tokens * kept + output_tokens
        self._ended_s = now_s

    def expected_output_tokens(self, limit: int | None) -> float:
        """The mean length of an answer, at most the call's output `limit`."""
        mean_tokens = (self._prior * PRIOR_CALLS + self._output_tokens) / (PRIOR_CALLS + self._ended)
        return mean_tokens if limit is None else min(mean_tokens, limit)


class Arrivals:
    """One model's arrival rate and mean prompt length, with exponential decay over `ARRIVALS_S`."""

    __slots__ = ("_began_s", "_calls", "_latest_s", "_prompt_tokens", "_speed", "_speed_of")

    def __init__(self, now_s: float) -> None:
        self._began_s = self._latest_s = now_s
        self._calls = self._prompt_tokens = 0.0
        self._speed = 1.0
        self._speed_of: Sequence[EngineView] = ()

    def came(self, prompt_tokens: int, now_s: float) -> None:
        kept = exp((self._latest_s - now_s) / ARRIVALS_S)
        self._calls = 1.0 + self._calls * kept
        self._prompt_tokens = prompt_tokens + self._prompt_tokens * kept
        self._latest_s = now_s

    def coming(self, engines: Sequence[EngineView], now_s: float) -> Coming:
        """The expected arrivals at each of `engines`. The observed time is at least 1 s: first calls are no burst."""
        known = 1.0 - exp(min(self._began_s - now_s, -1.0) / ARRIVALS_S)
        rate_s = self._calls * exp((self._latest_s - now_s) / ARRIVALS_S) / (ARRIVALS_S * known)
        return Coming(rate_s / len(engines), self._prompt_tokens / self._calls, self._mean_speed(engines))

    def _mean_speed(self, engines: Sequence[EngineView]) -> float:
        """The mean speed of prefill, cached for the latest list.

        Speeds come from the cost models, not from observed paces: an engine is mostly slow for a short time only, and
        calls go there too.
        """
        if engines is not self._speed_of:
            self._speed = sum(engine.cost_model.tokens_per_s for engine in engines) / len(engines)
            self._speed_of = engines
        return self._speed


NO_TRAFFIC = Traffic(1.0, 0.0)


class OvertakenInLine(NamedTuple):
    """The calls in one line that a new call overtakes."""

    calls: float
    prefill: float
    """The overtaken part of the line's prefill seconds: many calls with short prompts are a small part."""


class Overtaken(NamedTuple):
    """The calls in the gateway's lines that a new call overtakes by the fair order of tenants."""

    lines: Mapping[str, OvertakenInLine]
    """By engine, where any call is overtaken."""
    calls: float
    """The mean number of overtaken calls for each engine. The new call delays them wherever it goes."""
    sent_weight: float = 1.0
    """The weight of a second by which the new call delays one that was sent: the tenant's part of the placed calls
    over its fair share, at most 1. With a weight of 1, one tenant's many calls keep another's few from an engine.
    """


NONE_OVERTAKEN: Final = Overtaken({}, 0.0)


class Situation(NamedTuple):
    """A policy's input at the time `now_s`."""

    path: Sequence[Segment]
    """The nodes of the prefix tree that match the prompt, from the root."""
    engines: Sequence[EngineView]
    """The eligible engines (healthy, not draining, serving the model) in a fixed order."""
    turn: int
    """How many calls of the model were placed before this one."""
    now_s: float = 0.0
    traffic: Traffic = NO_TRAFFIC
    """The answers' length of calls of this model, with or without a task group as this call is."""
    siblings: int = 0
    """The other calls of its task group that still have to be placed."""
    overtaken: Overtaken = NONE_OVERTAKEN
    coming: Callable[[], Coming] = nothing_comes
    """Returns the expected arrivals of the call's model at each engine."""
    compares_all: bool = False
    """A policy that compares only a part of a large fleet has to compare all engines."""


class Demand:
    """The traffic of each model, and the placed calls of each task group.

    Calls of task groups have a mean output length of their own, because the parts of a program are shorter than chat.
    `active` counts the calls of each model that are on engines.
    """

    def __init__(self, window_s: float, prior_output_tokens: float) -> None:
        self._window_s = window_s
        self._prior_output_tokens = prior_output_tokens
        self._nothing = Traffic(window_s, prior_output_tokens)
        self._traffic: dict[tuple[str, bool], Traffic] = {}
        self._placed: defaultdict[str, int] = defaultdict(int)
        self._arrivals: dict[str, Arrivals] = {}
        self._groups: Counter[str] = Counter()
        self.active: defaultdict[str, int] = defaultdict(int)

    def placed(self, call: Call, now_s: float) -> None:
        """The call was placed on an engine."""
        self._placed[call.model] += 1
        self.active[call.model] += 1
        arrivals = self._arrivals.get(call.model)
        if arrivals is None:
            arrivals = self._arrivals[call.model] = Arrivals(now_s)
        arrivals.came(call.prompt_tokens, now_s)
        if call.group is not None:
            self._groups[call.group.group_id] += 1

    def others_came(self, models: Iterable[str], prompt_tokens: int, now_s: float) -> None:
        """Another client's call came to an engine of these models. Which one is unknown, so it counts for each."""
        for model in self._arrivals.keys() & models:
            self._arrivals[model].came(prompt_tokens, now_s)

    def refined(self, before: Call, after: Call) -> None:
        """The objectives of a placed call have changed, and with them its task group."""
        if after.group is not None:
            self._groups[after.group.group_id] += 1
        if before.group is not None:
            self._leave_group(before.group.group_id)

    def left(self, call: Call, now_s: float, output_tokens: int | None = None) -> None:
        """The call has left its engine. `output_tokens` is the length of a complete answer."""
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
        overtaken: Overtaken = NONE_OVERTAKEN,
        *,
        compares_all: bool = False,
    ) -> Situation:
        """A policy's input for the call. `engines` are the eligible ones."""
        arrivals, turn = self._arrivals.get(call.model), self._placed[call.model]
        return Situation(
            path,
            engines,
            turn,
            now_s,
            self._traffic.get((call.model, call.group is not None), self._nothing),
            0 if call.group is None else self.siblings(call.group),
            overtaken,
            nothing_comes if arrivals is None else partial(arrivals.coming, engines, now_s),
            compares_all,
        )

    def siblings(self, group: TaskGroup) -> int:
        """How many other calls of the group still have to be placed."""
        return max(0, group.calls - 1 - self._groups[group.group_id])

    def _leave_group(self, group_id: str) -> None:
        self._groups[group_id] -= 1
        if not self._groups[group_id]:
            del self._groups[group_id]


def cached_prefix(call: Call, situation: Situation, engine: EngineView) -> int:
    """Blocks of the prompt that the engine is expected to have in any tier, without the last prompt token's block."""
    ends = engine.residency.ends
    if ends is not None and call.slo is not None and call.slo.has_zero:  # a promise depends on the hit of this call
        return ends.hit(situation.path, call.prompt_tokens, call.tokens).tokens // call.block_tokens
    cached_blocks = engine.tiers.lowest.cached_blocks(situation.path)
    return cached_blocks if cached_blocks * call.block_tokens < call.prompt_tokens else call.cacheable_blocks


def loads_of(call: Call, situation: Situation, engine: EngineView) -> Loads:
    """The blocks that need no prefill: those on the accelerator, and those that a lower tier loads faster."""
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

    The default `reason` is exploit if more than half of the prompt is cached, otherwise explore.
    """
    cached_tokens = cached_blocks * call.block_tokens
    if reason is None:
        reason = PlacementReason.EXPLOIT if 2 * cached_tokens > call.prompt_tokens else PlacementReason.EXPLORE
    missed_tokens = call.prompt_tokens - cached_tokens
    return Placement(
        engine.engine_id, reason, cached_tokens, missed_tokens, cost, meets_slo, first_token_s, decode_s, (), compared
    )
