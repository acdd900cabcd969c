"""One engine as placement sees it: its cost model, window, residency, room, outstanding work, and how fast it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from plait.policy.costs.cost_model import CostModel
from plait.policy.costs.load import LoadLedger
from plait.policy.costs.pace import EnginePace
from plait.policy.costs.prefill_queue import Precedence, Prefill, PrefillQueue
from plait.policy.costs.tier_views import TierViews
from plait.policy.prefix.residency import Residency
from plait.policy.types import Call

RECENT = 0.1
"""What one gap between first bytes counts in the mean. An iteration brings several at once, so single gaps say little.
"""


class FirstBytes:
    """How fast an engine really comes to first bytes, whatever holds it up: prompts, decodes or a full KV cache.

    `gap_s` is the mean time to the next first byte while a call waits for its own; 0: not known yet.
    """

    __slots__ = ("_latest_s", "gap_s")

    def __init__(self) -> None:
        self.gap_s = 0.0
        self._latest_s = -inf

    def came(self, sent_s: float, now_s: float) -> None:
        """A call that was sent at `sent_s` has its first byte."""
        gap_s = now_s - max(sent_s, self._latest_s)
        self.gap_s = self.gap_s + RECENT * (gap_s - self.gap_s) if self.gap_s else gap_s
        self._latest_s = now_s


DEFAULT_BATCH_TOKENS = 2048
"""The token budget of an iteration if the engine does not report it: vLLM's default for serving."""


SMALL_S = 0.1
"""A prompt that adds no more than this to an engine's iterations is small."""

LEFT_SHARE = 0.5
"""The part of its answer that a call still has to decode, on average over the calls that are there."""


class Floor(NamedTuple):
    """What a new call costs on an engine at least, whatever the call is. Seconds are to be multiplied by `slowness`.

    The prompts that are there take until `until_s`, and at least `least_s` more. `iteration_s`: each output token.
    `deepening`: for each second by which the call's context makes an iteration longer, the seconds of that call (1) and
    of the others (half an answer each is left). `calls`: for each second of the call's prefill, the seconds of others
    that it holds up.
    """

    until_s: float
    least_s: float
    iteration_s: float
    deepening: float
    calls: int
    slowness: float


@dataclass(slots=True, eq=False)
class EngineView:
    """One engine's figures. The router owns and updates them; the policies read them."""

    engine_id: str
    cost_model: CostModel
    ledger: LoadLedger
    residency: Residency

    free_tokens: float | None = None
    """The part of the KV cache that no block fills: the reported number, less the tokens booked since then.

    None if the engine reports none. No eviction is expected then.
    """

    outstanding: int = 0
    """Calls that were placed here and have not ended."""

    context_tokens: float = 0.0
    """Their prompts, with half of the expected answer each."""

    unsent_context_tokens: float = 0.0
    """The part of them whose calls wait in the gateway."""

    queue: PrefillQueue = field(default_factory=PrefillQueue)

    batch_tokens: int = DEFAULT_BATCH_TOKENS
    """The token budget of an iteration."""

    slots: int = 0
    """How many calls run at a time; 0: not known."""

    others: int = 0
    """Calls there that this gateway has not sent, by the engine's counts."""

    reported: int = 0
    """Calls there that this gateway has not sent, which the engine reports one by one."""

    gateways: int = 1
    """This one, and those that have sent these."""

    urgent_first: bool = False
    """Whether its local scheduler serves calls first that can keep a TTFT or JCT."""

    pace: EnginePace = field(default_factory=EnginePace)
    """How fast the engine is."""

    slowness: float = 1.0
    """The latest figure of `pace`."""

    first_bytes: FirstBytes = field(default_factory=FirstBytes)
    """How fast prompts end, whatever holds them up."""

    tiers: TierViews = field(init=False)
    """The tiers below its accelerator."""

    floor: Floor | None = None
    """Follows from all of these; None: it was not read since they changed."""

    calls: int = field(init=False)
    """The outstanding ones, those of others, counted or reported, and those that failed lately."""

    _lost: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = self.outstanding
        self.tiers = TierViews(self.residency, self.cost_model.links)

    # What changes.

    def begin(self, context_tokens: float, prefill: Prefill, sent_s: float | None = None) -> None:
        """A call was placed here. The engine was sent it at `sent_s`; None: it waits in the gateway."""
        self.outstanding += 1
        self.calls += 1
        self.context_tokens += context_tokens
        if sent_s is None:
            self.unsent_context_tokens += context_tokens
            self.queue.add(prefill)
        else:
            self.queue.send(prefill, sent_s)
        self.floor = None

    def send(self, context_tokens: float, prefill: Prefill, now_s: float) -> None:
        """The engine was sent a call that has waited."""
        self.queue.send(prefill, now_s)
        self._let_go(context_tokens)
        self.floor = None

    def compute(self, prefill: Prefill, now_s: float) -> None:
        """A call has its first token."""
        self.first_bytes.came(prefill.sent_s, now_s)
        self.queue.leave(prefill, now_s, is_computed=True)
        self.floor = None

    def end(self, context_tokens: float, prefill: Prefill, now_s: float) -> None:
        """A call has ended."""
        self.outstanding -= 1
        self.calls -= 1
        self.context_tokens = self.context_tokens - context_tokens if self.calls else 0.0
        unsent = self.queue.unsent
        self.queue.leave(prefill, now_s)
        if self.queue.unsent < unsent:
            self._let_go(context_tokens)
        self.floor = None

    def lose(self, context_tokens: float, prefill: Prefill, now_s: float) -> None:
        """The engine failed a call. The call keeps its place for as long as an answer would have taken.

        So an engine that fails fast does not look idle.
        """
        self.outstanding -= 1
        self.queue.leave(prefill, now_s)
        until_s = prefill.sent_s + prefill.time_s + self.ledger.mean_output_tokens * self.iteration_s
        heappush(self._lost, (max(now_s, until_s), context_tokens))
        self.floor = None

    def begin_reported(self, context_tokens: float, prefill: Prefill | None, now_s: float) -> None:
        """The engine has a call that this gateway has not sent. Without a `prefill`, its prompt is computed already."""
        self.reported += 1
        self.calls += 1
        self.context_tokens += context_tokens
        if prefill is not None:
            self.queue.send(prefill, now_s)
        self.floor = None

    def end_reported(self, context_tokens: float, prefill: Prefill | None, now_s: float) -> None:
        """Such a call has ended."""
        self.reported -= 1
        self.calls -= 1
        self.context_tokens = self.context_tokens - context_tokens if self.calls else 0.0
        if prefill is not None:
            self.queue.leave(prefill, now_s)
        self.floor = None

    def use_report(self, batch_tokens: int = 0, *, urgent_first: bool = False, slots: int = 0, others: int = 0) -> None:
        """The engine has said how it makes its iterations, and what others have there; 0 tokens or slots: not known."""
        self.calls += others - self.others
        self.batch_tokens, self.slots, self.others = batch_tokens or DEFAULT_BATCH_TOKENS, slots, others
        self.urgent_first = urgent_first
        self.floor = None

    def take(self, tokens: float) -> float:
        """Take room for so many tokens of the `free_tokens`, or below zero give it back; returns what was taken."""
        if self.free_tokens is None:
            return 0.0
        taken_tokens = min(self.free_tokens, tokens)
        self.free_tokens -= taken_tokens
        if self.tiers.views:
            self.tiers.take(taken_tokens)
        return taken_tokens

    def refresh(self, now_s: float) -> None:
        """Take the latest pace. This comes about once a second."""
        self.slowness = self.pace.slowness(now_s)
        while self._lost and self._lost[0][0] <= now_s:
            context_tokens = heappop(self._lost)[1]
            self.calls -= 1
            self.context_tokens = self.context_tokens - context_tokens if self.calls else 0.0
        self.floor = None

    def observe_decode(
        self, time_s: float, iterations: int, begun_iteration_s: float, begun_computed_s: float, now_s: float
    ) -> None:
        """A call decoded for `time_s` and `iterations`. `sent_iteration_s` and `computed_s` were those at its begin.

        The cost model expects these iterations, and what was computed of prompts meanwhile.
        """
        decode_s = iterations * (begun_iteration_s + self.sent_iteration_s) / 2
        self.pace.observe(time_s, decode_s + self.computed_s(now_s) - begun_computed_s, now_s)

    # What policies read.

    def computed_s(self, now_s: float) -> float:
        """What prompts have added to iterations so far, by the cost model. Of the oldest, what it has behind it counts.

        Else an engine would look slow while it computes a prompt of ten seconds: the answers beside it take as long.
        """
        tokens, attention_s = self.queue.computed(now_s)
        return self.cost_model.marginal_s(tokens) + attention_s

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration in which all calls decode, at least one, by the cost model."""
        return self.cost_model.decode_iteration_s(max(1, self.calls), self.context_tokens)

    @property
    def sent_iteration_s(self) -> float:
        """The same of the calls that the engine was sent: what its pace is compared with."""
        calls = max(1, self.calls - self.queue.unsent)
        return self.cost_model.decode_iteration_s(calls, self.context_tokens - self.unsent_context_tokens)

    def find_floor(self) -> Floor:
        """What a new call costs here at least. It is computed when it is needed: a small fleet needs none."""
        queue = self.queue
        until_s, least_s = -inf, 0.0
        if (queue.unsent or queue.sent) and queue.expires_s == inf:
            drain_s = self.drain_s(queue.tokens) + queue.attention_s
            until_s, least_s = queue.head_s + drain_s, max(0.0, drain_s - queue.most_progress_s)
        self.floor = Floor(
            until_s,
            least_s,
            self.iteration_s,
            1 + LEFT_SHARE * self.calls if self.cost_model.deepens(self.context_tokens) else 0.0,
            self.calls,
            self.slowness,
        )
        return self.floor

    def queue_s(self, now_s: float, *, is_urgent: bool = False, passed_share: float = 0.0) -> float:
        """Seconds until the prompts that wait here are computed, by the cost model.

        Where the engine serves calls on time first, only these count for an `is_urgent` one. Of the prompts that wait
        in the gateway, `passed_share` is behind the call that this is asked for.
        """
        queue = self.queue
        if queue.expires_s <= now_s:
            queue.expire(now_s)
        if not queue.unsent and not queue.sent:
            return 0.0
        if is_urgent and self.urgent_first:
            queue.find_late(now_s)
            return self.drain_s(queue.on_time_tokens)
        unsent_share = 1.0 - passed_share
        tokens = queue.sent_tokens + round(unsent_share * (queue.tokens - queue.sent_tokens))
        attention_s = queue.sent_attention_s + unsent_share * (queue.attention_s - queue.sent_attention_s)
        return self.drain_s(tokens) + attention_s - queue.progress_s(now_s)

    def is_small(self, missed_tokens: int, cached_tokens: int) -> bool:
        """Whether a prompt of so many tokens adds little to the engine's iterations."""
        return self.slowness * self.cost_model.added_s(missed_tokens, cached_tokens)[0] <= SMALL_S

    def served_by_s(self, call: Call) -> float:
        """The time until which the engine serves the call before others; infinite if it does not."""
        return call.due_s if self.urgent_first else inf

    def precedence(self, call: Call, cached_tokens: int, now_s: float) -> Precedence:
        """The precedence of the call's prompt if it is sent at `now_s` and `cached_tokens` of it are cached."""
        if self.due_s(call, cached_tokens, now_s) > -inf:
            return Precedence.ON_TIME
        missed_tokens = call.prompt_tokens - cached_tokens
        return Precedence.SMALL if self.is_small(missed_tokens, cached_tokens) else Precedence.REST

    def due_s(self, call: Call, cached_tokens: int, now_s: float) -> float:
        """When the call's prompt is due, if it would be on time when sent at `now_s`; -inf if it would not."""
        if call.slo is None or not self.urgent_first or call.due_s == inf:
            return -inf
        prefill_s = self.cost_model.prefill_time_s(call.prompt_tokens - cached_tokens, cached_tokens)
        return call.due_s if now_s + prefill_s < call.due_s else -inf

    def _let_go(self, context_tokens: float) -> None:
        """A call waits in the gateway no more."""
        self.unsent_context_tokens = self.unsent_context_tokens - context_tokens if self.queue.unsent else 0.0

    def drain_s(self, tokens: int) -> float:
        """Seconds in which the engine computes `tokens` of prompts beside its decodes, without the prompts' attention.

        Each iteration has a token for each decode. The others are the prompts'.
        """
        costs, queue = self.cost_model, self.queue
        decodes = self.calls - queue.unsent - queue.sent
        per_iteration = self.batch_tokens - decodes
        if 0 < tokens < per_iteration:
            return costs.forward.at(tokens + decodes) / costs.efficiency
        full, rest = divmod(tokens, max(1, per_iteration))
        seconds = full * costs.forward.at(self.batch_tokens)
        if rest:
            seconds += costs.forward.at(rest + decodes)
        return seconds / costs.efficiency


def sent_calls(view: EngineView) -> int:
    """The calls that the engine was sent and has not ended."""
    return view.outstanding - view.queue.unsent
