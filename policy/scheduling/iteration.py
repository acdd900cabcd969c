"""One iteration as the `slo` scheduler fills it: decodes, urgent calls, those nearest to what is left, then the rest.

AccelGen's algorithm 1, with Preble's hit-ratio groups for the calls that were promised nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import ceil, inf
from operator import attrgetter

from plait.policy.scheduling.batching import Batch, Candidate, select_by_distance, select_in_order
from plait.policy.scheduling.best_effort import BestEffort
from plait.policy.scheduling.chunking import Budget, ModelBudget, PivotBudget
from plait.policy.scheduling.in_order import MAX_BACKFILL_CALLS, HitRatioOrder
from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.pace import Pace
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan
from plait.policy.scheduling.preemption_history import PreemptionHistory
from plait.policy.scheduling.slo import Objectives
from plait.policy.scheduling.slo_settings import SloSettings
from plait.policy.scheduling.ttft_slack import slacks_s
from plait.policy.scheduling.waiting import Moment, Sorted, SortRules, sort_waiting

DECODE_TOKENS = 8
"""A call behind its prompt with no more than this to compute decodes; with more it recomputes what was preempted."""

LEAST_ITERATIONS = 2.0
"""Shortest iterations that one made short for arrivals takes at least, so that half of it is not overhead."""

_REMAINING = attrgetter("remaining_s")


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What the scheduler knows when it plans an iteration.

    `long_calls` are the running calls that were started as long prompts. `may_pause` says whether decodes may be left
    out. `slack_s` is the TTFT slack that arrivals are expected to have, None where none are expected.
    """

    settings: SloSettings
    objectives: Objectives
    model: IterationModel
    pace: Pace
    preemptions: PreemptionHistory
    slack_s: float | None
    hit_ratio: HitRatioOrder
    long_calls: Collection[LocalCall]
    may_pause: bool

    def new_budget(self, max_tokens: int) -> Budget:
        """An empty iteration's."""
        if self.settings.budget == "model" and self.model.costs is not None:
            return ModelBudget(max_tokens, self.model.costs)
        return PivotBudget(max_tokens, None if self.settings.budget == "engine" else self.model.pivot)


class Iteration:
    """Made for one plan; `started_long` are the long prompts that it starts."""

    def __init__(
        self,
        knowledge: Knowledge,
        now_s: float,
        waiting: Sequence[LocalCall],
        running: Sequence[LocalCall],
        facts: EngineFacts,
    ) -> None:
        self.started_long: list[LocalCall] = []
        self.spares_s: dict[LocalCall, float] = {}
        self.paused = False
        self._may_pause = knowledge.may_pause
        self._knowledge = knowledge
        self._settings = knowledge.settings
        self._objectives = knowledge.objectives
        self._now_s = now_s
        self._facts = facts
        self._waiting = waiting
        self._pace = knowledge.pace
        self._batch = Batch(knowledge.new_budget(facts.max_batch_tokens), facts, facts.max_running_calls - len(running))
        self._soonest = knowledge.new_budget(facts.max_batch_tokens) if self._may_pause else self._batch.budget
        self._preempted: list[LocalCall] = []
        self._decodes: list[Candidate] = []
        self._prefills: list[Candidate] = []
        self._timing = self._objectives.timer(now_s, self._pace, runs=True)
        self._by_spare: list[Candidate] | None = None
        self._sort_running(running)

    def plan(self) -> Plan:
        """Fill the iteration."""
        batch = self._batch
        self._decode()
        found = self._sort_waiting()
        going_on = [one for one in self._prefills if one.call not in self._preempted]
        first = [one for one in going_on if one.remaining_s < inf and not one.is_lost]
        rest = [one for one in going_on if one.remaining_s == inf or one.is_lost]
        batch.withheld_tokens = self._withheld(rest, found)
        self._add_urgent(sorted([*first, *found.urgent], key=_REMAINING))
        self._select(found.normal)
        withheld, batch.withheld_tokens = batch.withheld_tokens, 0
        limit_s = self._quieten(withheld)
        left = self._best_effort([one for one in rest if one.call not in self._preempted], found)
        budget_tokens = batch.budget.tokens + batch.left_tokens if batch.budget.limit_s < inf else None
        batch.budget.limit_s = limit_s
        promised = [*found.urgent, *found.normal]
        if withheld and batch.left_tokens:
            self._use_up([*first, *promised])
        self._release_long(found.held, promised)
        self._note_spares()
        return self._planned(promised, left, budget_tokens)

    def _sort_running(self, running: Sequence[LocalCall]) -> None:
        for call in running:
            computed = call.computed_tokens
            tokens = call.prompt_tokens + call.output_tokens - computed
            candidate = Candidate(call, tokens, computed, False)
            if computed >= call.prompt_tokens and tokens <= DECODE_TOKENS:
                self._decodes.append(candidate)
            else:
                self._time_prefill(candidate)
                self._prefills.append(candidate)

    def _time_prefill(self, candidate: Candidate) -> None:
        call = candidate.call
        slo = self._objectives.of(call)
        candidate.is_long = call in self._knowledge.long_calls
        if slo is not None:
            candidate.remaining_s, candidate.due_s = self._timing(call, slo, candidate.tokens)
            if self._settings.lost == "demote":
                soonest_s = self._soonest.time_s(candidate.tokens, candidate.context_tokens)
                candidate.is_lost = self._objectives.too_late(call, slo, self._now_s, soonest_s)

    def _staying(self) -> list[Candidate]:
        """Running calls by what they can spare, the least first: of promised ones T_r, then the others.

        Of those others the one whose loss is least comes last; of equals the latest arrival, and prompts.
        """
        if self._by_spare is None:
            demote = self._settings.lost == "demote"
            for decode in self._decodes:  # only now, since mostly there is room for all of them
                slo = self._objectives.of(decode.call)
                if slo is not None:
                    decode.remaining_s = self._timing(decode.call, slo, 1)[0]
                    decode.is_lost = demote and self._objectives.too_late(decode.call, slo, self._now_s, 0.0)
            self._by_spare = sorted([*self._decodes, *self._prefills], key=_spare)
        return self._by_spare

    def _decode(self) -> None:
        """Every running decode goes on; while blocks are short the largest T_r is preempted."""
        batch, needed = self._batch, self._facts.blocks_needed
        tokens = sum([one.tokens for one in self._decodes])
        blocks = sum([needed(one.call, one.tokens) for one in self._decodes])
        if tokens <= self._facts.max_batch_tokens and blocks <= batch.free_blocks:
            batch.add_decodes(self._decodes, tokens, blocks)
        else:
            self._decode_some()
        self._pivot_s = batch.budget.time_s(self._pace.pivot_tokens)
        self._bind_to_decodes()
        self._reserve()

    def _decode_some(self) -> None:
        """Decodes, each in the room of those that can spare more if there is no other."""
        batch, staying = self._batch, self._staying()
        for decode in sorted(self._decodes, key=_spare):
            if decode.call in self._preempted:
                continue
            tokens = batch.budget.room(decode.tokens, decode.context_tokens)
            if not tokens:
                break
            need = self._facts.blocks_needed(decode.call, tokens)
            while need > batch.free_blocks:
                victim = staying.pop()
                self._preempt(victim.call)
                if victim is decode:
                    break
            else:
                batch.add(decode, tokens)

    def _reserve(self) -> None:
        """Blocks that prompts begun have still to get, and that each decode takes next."""
        batch, needed = self._batch, self._facts.blocks_needed
        begun = sum(needed(prefill.call, prefill.tokens) for prefill in self._prefills)
        batch.open_blocks = batch.free_blocks - begun - self._settings.watermark_blocks * len(self._decodes)

    def _bind_to_decodes(self) -> None:
        """Limit the iteration to the tightest SLO; where decodes by themselves take longer, prompts get a floor."""
        batch, base_s = self._batch, self._batch.budget.time_s()
        tightest_s = self._objectives.tightest_s([one.call for one in self._decodes], self._now_s, self._pace)
        if tightest_s < base_s:
            batch.floor_tokens = max(1, int(self._settings.floor_share * self._facts.max_batch_tokens))
        batch.limit(max(tightest_s, base_s))

    def _sort_waiting(self) -> Sorted:
        if self._preempted:  # what they gave up is for those who lacked it
            return Sorted()
        settings = self._settings
        rules = SortRules(
            seats=self._batch.seats,
            long_tokens=settings.long_tokens,
            start_long=settings.long_prompts == "any" or not self._long_runs(),
            one_long=settings.long_prompts != "any",
            by_arrival=settings.order == "arrival",
            demote_lost=settings.lost == "demote",
        )
        moment = Moment(
            self._now_s,
            self._objectives,
            self._pace,
            self._batch.budget,
            self._soonest,
            self._facts.max_batch_tokens,
        )
        return sort_waiting(self._waiting, moment, self._facts, rules)

    def _long_runs(self) -> bool:
        if self._settings.long_prompts == "until_prefilled":
            return any(prefill.is_long for prefill in self._prefills)
        running = chain(self._prefills, self._decodes)
        return any(candidate.call in self._knowledge.long_calls for candidate in running)

    def _note_spares(self) -> None:
        """What calls that start could have spared of their TTFT, had they found the engine idle."""
        self.spares_s = slacks_s(self._batch.started, self._objectives, self._knowledge.model.costs)

    def _release_long(self, held: list[Candidate], promised: list[Candidate]) -> None:
        """Compute is left and every long prompt begun will be through: to wait would only leave it idle."""
        picks = self._batch.picks
        if held and self._settings.long_prompts == "until_prefilled" and self._batch.left_tokens:
            begun = chain(self._prefills, (one for one in promised if one.call in picks))
            if all(picks.get(one.call) == one.tokens for one in begun if one.is_long):
                select_in_order(self._batch, held[:1])
                promised.append(held[0])

    def _withheld(self, rest: list[Candidate], found: Sorted) -> int:
        """Tokens kept for calls that were promised nothing, or that cannot be served as promised."""
        if found.unpromised or any(self._objectives.of(one.call) is None for one in rest):
            share = self._settings.best_effort_share
        elif rest or found.lost:
            share = self._settings.lost_share
        else:
            return 0
        return ceil(share * self._batch.left_tokens)

    def _quieten(self, withheld_tokens: int) -> float:
        """Keep what follows short for the sake of calls that may arrive meanwhile; returns the limit before.

        What is withheld for it is reduced as its time is.
        """
        batch, quiet_s = self._batch, self._quiet_s()
        limit_s = batch.budget.limit_s
        if quiet_s < limit_s:
            all_s = batch.budget.time_s(batch.left_tokens)
            batch.quieten(quiet_s, ceil(withheld_tokens * min(1.0, quiet_s / all_s)) if all_s else withheld_tokens)
        return limit_s

    def _quiet_s(self) -> float:
        """How long an iteration may take in which nothing is urgent: a share of what arrivals can spare.

        Where that is hardly more than any iteration takes, they cannot be helped: as long as at the pivot.
        """
        spare_s, share = self._knowledge.slack_s, self._settings.spare_share
        if spare_s is None or not share:
            return inf
        return share * spare_s if share * spare_s >= LEAST_ITERATIONS * self._pace.shortest_s else self._pivot_s

    def _add_urgent(self, candidates: list[Candidate]) -> None:
        """Urgent calls and prompts begun, in ascending T_r; for an urgent one room is made if that is possible."""
        batch = self._batch
        for candidate in candidates:
            if candidate.call in self._preempted:
                continue
            tokens = batch.fit(candidate)
            if not tokens and self._make_room(candidate):
                tokens = batch.fit(candidate)
            if tokens:
                self._pause_decodes_for(candidate, tokens)
                batch.add(candidate, tokens)
            elif batch.left_tokens <= batch.withheld_tokens:
                return

    def _pause_decodes_for(self, candidate: Candidate, tokens: int) -> None:
        """Leave decodes that can wait out of the iteration if only without them the candidate's first token is in time.

        Never twice in a row, so that they go on whatever comes.
        """
        budget, due_s = self._batch.budget, candidate.due_s
        if due_s is None or tokens < candidate.tokens or not self._may_pause:
            return
        if budget.time_s(tokens, candidate.context_tokens) <= due_s:
            return
        waiting = [one for one in self._decodes if one.call in self._batch.picks and self._can_wait(one, due_s)]
        for one in waiting:
            self._batch.remove(one)
        if budget.time_s(tokens, candidate.context_tokens) <= due_s:
            self.paused = bool(waiting)
            return
        for one in waiting:  # in vain
            self._batch.add(one, one.tokens)

    def _can_wait(self, decode: Candidate, seconds: float) -> bool:
        """Whether a decode's next token may come so much later."""
        slo = self._objectives.of(decode.call)
        due_s = None if slo is None else self._objectives.due_s(decode.call, slo, self._now_s)
        return due_s is None or due_s >= seconds + self._pace.shortest_s

    def _make_room(self, candidate: Candidate) -> bool:
        """Preempt the largest T_r as far as they can spare it; nobody, if that is not enough."""
        batch, facts = self._batch, self._facts
        if self._settings.preempt == "never" or self._settings.order == "arrival":
            return False
        if (candidate.waits and batch.seats <= 0) or batch.left_tokens <= batch.withheld_tokens:
            return False  # for want of something else than blocks
        room = batch.open_blocks if candidate.waits else batch.free_blocks
        missing = facts.blocks_needed(candidate.call, candidate.tokens) - room
        urgent = candidate.remaining_s <= self._pace.longest_s
        victims: list[Candidate] = []
        for one in reversed(self._staying()):
            if missing <= 0 or (not _is_spare(one) and (not urgent or one.remaining_s <= candidate.remaining_s)):
                break
            freed = facts.blocks_freed(one.call) if one is not candidate and self._can_spare(one) else 0
            if freed:
                victims.append(one)
                missing -= freed
        if missing > 0:
            return False
        for victim in victims:
            self._staying().remove(victim)
            self._preempt(victim.call)
        return True

    def _can_spare(self, one: Candidate) -> bool:
        """Whether a running call may be preempted: nothing is lost, or it is not urgent even once it starts anew."""
        settings, pace = self._settings, self._pace
        if self._knowledge.preemptions.times(one.call) >= settings.max_preemptions:
            return False
        if _is_spare(one) or settings.preempt == "spare":
            return _is_spare(one)
        again_s = pace.chunks(one.context_tokens) * pace.longest_s
        return one.remaining_s - again_s > pace.longest_s

    def _preempt(self, call: LocalCall) -> None:
        self._preempted.append(call)
        self._batch.free_blocks += self._facts.blocks_freed(call)
        self._batch.open_blocks += self._facts.blocks_freed(call)
        self._batch.picks.pop(call, None)
        self._batch.seats += 1

    def _select(self, candidates: list[Candidate]) -> None:
        if self._settings.selection == "distance" and self._settings.order == "remaining":
            select_by_distance(self._batch, candidates, self._facts, self._settings.window_s)
        else:
            select_in_order(self._batch, candidates)

    def _use_up(self, candidates: list[Candidate]) -> None:
        """What was withheld and not used: for the call that was cut on its account, then for those left out."""
        picks = self._batch.picks
        for candidate in candidates:
            if picks.get(candidate.call, candidate.tokens) < candidate.tokens:
                self._batch.extend(candidate)
        self._select([one for one in candidates if one.call not in picks and one.call not in self._preempted])

    def _best_effort(self, rest: list[Candidate], found: Sorted) -> Iterator[LocalCall]:
        """What remains, for calls that nothing can be kept to; returns those left, in order."""
        settings = self._settings
        turns = self._knowledge.hit_ratio.turns(found.unpromised, self._facts)
        remains = BestEffort(
            self._batch, self._facts, turns, share=settings.best_effort_share, long_tokens=settings.long_tokens
        )
        if not self._preempted:
            return remains.fill(rest, found.lost)
        remains.go_on(rest)
        return chain(turns, (one.call for _, one in found.lost))

    def _planned(self, promised: list[Candidate], rest: Iterator[LocalCall], budget_tokens: int | None) -> Plan:
        batch = self._batch
        picks = batch.picks
        self.started_long = [one.call for one in batch.started if one.is_long and one.remaining_s < inf]
        left = (call for call in chain((one.call for one in promised), rest) if call not in picks)
        backfill = () if self._preempted or batch.seats <= 0 else islice(left, MAX_BACKFILL_CALLS)
        if budget_tokens is not None:
            budget_tokens = max(budget_tokens, batch.budget.tokens)
        return Plan(tuple(self._preempted), tuple(picks.items()), tuple(backfill), budget_tokens)


def _is_spare(candidate: Candidate) -> bool:
    return candidate.is_lost or candidate.remaining_s == inf


def _spare(candidate: Candidate) -> tuple[float, float]:
    """What it can spare: the more, the sooner it makes room."""
    if _is_spare(candidate):
        return inf, -candidate.context_tokens
    return candidate.remaining_s, 0.0
