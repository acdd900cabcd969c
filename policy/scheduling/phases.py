"""The phases of an `slo` plan that an experiment may replace, and those that ship."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.chunking import Budget, model_budget
from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.long_prompts import long_slots, release_long
from plait.policy.scheduling.moment import Moment
from plait.policy.scheduling.preemption import make_room
from plait.policy.scheduling.reserve import Select
from plait.policy.scheduling.selection import select_by_distance
from plait.policy.scheduling.slo import Objectives
from plait.policy.scheduling.ttft_slack import TtftSlack
from plait.policy.scheduling.urgent import MakeRoom, may_pause, order_by_slack
from plait.policy.scheduling.waiting import Sorted, sort_waiting
from plait.policy.types import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The functions that make up a plan. Each shipped function documents its phase.

    objectives: makes the objectives of an engine's calls.
    budget: makes an empty iteration's budget.
    may_pause: whether running decodes may be left out now; it gets the time at which they were last left out.
    arrivals_slack_s: the TTFT slack expected of arrivals, None if no arrivals are expected.
    long_slots: how many long prompts may start.
    sort_waiting: sorts the waiting calls.
    order: puts urgent calls and prompts begun into the order in which they are added.
    make_room: preempts for an urgent call or a prompt begun.
    select: adds calls that are not urgent.
    release_long: starts a held long prompt in compute that would be idle.
    """

    objectives: Callable[[Slo | None], Objectives] = Objectives
    budget: Callable[[int, IterationModel], Budget] = model_budget
    may_pause: Callable[[float | None, float], bool] = may_pause
    arrivals_slack_s: Callable[[TtftSlack, float], float | None] = TtftSlack.quartile_s
    long_slots: Callable[[Moment], int] = long_slots
    sort_waiting: Callable[[Moment, Batch, int], Sorted] = sort_waiting
    order: Callable[[Moment, Sequence[Candidate]], Sequence[Candidate]] = order_by_slack
    make_room: MakeRoom = make_room
    select: Select = select_by_distance
    release_long: Callable[[Moment, Batch, Sorted], Sequence[Candidate]] = release_long


PHASES = Phases()
"""The phases that ship."""
