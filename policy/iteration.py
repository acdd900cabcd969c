"""One iteration as the `slo` scheduler fills it: decodes, urgent calls, those nearest to what is left, then the rest.

AccelGen's algorithm 1, with Preble's hit-ratio groups for the calls that were promised nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from math import ceil, inf
from operator import attrgetter
from typing import TYPE_CHECKING

from policy.batching import Batch, Candidate, select_by_distance, select_in_order
from policy.in_order import MAX_BACKFILL_CALLS
from policy.plan import EngineFacts, LocalCall, Plan
from policy.waiting import Moment, Sorted, SortRules, is_lost, sort_waiting

if TYPE_CHECKING:
    from policy.slo_scheduler import SloScheduler

DECODE_TOKENS = 8
"""A call behind its prompt with no more than this to compute decodes; with more it recomputes what was preempted."""

_REMAINING = attrgetter("remaining_s")


class Iteration:
    """Made for one plan; `started_long` are the long prompts that it starts."""

    def __init__(
        self,
        scheduler: SloScheduler,
        now_s: float,
        waiting: Sequence[LocalCall],
        running: Sequence[LocalCall],
        facts: EngineFacts,
    ) -> None:
        self.started_long: list[LocalCall] = []
        self._scheduler = scheduler
        self._settings = scheduler.settings
        self._objectives = scheduler.objectives
        self._now_s = now_s
        self._facts = facts
        self._waiting = waiting
        self._pace = scheduler.measurements.pace(facts.max_batch_tokens)
        self._batch = Batch(scheduler.new_budget(facts.max_batch_tokens), facts, facts.max_running_calls - len(running))
        self._preempted: list[LocalCall] = []
        self._decodes: list[Candidate] = []
        self._prefills: list[Candidate] = []
        self._timing = self._objectives.timer(now_s, self._pace, runs=True)
        self._by_remaining: list[Candidate] | None = None
        self._sort_running(running)

    def plan(self) -> Plan:
        """Fill the iteration."""
        batch = self._batch
        self._decode()
        found = self._sort_waiting()
        going_on = [one for one in self._prefills if one.call not in self._preempted]
        first = [one for one in going_on if one.remaining_s < inf]
        rest = [one for one in going_on if one.remaining_s == inf]
        batch.withheld_tokens = self._withheld(rest, found)
        self._add_urgent(sorted([*first, *found.urgent], key=_REMAINING))
        self._select(found.normal)
        withheld, batch.withheld_tokens = batch.withheld_tokens, 0
        select_in_order(batch, [one for one in rest if one.call not in self._preempted])
        turns = self._best_effort(found.others)
        promised = [*found.urgent, *found.normal]
        if withheld and batch.left_tokens:
            self._use_up([*first, *promised])
        self._release_long(found.held, promised)
        return self._planned(promised, turns)

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
        candidate.is_long = self._scheduler.runs_long(call)
        if slo is not None:
            candidate.remaining_s, candidate.due_s = self._timing(call, slo, candidate.tokens)
            if self._settings.lost == "demote" and is_lost(candidate, self._batch.budget):
                candidate.remaining_s = self._pace.longest_s * 1.01  # it holds blocks: right behind the urgent ones

    def _staying(self) -> list[Candidate]:
        """Running calls, those with the largest T_r at the end; of equals the latest arrival, and prompts first."""
        if self._by_remaining is None:
            for decode in self._decodes:  # only now, since mostly there is room for all of them
                slo = self._objectives.of(decode.call)
                if slo is not None:
                    decode.remaining_s = self._timing(decode.call, slo, 1)[0]
            self._by_remaining = sorted([*self._decodes, *self._prefills], key=_REMAINING)
        return self._by_remaining

    def _decode(self) -> None:
        """Every running decode goes on; while blocks are short the largest T_r is preempted."""
        batch, needed = self._batch, self._facts.blocks_needed
        tokens = sum([one.tokens for one in self._decodes])
        blocks = sum([needed(one.call, one.tokens) for one in self._decodes])
        if tokens <= self._facts.max_batch_tokens and blocks <= batch.free_blocks:
            batch.add_decodes(self._decodes, tokens, blocks)
        else:
            self._decode_some()
        self._bind_to_decodes()
        self._reserve()

    def _decode_some(self) -> None:
        """Decodes in ascending T_r, each in the room of those with a larger one if there is no other."""
        batch, staying = self._batch, self._staying()
        for decode in sorted(self._decodes, key=_REMAINING):
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
        moment = Moment(self._now_s, self._objectives, self._pace)
        return sort_waiting(self._waiting, moment, self._batch.budget, self._facts, rules)

    def _long_runs(self) -> bool:
        if self._settings.long_prompts == "until_prefilled":
            return any(prefill.is_long for prefill in self._prefills)
        running = chain(self._prefills, self._decodes)
        return any(self._scheduler.runs_long(candidate.call) for candidate in running)

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
        if not rest and not found.others:
            return 0
        unpromised = found.unpromised or any(self._objectives.of(one.call) is None for one in rest)
        share = self._settings.best_effort_share if unpromised else self._settings.lost_share
        return ceil(share * self._batch.left_tokens)

    def _add_urgent(self, candidates: list[Candidate]) -> None:
        """Urgent calls and prompts begun, in ascending T_r; for an urgent one room is made if that is possible."""
        batch = self._batch
        for candidate in candidates:
            if candidate.call in self._preempted:
                continue
            tokens = batch.fit(candidate)
            if not tokens and candidate.remaining_s <= self._pace.longest_s and self._make_room(candidate):
                tokens = batch.fit(candidate)
            if tokens:
                batch.add(candidate, tokens)
            elif batch.left_tokens <= batch.withheld_tokens:
                return

    def _make_room(self, candidate: Candidate) -> bool:
        """Preempt the largest T_r as far as they can spare it; nobody, if that is not enough."""
        batch, facts = self._batch, self._facts
        if self._settings.preempt == "never" or self._settings.order == "arrival":
            return False
        if (candidate.waits and batch.seats <= 0) or batch.left_tokens <= batch.withheld_tokens:
            return False  # for want of something else than blocks
        room = batch.open_blocks if candidate.waits else batch.free_blocks
        missing = facts.blocks_needed(candidate.call, candidate.tokens) - room
        victims: list[Candidate] = []
        for one in reversed(self._staying()):
            if missing <= 0 or one.remaining_s <= candidate.remaining_s:
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
        """Whether a running call may be preempted: it is not urgent even once all of it has to be computed again."""
        settings, pace = self._settings, self._pace
        if settings.preempt == "unpromised" and self._objectives.of(one.call) is not None:
            return False
        if self._scheduler.measurements.times_preempted(one.call) >= settings.max_preemptions:
            return False
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

    def _best_effort(self, calls: list[LocalCall]) -> Iterator[LocalCall]:
        """Add others by the turns of their hit-ratio groups until one finds no room; returns those left, in order."""
        batch, facts = self._batch, self._facts
        turns = self._scheduler.hit_ratio.turns(calls, facts)
        if not calls or self._preempted:
            return iter(calls)
        for call in turns:
            cached = facts.cached_tokens(call)
            tokens = call.uncomputed_tokens - cached
            candidate = Candidate(call, tokens, cached, waits=True, is_long=tokens >= self._settings.long_tokens)
            fitting = batch.fit(candidate)
            if not fitting:
                return chain((call,), turns)
            batch.add(candidate, fitting)
        return turns

    def _planned(self, promised: list[Candidate], turns: Iterator[LocalCall]) -> Plan:
        batch = self._batch
        picks = batch.picks
        self.started_long = [one.call for one in promised if one.is_long and one.call in picks]
        left = (call for call in chain((one.call for one in promised), turns) if call not in picks)
        backfill = () if self._preempted or batch.seats <= 0 else islice(left, MAX_BACKFILL_CALLS)
        limited = batch.budget.limit_s < inf
        return Plan(
            tuple(self._preempted),
            tuple(picks.items()),
            tuple(backfill),
            batch.budget.tokens + batch.left_tokens if limited else None,
        )
