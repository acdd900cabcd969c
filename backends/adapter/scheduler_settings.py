"""The local scheduler's settings in an engine's plugin, and the scheduler that they make.

Each engine passes the settings in its own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import msgspec

from plait.backends.profiles import load_profile
from plait.policy.cost_model import CostModel
from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.scheduling.plan import EngineFacts, IterationWork, LocalCall, LocalScheduler, MeasuringScheduler, Plan


class SettingsError(ValueError):
    """The plugin's settings are wrong. The message names the place of the settings and the key."""


class LeverSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forced levers, for tests of each lever's effect on the engine. By default none is forced.

    order: `reverse` admits the latest arrival first.
    budget_tokens: the most tokens of an iteration. chunk_tokens: the most tokens of one prompt in an iteration.
    hold_back_iterations: each waiting call is held back for this many iterations while others run.
    preempt_every_iterations: every Nth iteration preempts the running call with the most output.
    """

    order: Literal["arrival", "reverse"] = "arrival"
    budget_tokens: int | None = None
    chunk_tokens: int | None = None
    hold_back_iterations: int = 0
    preempt_every_iterations: int = 0


class SchedulerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`scheduler` is a name in `policy.scheduling.local_scheduler.SCHEDULERS`. `name` is the engine's, for its reports.

    `profile` is a cost profile: its name or the path of its .toml file. With it, a scheduler that plans with iteration
    times knows them from the start. Without it, the scheduler measures them.
    """

    scheduler: str = "slo"
    name: str = ""
    profile: str | None = None
    levers: LeverSettings = LeverSettings()


S = TypeVar("S", bound=SchedulerSettings)


def convert_settings(given: Any, kind: type[S], where: str) -> S:
    """The settings in a decoded object. `where` names their place in error messages. Raises SettingsError."""
    try:
        settings = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {error}") from error
    if settings.scheduler not in SCHEDULERS:
        known = ", ".join(sorted(SCHEDULERS))
        raise SettingsError(f"{where}.scheduler: {settings.scheduler!r} is none of {known}")
    return settings


def cost_model(settings: SchedulerSettings, where: str) -> CostModel | None:
    """The cost model of the settings' profile; None without a profile. Raises SettingsError if it cannot be loaded."""
    if settings.profile is None:
        return None
    try:
        return load_profile(settings.profile).cost_model()
    except ValueError as error:
        raise SettingsError(f"{where}.profile: {error}") from error


def local_scheduler(settings: SchedulerSettings) -> LocalScheduler:
    """The local scheduler of the settings, wrapped in `ForcedLevers` if they force any lever."""
    policy = SCHEDULERS[settings.scheduler]()
    return policy if settings.levers == LeverSettings() else ForcedLevers(policy, settings.levers)


class ForcedLevers:
    """A LocalScheduler that changes the plans of an inner one as the settings say, for tests on real engines."""

    def __init__(self, inner: LocalScheduler, settings: LeverSettings) -> None:
        self._inner = inner
        self._settings = settings
        self._iterations = 0
        self._held_until: dict[int, int] = {}
        self._measuring = inner if isinstance(inner, MeasuringScheduler) else None

    def expect(self, costs: CostModel) -> None:
        """Pass the costs on to the inner scheduler, if it measures."""
        if self._measuring is not None:
            self._measuring.expect(costs)

    def observe(self, duration_s: float, work: IterationWork) -> None:
        """Pass the iteration on to the inner scheduler, if it measures."""
        if self._measuring is not None:
            self._measuring.observe(duration_s, work)

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """The inner scheduler's plan for the calls that are not held back, with the forced changes."""
        self._iterations += 1
        shown = self._shown(waiting) if running else list(waiting)
        if self._settings.order == "reverse":
            shown.reverse()
        plan = self._inner.plan(now_s, shown, running, facts)
        return self._limited(self._preempted(plan, running))

    def _shown(self, waiting: Sequence[LocalCall]) -> list[LocalCall]:
        """The waiting calls that have been held back for long enough."""
        hold = self._settings.hold_back_iterations
        if not hold:
            return list(waiting)
        until = {id(call): self._held_until.get(id(call), self._iterations + hold) for call in waiting}
        self._held_until = until
        return [call for call in waiting if until[id(call)] <= self._iterations]

    def _preempted(self, plan: Plan, running: Sequence[LocalCall]) -> Plan:
        every = self._settings.preempt_every_iterations
        if plan.preempt or not every or self._iterations % every:
            return plan
        victim = max(running, key=lambda call: call.output_tokens, default=None)
        if victim is None or victim.output_tokens == 0:
            return plan
        return replace(
            plan,
            preempt=(victim,),
            picks=tuple(pick for pick in plan.picks if pick[0] is not victim),
            backfill=tuple(call for call in plan.backfill if call is not victim),
        )

    def _limited(self, plan: Plan) -> Plan:
        chunk, budget = self._settings.chunk_tokens, self._settings.budget_tokens
        if chunk is not None:
            picks = tuple((call, min(tokens, chunk)) for call, tokens in plan.picks)
            plan = replace(plan, picks=picks, backfill=())  # the chunk limit does not apply to backfill
        return plan if budget is None else replace(plan, budget_tokens=budget)


def measuring(policy: LocalScheduler, costs: CostModel | None) -> MeasuringScheduler | None:
    """Returns `policy` if it measures, else None. It starts with `costs`, if given."""
    if not isinstance(policy, MeasuringScheduler):
        return None
    if costs is not None:
        policy.expect(costs)
    return policy
