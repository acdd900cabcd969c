"""The `slo` local scheduler, after AccelGen and the priority groups of Preble's local scheduler.

Objectives bound an iteration's time, and with it the sizes of prompts' chunks. A batch is filled by two resources: the
tokens of the iteration and the KV blocks that are free. Calls without objectives start in groups by hit ratio.

In: before each iteration, the engine's waiting and running calls (`plan`); after it, its duration and work (`observe`).
Out: a `Plan`. Between plans the scheduler remembers measured iterations, whether the last plan left out decodes, and
facts about calls that started, were preempted or ended. An engine may drop a plan and ask again for the same moment. So
`_remember` notes what a plan intends, and the next plan's `_follow` notes which calls the engine started.

While no call has an SLO, and no call started recently whose TTFT objective exceeded its prefill time, the scheduler
plans as `hit_ratio` does.
Experiments may replace phases of a plan (`Phases`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import inf

from plait.policy.costs.cost_model import CostModel
from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.best_effort import (
    Select,
    add_best_effort,
    backlog_limit_s,
    limit_backlog,
    reserve_tokens,
    return_reserve,
    shortest_prompt_s,
)
from plait.policy.scheduling.chunking import Budget, model_budget
from plait.policy.scheduling.in_order import MAX_BACKFILL_CALLS, HitRatioOrder, plan_in_order
from plait.policy.scheduling.iteration_model import IterationModel, time_s
from plait.policy.scheduling.leaders import Leaders
from plait.policy.scheduling.moment import Moment, SloSettings, split_running, time_prefills
from plait.policy.scheduling.outputs import RecentOutputs
from plait.policy.scheduling.pace import Pace, PreemptionHistory, RecentIterations
from plait.policy.scheduling.plan import EngineFacts, IterationWork, LocalCall, Plan, ready
from plait.policy.scheduling.preemption import (
    MakeRoom,
    add_decodes,
    add_urgent,
    limit_to_tightest_slo,
    make_room,
    may_pause,
    order_by_slack,
    reserve_blocks,
)
from plait.policy.scheduling.selection import select_by_distance
from plait.policy.scheduling.shared_prefixes import lead_in_flight, startable_calls, with_heirs
from plait.policy.scheduling.slo import Objectives, TtftSlack, slacks_s
from plait.policy.scheduling.waiting import Sorted, long_slots, release_long, sort_waiting
from plait.policy.types import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The phases of a plan that experiments may replace. Each shipped function documents its phase."""

    objectives: Callable[[Slo | None], Objectives] = Objectives
    budget: Callable[[int, IterationModel], Budget] = model_budget
    """Makes an empty iteration's budget."""
    may_pause: Callable[[float | None, float], bool] = may_pause
    arrivals_slack_s: Callable[[TtftSlack, float], float | None] = TtftSlack.quartile_s
    """The TTFT slack expected of arrivals; None: no arrivals are expected."""
    long_slots: Callable[[Moment], int] = long_slots
    sort_waiting: Callable[[Moment, Batch, int], Sorted] = sort_waiting
    order: Callable[[Moment, Sequence[Candidate]], Sequence[Candidate]] = order_by_slack
    """Sorts the urgent calls and the half-computed prompts. `add_urgent` takes them in this order."""
    make_room: MakeRoom = make_room
    """Preempts for an urgent call or a half-computed prompt."""
    select: Select = select_by_distance
    """Adds calls that can meet their SLO and are not urgent; at the end, whatever still fits."""
    release_long: Callable[[Moment, Batch, Sorted], Sequence[Candidate]] = release_long
    """Starts a long prompt that `sort_waiting` held back, in compute that would be idle."""


PHASES = Phases()
"""The defaults."""


class SloScheduler:
    """The `slo` scheduler, a `MeasuringScheduler`. Experiments give it other `phases`."""

    def __init__(self, settings: SloSettings | None = None, phases: Phases = PHASES) -> None:
        self.settings = settings or SloSettings()
        self.model = IterationModel()
        self._phases = phases
        self._iterations = RecentIterations()
        self._preemptions = PreemptionHistory()
        self._outputs = RecentOutputs()
        self._ttft_slack = TtftSlack()
        self._objectives = phases.objectives(self.settings.default_slo)
        self._hit_ratio = HitRatioOrder()
        self._long_calls: list[LocalCall] = []
        self._paused_s: float | None = None

    def expect(self, costs: CostModel) -> None:
        """Use this model of the engine's iteration times."""
        self.model.expect(costs)

    def observe(self, duration_s: float, work: IterationWork) -> None:
        self.model.on_iteration(duration_s, work)
        self._iterations.on_iteration(duration_s, work)
        self._preemptions.on_iteration(work)

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        now_s = self._begins_s(now_s, facts)
        self._follow(now_s, waiting, running)
        waiting = ready(waiting, facts)
        slack_s = self._phases.arrivals_slack_s(self._ttft_slack, now_s)
        if slack_s is None and not self._objectives.any(waiting, running):
            return plan_in_order(waiting, running, facts, self._hit_ratio.turns, leaders=Leaders(facts))
        moment = self._moment(now_s, waiting, running, facts, slack_s)
        batch = Batch(
            self._phases.budget(facts.max_batch_tokens, self.model), facts, facts.max_running_calls - len(running)
        )
        plan = self._fill(moment, batch)
        if not plan.picks and not plan.preempt and (running or waiting):
            return plan_in_order(waiting, running, facts, self._hit_ratio.turns)  # all calls block each other
        self._remember(moment, batch)
        return plan

    def _begins_s(self, now_s: float, facts: EngineFacts) -> float:
        """When the planned iteration is going to begin: after the one in flight, whose tokens have come then."""
        flying, costs = facts.in_flight, self.model.costs
        if flying is None or costs is None:
            return now_s
        return max(now_s, flying.began_s + time_s(costs, flying.work))

    def _fill(self, moment: Moment, batch: Batch) -> Plan:
        """The steps of docs/local_scheduler.md. Each step uses the tokens, blocks and slots that earlier steps left."""
        phases = self._phases
        # 1. Running decodes continue.
        add_decodes(moment, batch)
        prompt_s = shortest_prompt_s(moment, batch)
        # 2. The tightest SLO limits the iteration.
        limit_to_tightest_slo(moment, batch)
        reserve_blocks(moment, batch)
        lead_in_flight(moment, batch)
        # 3. Calls that can still meet their SLO come next.
        found = Sorted() if batch.preempted else phases.sort_waiting(moment, batch, phases.long_slots(moment))
        # Made before `with_heirs`, which may lower a prompt's `remaining_s`, and so change its `loses_nothing`.
        lose_nothing = {one.call for one in moment.prefills if one.loses_nothing}
        moment = with_heirs(moment, found.startable())
        begun = [one for one in moment.prefills if one.call not in batch.preempted]
        others = [one for one in begun if one.call in lose_nothing]
        on_time = [one for one in begun if not one.loses_nothing]
        batch.reserve_tokens = reserve_tokens(moment, batch, others, found)
        batch.leave_to_arrivals(moment.arrivals_slack_s, backlog_limit_s(moment, prompt_s, found.missed))
        add_urgent(moment, batch, phases.order(moment, [*on_time, *found.urgent]), phases.make_room)
        phases.select(moment, batch, found.normal)
        # 4. Missed and best-effort calls share the rest.
        reserve, batch.reserve_tokens = batch.reserve_tokens, 0
        limit_s = batch.budget.limit_s
        limit_backlog(batch, backlog_limit_s(moment, prompt_s, found.missed), reserve)
        others = [one for one in others if one.call not in batch.preempted and one.call not in batch.picks]
        turns = self._hit_ratio.turns(found.best_effort, moment.facts)
        left = add_best_effort(moment, batch, others, found.missed, turns)
        budget_tokens = batch.budget.tokens + batch.left_tokens if batch.budget.limit_s < inf else None
        # 5. The calls of step 3 get what step 4 left of the reserve.
        batch.budget.limit_s = limit_s
        if reserve and batch.left_tokens:
            return_reserve(moment, batch, [*on_time, *found.startable()], phases.select)
        released = phases.release_long(moment, batch, found)
        considered = (one.call for one in chain(found.startable(), released))
        return _planned(moment, batch, chain(considered, left), budget_tokens)

    def _follow(self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall]) -> None:
        """Note which calls have started, ended or been preempted since the last plan."""
        ended = self._preemptions.on_plan(now_s, waiting, running)
        self._outputs.on_ended(ended)
        self._objectives.on_plan(now_s, running, ended)
        self._hit_ratio.settle(waiting)
        self._ttft_slack.on_plan(now_s, running)
        if self._long_calls:
            present = set(running)
            self._long_calls = [call for call in self._long_calls if call in present]

    def _moment(
        self,
        now_s: float,
        waiting: Sequence[LocalCall],
        running: Sequence[LocalCall],
        facts: EngineFacts,
        slack_s: float | None,
    ) -> Moment:
        pace = Pace.of(self._iterations, self.model, self._preemptions, self._outputs, facts.max_batch_tokens)
        empty_budget = self._phases.budget(facts.max_batch_tokens, self.model)
        decodes, prefills = split_running(running, self._long_calls)
        moment = Moment(
            now_s=now_s,
            waiting=waiting,
            decodes=decodes,
            prefills=prefills,
            facts=facts,
            settings=self.settings,
            objectives=self._objectives,
            pace=pace,
            preemptions=self._preemptions,
            long_calls=self._long_calls,
            empty_budget=empty_budget,
            may_pause=self._phases.may_pause(self._paused_s, now_s),
            arrivals_slack_s=slack_s,
        )
        time_prefills(moment)
        return moment

    def _remember(self, moment: Moment, batch: Batch) -> None:
        """Note which calls the plan starts, and whether it leaves out decodes: two iterations in a row may not."""
        started = batch.started
        self._long_calls += [one.call for one in started if one.is_long and one.remaining_s < inf]
        self._ttft_slack.expect(slacks_s(started, self._objectives, self.model.costs))
        if batch.paused:
            self._paused_s = moment.now_s
        elif self._paused_s != moment.now_s:
            self._paused_s = None


def _planned(moment: Moment, batch: Batch, waiting: Iterable[LocalCall], budget_tokens: int | None) -> Plan:
    """The batch as a plan. The `waiting` calls that may start and were not picked are the backfill, in their order."""
    picks = batch.picks
    left = islice((call for call in waiting if call not in picks), MAX_BACKFILL_CALLS)
    backfill = () if batch.preempted or batch.free_slots <= 0 else tuple(startable_calls(moment, batch, left))
    if budget_tokens is not None:
        budget_tokens = max(budget_tokens, batch.budget.tokens)
    return Plan(tuple(batch.preempted), tuple(picks.items()), backfill, budget_tokens)
