"""Schedules that know how many tokens each call will generate: the best of them stands for AccelGen's oracle.

None is optimal (that is a hard problem); each is a named heuristic with exact knowledge of finish times and of the KV
cache's future. They do not know when calls will arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil

from plait.lab.embedded.call import EmbeddedCall
from plait.policy.costs.cost_model import CostModel
from plait.policy.scheduling.iteration_model import time_s
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan

MOST_MISFITS = 8
"""Waiting calls without hope that are tried in vain before the rest is left alone."""

SMALL_CHUNKS = (256, 512, 1024)
"""Tried for a prompt in this order where chunks are to be small: the first with which it is still in time."""


class Foresight:
    """What is known of calls in an engine: their outputs, when their first token came, what they still cost."""

    def __init__(self, cost_model: CostModel, kv_blocks: int, block_tokens: int) -> None:
        self.cost_model = cost_model
        self.kv_blocks = kv_blocks
        self.block_tokens = block_tokens
        self._first_token_s: dict[LocalCall, float] = {}

    def note(self, now_s: float, running: Iterable[LocalCall]) -> None:
        """Tokens appear as an iteration ends, which is when the next one is planned."""
        for call in running:
            if call.output_tokens:
                self._first_token_s.setdefault(call, now_s)

    def remaining_tokens(self, call: LocalCall) -> int:
        """Output tokens to come."""
        assert isinstance(call, EmbeddedCall)
        return call.final_output_tokens - call.output_tokens

    def decode_s(self, call: LocalCall) -> float:
        """The fastest a next token can come, alone on the engine."""
        return self.cost_model.iteration_time_s(((1, call.prompt_tokens + call.output_tokens),))

    def prefill_s(self, call: LocalCall) -> float:
        """The fastest to its next token: what is not computed, in one pass."""
        return self.cost_model.prefill_time_s(call.uncomputed_tokens, call.computed_tokens)

    def remaining_s(self, call: LocalCall) -> float:
        """The fastest to its end."""
        return self.prefill_s(call) + (self.remaining_tokens(call) - 1) * self.decode_s(call)

    def kv_time(self, call: LocalCall) -> float:
        """Tokens in the KV cache times the seconds to the end: what a call takes of the resource that runs out."""
        tokens = call.prompt_tokens + call.output_tokens + self.remaining_tokens(call) / 2
        return tokens * self.remaining_s(call)

    def response_ratio(self, call: LocalCall, now_s: float) -> float:
        """How long it has waited against what it takes: high for small calls, and for any that waits for long."""
        share_s = self.kv_time(call) / (self.kv_blocks * self.block_tokens)
        return (now_s - call.arrived_s) / share_s

    def slack_s(self, call: LocalCall, now_s: float) -> float:
        """How long an iteration may make the call wait, if it then goes on as fast as can be; below 0: it is lost."""
        slo = call.slo
        if slo is None or slo.ttft_s is None or slo.tpot_s is None:
            return float("inf")
        first_s = self._first_token_s.get(call)
        if first_s is None:
            return call.arrived_s + slo.ttft_s - now_s - self.prefill_s(call)
        if first_s > call.arrived_s + slo.ttft_s:
            return float("-inf")
        remaining = self.remaining_tokens(call)
        ends_s = first_s + (call.output_tokens + remaining - 1) * slo.tpot_s
        return ends_s - now_s - self.remaining_s(call)

    def peak_blocks(self, calls: Sequence[LocalCall]) -> int:
        """The most KV blocks that the calls hold together until all have ended, one token each an iteration."""
        standing = sorted((self.remaining_tokens(call), call.prompt_tokens + call.output_tokens) for call in calls)
        peak = 0
        for index, (ends, _) in enumerate(standing):
            held = sum(-(-(tokens + ends) // self.block_tokens) for _, tokens in standing[index:])
            peak = max(peak, held)
        return peak


Order = Callable[[Foresight, LocalCall, float], float]
"""The key by which calls that can still be kept are taken, the smallest first."""


def shortest_remaining(foresight: Foresight, call: LocalCall, now_s: float) -> float:
    """Shortest remaining processing time."""
    del now_s
    return foresight.remaining_s(call)


def earliest_deadline(foresight: Foresight, call: LocalCall, now_s: float) -> float:
    """Earliest deadline of the next token that an objective stands on."""
    return now_s + foresight.slack_s(call, now_s) + foresight.prefill_s(call)


def least_laxity(foresight: Foresight, call: LocalCall, now_s: float) -> float:
    """Least time to spare."""
    return foresight.slack_s(call, now_s)


def least_kv_time(foresight: Foresight, call: LocalCall, now_s: float) -> float:
    """Least KV cache times seconds until its end: most calls met for the resource that runs out."""
    del now_s
    return foresight.kv_time(call)


class Clairvoyant:
    """Keeps the calls that can still meet their objectives, in `order`; the others take what is left.

    Of those, the highest response ratio goes first, so that small ones are not held up and large ones not starved.

    With `triage` off every call counts as one that can be kept and nothing limits an iteration: plain `order`.
    `quiet_tokens` limits an iteration in which nothing is urgent, so that an arrival does not wait for long; with
    `small_chunks` prompts that can be kept are cut as small as their TTFT allows, to the same end. At most `most_lost`
    of the others are in the engine.
    """

    def __init__(
        self,
        foresight: Foresight,
        order: Order,
        *,
        triage: bool = True,
        quiet_tokens: int = 256,
        small_chunks: bool = False,
        most_lost: int | None = None,
    ) -> None:
        self._foresight = foresight
        self._order = order
        self._triage = triage
        self._quiet_tokens = quiet_tokens
        self._small_chunks = small_chunks
        self._most_lost = most_lost

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """Lost calls give up their KV where a call that can be kept needs it; what stays always fits to its end."""
        foresight = self._foresight
        if facts.in_flight is not None:
            now_s = facts.in_flight.began_s + time_s(foresight.cost_model, facts.in_flight.work)
        # The last tokens of some calls are in flight.
        waiting, running = ([call for call in some if foresight.remaining_tokens(call)] for some in (waiting, running))
        foresight.note(now_s, running)
        kept, lost = self._sorted_out(now_s, waiting, running)
        chosen = self._fitting(kept, lost, facts)
        members = set(map(id, chosen))
        preempt = tuple(call for call in reversed(running) if id(call) not in members)
        batch = _Batch(foresight, facts, now_s, facts.free_blocks + sum(facts.blocks_freed(call) for call in preempt))
        hopeful = {id(call) for call in kept} if self._triage else set()
        for call in chosen:  # decodes first: they end soonest
            if call.computed_tokens and call.uncomputed_tokens == 1:
                batch.decode(call, limited=id(call) in hopeful)
        prefills = [call for call in chosen if not (call.computed_tokens and call.uncomputed_tokens == 1)]
        for call in prefills:
            if id(call) in hopeful:
                batch.prefill_in_time(call, SMALL_CHUNKS if self._small_chunks else ())
        most = facts.max_batch_tokens
        if self._triage:
            most = min(most, max(self._quiet_tokens, len(batch.picks)))
        for call in prefills:
            if id(call) not in hopeful:
                batch.prefill(call, most)
        if not batch.picks and prefills:  # nothing can be in time: go on with the first
            batch.prefill(prefills[0], facts.max_batch_tokens)
        return Plan(preempt, tuple(batch.picks))

    def _sorted_out(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall]
    ) -> tuple[list[LocalCall], list[LocalCall]]:
        """Calls that can be kept, decodes first, then by `order`, and the lost ones, running ones first."""
        foresight, order, kept, lost = self._foresight, self._order, [], []
        for position, call in enumerate((*running, *waiting)):
            in_queue = position >= len(running)
            if not self._triage:
                kept.append((in_queue, order(foresight, call, now_s), position, call))
            elif foresight.slack_s(call, now_s) >= 0:
                decode = call.output_tokens > 0 and not in_queue
                kept.append((not decode, order(foresight, call, now_s), position, call))
            else:
                lost.append((in_queue, -foresight.response_ratio(call, now_s), position, call))
        return [entry[-1] for entry in sorted(kept)], [entry[-1] for entry in sorted(lost)[: self._most_lost]]

    def _fitting(self, kept: Sequence[LocalCall], lost: Sequence[LocalCall], facts: EngineFacts) -> list[LocalCall]:
        chosen: list[LocalCall] = []
        misfits = 0
        for call in (*kept, *lost):
            if len(chosen) >= facts.max_running_calls or misfits >= MOST_MISFITS:
                break
            if self._foresight.peak_blocks([*chosen, call]) <= self._foresight.kv_blocks:
                chosen.append(call)
            else:
                misfits += 1
        return chosen


class _Batch:
    """An iteration while it is composed: its work, how long it takes, and how long it may."""

    def __init__(self, foresight: Foresight, facts: EngineFacts, now_s: float, free_blocks: int) -> None:
        self.picks: list[tuple[LocalCall, int]] = []
        self._foresight = foresight
        self._facts = facts
        self._now_s = now_s
        self._free_blocks = free_blocks
        self._tokens = 0
        self._work: list[tuple[int, int]] = []
        self._limit_s = float("inf")

    def decode(self, call: LocalCall, *, limited: bool) -> None:
        """One token; `limited`: the iteration may not last beyond what the call can spare."""
        if limited:
            spare_s = self._foresight.slack_s(call, self._now_s) + self._foresight.decode_s(call)
            self._limit_s = min(self._limit_s, spare_s)
        self._take(call, 1, self._context(call))

    def prefill_in_time(self, call: LocalCall, chunks: Sequence[int]) -> None:
        """As much as the budget and the chunk allow, unless this or a call taken before would then be late."""
        tokens, context = self._share(call, self._facts.max_batch_tokens)
        left = call.uncomputed_tokens + call.computed_tokens - context
        # What it may take until its prompt is computed: its slack, and the time that this takes at the fastest.
        spare_s = self._foresight.slack_s(call, self._now_s) + self._foresight.prefill_s(call)
        tokens = min(tokens, self._chunk(left, context, spare_s, chunks))
        rest = left - tokens
        rest_s = self._foresight.cost_model.prefill_time_s(rest, context + tokens) if rest > 0 else 0.0
        limit_s = min(self._limit_s, spare_s - rest_s)
        if tokens > 0 and self._lasts_s(tokens, context) <= limit_s and self._take(call, tokens, context):
            self._limit_s = limit_s

    def _chunk(self, tokens: int, context: int, spare_s: float, chunks: Sequence[int]) -> int:
        for chunk in chunks:
            if ceil(tokens / chunk) * self._lasts_s(min(chunk, tokens), context + tokens // 2) <= spare_s:
                return chunk
        return tokens

    def prefill(self, call: LocalCall, most_tokens: int) -> None:
        """As much as `most_tokens` in the iteration and the time limit allow."""
        tokens, context = self._share(call, most_tokens)
        while tokens > 0 and self._lasts_s(tokens, context) > self._limit_s:
            tokens //= 2
        if tokens > 0:
            self._take(call, tokens, context)

    def _share(self, call: LocalCall, most_tokens: int) -> tuple[int, int]:
        context = self._context(call)
        left = call.uncomputed_tokens + call.computed_tokens - context
        return min(left, most_tokens - self._tokens), context

    def _context(self, call: LocalCall) -> int:
        return call.computed_tokens or self._facts.cached_tokens(call)

    def _lasts_s(self, tokens: int, context: int) -> float:
        return self._foresight.cost_model.iteration_time_s((*self._work, (tokens, context)))

    def _take(self, call: LocalCall, tokens: int, context: int) -> bool:
        need = self._facts.blocks_needed(call, tokens)
        if need > self._free_blocks:
            return False
        self._free_blocks -= need
        self._tokens += tokens
        self._work.append((tokens, context))
        self.picks.append((call, tokens))
        return True
