"""The `slo` scheduler in part: its phases composed with others in the place of those that ship."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from sys import maxsize

from benchmarks.schedulers.published import ChunkedObjectives, pivot_budget
from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.chunking import NO_TIMES, Budget
from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.moment import Moment
from plait.policy.scheduling.plan import LocalCall
from plait.policy.scheduling.preemption import make_room
from plait.policy.scheduling.selection import select_in_order
from plait.policy.scheduling.slo import Objectives, TtftSlack, chunked_execution
from plait.policy.scheduling.slo_scheduler import PHASES
from plait.policy.scheduling.waiting import Sorted, divide, time_waiting
from plait.policy.types import Slo


def engine_budget(max_tokens: int, model: IterationModel) -> Budget:
    """The engine's own maximum, whatever the objectives."""
    del model
    return Budget(max_tokens, NO_TIMES)


class KeptPlace(Objectives):
    """A call that misses its SLO keeps its place among the others; its T_r is the smallest."""

    def misses(self, call: LocalCall, slo: Slo, now_s: float, soonest_s: float) -> bool:
        """Never, as far as anybody is told."""
        del call, slo, now_s, soonest_s
        return False


class ChunkedKeptPlace(ChunkedObjectives, KeptPlace):
    """Both, as published."""


def sort_keeping_place(moment: Moment, batch: Batch, long_slots: int) -> Sorted:
    """In ascending T_r, also calls that miss their SLO."""
    timed = time_waiting(moment, batch, near_s=-inf)
    timed.sort()
    return divide(timed, moment, batch, long_slots, moment.pace.longest_s)


def sort_by_arrival(moment: Moment, batch: Batch, long_slots: int) -> Sorted:
    """In the order of arrival: no call is urgent."""
    near_s = max(moment.pace.longest_s, batch.budget.time_s())
    return divide(time_waiting(moment, batch, near_s), moment, batch, long_slots, urgent_s=-inf)


def sort_by_arrival_keeping_place(moment: Moment, batch: Batch, long_slots: int) -> Sorted:
    """In the order of arrival, also calls that miss their SLO."""
    return divide(time_waiting(moment, batch, near_s=-inf), moment, batch, long_slots, urgent_s=-inf)


def select_by_order(moment: Moment, batch: Batch, candidates: Iterable[Candidate]) -> None:
    """Add what fits in the order of the candidates, wherever the KV cache stands."""
    select_in_order(moment, batch, candidates)


def by_remaining_time(moment: Moment, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """In ascending T_r, also prompts begun: their T_r grows with their progress."""
    del moment
    return sorted(candidates, key=lambda one: one.remaining_s)


def make_no_room(moment: Moment, batch: Batch, candidate: Candidate) -> bool:
    """Preempt nobody for an urgent call."""
    del moment, batch, candidate
    return False


def stays_in_time(moment: Moment, running: Candidate) -> bool:
    """Preempt also a call that is not urgent even once it has to start anew."""
    again_s = chunked_execution(moment.pace).of(running.context_tokens)
    return running.loses_nothing or running.remaining_s - again_s > moment.pace.longest_s


def never_pause(paused_s: float | None, now_s: float) -> bool:
    """Every running decode stays in the batch."""
    del paused_s, now_s
    return False


def no_arrivals(slack: TtftSlack, now_s: float) -> None:
    """Spend on the backlog whatever the budget allows."""
    del slack, now_s


def any_number(moment: Moment) -> int:
    """Long prompts start like any other."""
    del moment
    return maxsize


def one_until_completed(moment: Moment) -> int:
    """One long prompt starts once those that run have generated all their output."""
    running = [*moment.prefills, *moment.decode_candidates]
    return 0 if any(one.call in moment.long_calls for one in running) else 1


def release_none(moment: Moment, batch: Batch, found: Sorted) -> Sequence[Candidate]:
    """Leave the compute idle."""
    del moment, batch, found
    return ()


UNTIL_COMPLETED = replace(PHASES, long_slots=one_until_completed, release_long=release_none)
KEPT_PLACE = replace(PHASES, objectives=KeptPlace, sort_waiting=sort_keeping_place)
BY_ARRIVAL = replace(PHASES, sort_waiting=sort_by_arrival, select=select_by_order, make_room=make_no_room)
PREEMPT_ANY = replace(PHASES, make_room=partial(make_room, may_preempt=stays_in_time))

ABLATIONS = {
    "slo_without_chunk": replace(PHASES, budget=engine_budget, long_slots=any_number, arrivals_slack_s=no_arrivals),
    "slo_without_order": BY_ARRIVAL,
    "slo_without_batch": replace(PHASES, select=select_by_order),
}
"""AccelGen's section 6.3: each method left out."""

VARIANTS = {
    "slo_as_published": replace(
        UNTIL_COMPLETED,
        objectives=ChunkedKeptPlace,
        sort_waiting=sort_keeping_place,
        budget=pivot_budget,
        order=by_remaining_time,
        make_room=PREEMPT_ANY.make_room,
        may_pause=never_pause,
        arrivals_slack_s=no_arrivals,
    ),
    "slo_equation_6": replace(PHASES, budget=pivot_budget),
    "slo_until_completed": UNTIL_COMPLETED,
    "slo_any_long": replace(PHASES, long_slots=any_number),
    "slo_lost_keep": KEPT_PLACE,
    "slo_lose_place": replace(PHASES, order=by_remaining_time),
    "slo_preempt_never": replace(PHASES, make_room=make_no_room),
    "slo_pause_never": replace(PHASES, may_pause=never_pause),
    "slo_spare_share_0": replace(PHASES, arrivals_slack_s=no_arrivals),
}
"""Choices that the design leaves to measurement: AccelGen's own together, then each of ours taken back."""
