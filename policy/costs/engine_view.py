"""One engine as placement sees it: its cost model, window, residency, room, outstanding work, and how fast it is.

The router calls the methods below "What changes" at each step of a call (placed, sent, first token, ended, failed) and
at each report of the engine. Policies read only what is below "What policies read". Seconds there are the cost model's:
policies multiply them by `slowness`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from plait.policy.costs.cost_model import CostModel
from plait.policy.costs.load import LoadLedger
from plait.policy.costs.pace import EnginePace
from plait.policy.costs.prefill_queue import Precedence, Prefill, PrefillQueue
from plait.policy.costs.tier_views import TierViews
from plait.policy.prefix.residency import Residency
from plait.policy.types import Call

RECENT = 0.1
"""The weight of one gap between first bytes in the moving mean. An iteration ends several prefills at once, so a single
gap says little.
"""


class FirstBytes:
    """The observed rate of first bytes, whatever the bottleneck is: prompts, decodes or a full KV cache.

    `gap_s` is the mean time between first bytes while a call waits for one; 0: not known yet.
    """

    __slots__ = ("_latest_s", "gap_s")

    def __init__(self) -> None:
        self.gap_s = 0.0
        self._latest_s = -inf

    def came(self, sent_s: float, now_s: float) -> None:
        """The first byte of a call that was sent at `sent_s` has arrived."""
        gap_s = now_s - max(sent_s, self._latest_s)  # time in which no call waited is no gap
        self.gap_s = self.gap_s + RECENT * (gap_s - self.gap_s) if self.gap_s else gap_s
        self._latest_s = now_s


DEFAULT_BATCH_TOKENS = 2048
"""The token budget of an iteration if the engine does not report it: vLLM's default for serving."""


SMALL_S = 0.1
"""A prompt is small if it adds at most this many seconds to an engine's iterations."""


@dataclass(slots=True, eq=False)
class EngineView:
    """One engine's figures. The router updates them; policies only read."""

    engine_id: str
    cost_model: CostModel
    ledger: LoadLedger
    residency: Residency

    free_tokens: float | None = None
    """The unused tokens of the KV cache, less the tokens booked since: as reported, or by the estimate from half of its
    size on. None: no call is expected to evict anything.
    """

    outstanding: int = 0
    """Calls that were placed here and have not ended."""

    context_tokens: float = 0.0
    """The sum over `calls` of the prompt and half of the expected answer."""

    unsent_context_tokens: float = 0.0
    """The part of `context_tokens` whose calls wait in the gateway."""

    queue: PrefillQueue = field(default_factory=PrefillQueue)

    batch_tokens: int = DEFAULT_BATCH_TOKENS
    """The token budget of an iteration."""

    slots: int = 0
    """The most calls that run at a time; 0: not known."""

    others: int = 0
    """The engine's calls that this gateway has not sent, where the engine reports only their number."""

    reported: int = 0
    """The engine's calls that this gateway has not sent, where the engine reports each one."""

    gateways: int = 1
    """The gateways that send calls to this engine, this one included."""

    lines: int = 0
    """The part of `calls` that are lines of batches."""

    reported_lines: int = 0
    """The part of `reported` that are lines."""

    line_tokens: float = 0.0
    """The part of `context_tokens` of the lines."""

    online_s: float = -inf
    """When the latest call came that is no line."""

    urgent_first: bool = False
    """Whether the engine's local scheduler serves calls first that can still meet a TTFT or JCT."""

    pace: EnginePace = field(default_factory=EnginePace)

    slowness: float = 1.0
    """The latest figure of `pace`."""

    siblings: Sequence[EngineView] = ()
    """The other data-parallel ranks of its server. With experts, ranks step together: a prompt on one stalls all."""

    first_bytes: FirstBytes = field(default_factory=FirstBytes)

    tiers: TierViews = field(init=False)
    """The tiers below the accelerator."""

    calls: int = field(init=False)
    """`outstanding` + `others` + `reported` + the recently failed calls in `_lost`."""

    _lost: list[tuple[float, float]] = field(default_factory=list)
    """A heap of failed calls: (when an answer would have ended, context tokens)."""

    def __post_init__(self) -> None:
        self.calls = self.outstanding
        self.tiers = TierViews(self.residency, self.cost_model.links)

    # What changes.

    def begin(self, context_tokens: float, prefill: Prefill, sent_s: float | None = None) -> None:
        """A call was placed here, and sent at `sent_s`; None: the call waits in the gateway."""
        self.outstanding += 1
        self.calls += 1
        self.context_tokens += context_tokens
        if prefill.is_line:
            self._count_line(1, context_tokens)
            return
        self.online_s = prefill.sent_s
        if sent_s is None:
            self.unsent_context_tokens += context_tokens
            self.queue.add(prefill)
        else:
            self.queue.send(prefill, sent_s)

    def send(self, context_tokens: float, prefill: Prefill, now_s: float) -> None:
        """A call that waited in the gateway was sent to the engine."""
        self.queue.send(prefill, now_s)
        self._let_go(context_tokens)

    def compute(self, prefill: Prefill, now_s: float) -> None:
        """A call's first token has arrived."""
        if prefill.is_line:
            self.queue.computed_tokens += prefill.tokens
            self.queue.computed_attention_s += prefill.attention_s
            return
        self.first_bytes.came(prefill.sent_s, now_s)
        self.queue.leave(prefill, now_s, is_computed=True)

    def end(self, context_tokens: float, prefill: Prefill, now_s: float) -> None:
        self.outstanding -= 1
        self.calls -= 1
        self.context_tokens = self.context_tokens - context_tokens if self.calls else 0.0
        if prefill.is_line:
            self._count_line(-1, context_tokens)
            return
        unsent = self.queue.unsent
        self.queue.leave(prefill, now_s)
        if self.queue.unsent < unsent:
            self._let_go(context_tokens)

    def lose(self, context_tokens: float, prefill: Prefill, now_s: float) -> None:
        """The engine failed a call. The call still counts until an answer would have ended.

        Otherwise an engine that fails its calls fast would look idle and attract all others.
        """
        self.outstanding -= 1
        self.queue.leave(prefill, now_s)
        if prefill.is_line:
            self._count_line(-1, context_tokens)
        until_s = prefill.sent_s + prefill.time_s + self.ledger.mean_output_tokens * self.iteration_s
        heappush(self._lost, (max(now_s, until_s), context_tokens))

    def begin_reported(
        self, context_tokens: float, prefill: Prefill | None, now_s: float, *, is_line: bool = False
    ) -> None:
        """The engine reports a call that this gateway has not sent. No `prefill`: its prompt is computed already, or it
        is a line.
        """
        self.reported += 1
        self.calls += 1
        self.context_tokens += context_tokens
        if is_line:
            self.reported_lines += 1
            self._count_line(1, context_tokens)
        else:
            self.online_s = now_s
        if prefill is not None:
            self.queue.send(prefill, now_s)

    def end_reported(
        self, context_tokens: float, prefill: Prefill | None, now_s: float, *, is_line: bool = False
    ) -> None:
        """A call of `begin_reported` has ended."""
        if is_line:
            self.reported_lines -= 1
            self._count_line(-1, context_tokens)
        self.reported -= 1
        self.calls -= 1
        self.context_tokens = self.context_tokens - context_tokens if self.calls else 0.0
        if prefill is not None:
            self.queue.leave(prefill, now_s)

    def use_report(self, batch_tokens: int = 0, *, urgent_first: bool = False, slots: int = 0, others: int = 0) -> None:
        """The engine has reported its limits, and how many calls of others it has; 0 tokens or slots: not known."""
        self.calls += others - self.others
        self.batch_tokens, self.slots, self.others = batch_tokens or DEFAULT_BATCH_TOKENS, slots, others
        self.urgent_first = urgent_first

    def take(self, tokens: float) -> float:
        """Take up to `tokens` of the `free_tokens`, and return how many; a negative number gives tokens back."""
        if self.free_tokens is None:
            return 0.0
        taken_tokens = min(self.free_tokens, tokens)
        self.free_tokens -= taken_tokens
        if self.tiers.views:
            self.tiers.take(taken_tokens)
        return taken_tokens

    def refresh(self, now_s: float) -> None:
        """Called about once a second: takes the latest pace and forgets failed calls whose time is over."""
        self.slowness = self.pace.slowness(now_s)
        while self._lost and self._lost[0][0] <= now_s:
            context_tokens = heappop(self._lost)[1]
            self.calls -= 1
            self.context_tokens = self.context_tokens - context_tokens if self.calls else 0.0

    def observe_decode(
        self, time_s: float, iterations: int, begun_iteration_s: float, begun_computed_s: float, now_s: float
    ) -> None:
        """A call decoded for `time_s` in `iterations`; `begun_*` are the figures at the begin of its decode.

        The cost model predicts the iterations, at the mean of their length at begin and end, plus the prompts that the
        engine computed in this time. The pace compares `time_s` with this prediction.
        """
        decode_s = iterations * (begun_iteration_s + self.sent_iteration_s) / 2
        self.pace.observe(time_s, decode_s + max(0.0, self.computed_s(now_s) - begun_computed_s), now_s)

    # What policies read.

    def computed_s(self, now_s: float) -> float:
        """The seconds that prefills have added to iterations so far, by the cost model.

        The finished part of the oldest prefill counts. Without it, an engine would look slow during a prefill of ten
        seconds, because the decodes beside it take ten seconds longer.
        """
        tokens, attention_s = self.queue.computed(now_s)
        return self.cost_model.marginal_s(tokens) + attention_s

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration in which all calls decode, at least one, by the cost model."""
        return self.cost_model.decode_iteration_s(max(1, self.calls), self.context_tokens)

    @property
    def sent_iteration_s(self) -> float:
        """`iteration_s` of only the calls that the engine was sent. The pace compares decodes with this prediction."""
        calls = max(1, self.calls - self.queue.unsent)
        return self.cost_model.decode_iteration_s(calls, self.context_tokens - self.unsent_context_tokens)

    def queue_s(self, now_s: float, *, is_urgent: bool = False, overtaken_share: float = 0.0) -> float:
        """Seconds until the queued prompts are computed, by the cost model, for a call to be placed.

        An urgent call waits only for prompts on time if the engine serves those first. `overtaken_share` is the part of
        the prefills in the gateway's line that the call overtakes.
        """
        queue = self.queue
        if queue.expires_s <= now_s:
            queue.expire(now_s)
        if not queue.unsent and not queue.sent:
            return 0.0
        if is_urgent and self.urgent_first:
            queue.find_late(now_s)
            return self.drain_s(queue.on_time_tokens)
        unsent_share = 1.0 - overtaken_share
        tokens = queue.sent_tokens + round(unsent_share * (queue.tokens - queue.sent_tokens))
        attention_s = queue.sent_attention_s + unsent_share * (queue.attention_s - queue.sent_attention_s)
        return self.drain_s(tokens) + attention_s - queue.progress_s(now_s)

    def is_small(self, missed_tokens: int, cached_tokens: int) -> bool:
        """Whether a prompt adds at most `SMALL_S` to the engine's iterations."""
        return self.slowness * self.cost_model.added_s(missed_tokens, cached_tokens)[0] <= SMALL_S

    def served_by_s(self, call: Call, now_s: float) -> float:
        """The deadline by which the engine's scheduler orders the call; infinite if it ignores deadlines, and while the
        deadline is far.
        """
        return call.due_s if self.urgent_first and call.is_urgent(now_s) else inf

    def precedence(self, call: Call, cached_tokens: int, now_s: float) -> Precedence:
        """The precedence of the call's prompt if it is sent at `now_s` and `cached_tokens` of it are cached."""
        if self.due_s(call, cached_tokens, now_s) > -inf:
            return Precedence.ON_TIME
        missed_tokens = call.prompt_tokens - cached_tokens
        return Precedence.SMALL if self.is_small(missed_tokens, cached_tokens) else Precedence.REST

    def due_s(self, call: Call, cached_tokens: int, now_s: float) -> float:
        """The deadline of the call's prompt; -inf without one, while it is far, or if the prefill would miss it when
        sent at `now_s`.
        """
        if call.slo is None or not self.urgent_first or not call.is_urgent(now_s):
            return -inf
        prefill_s = self.cost_model.prefill_time_s(call.prompt_tokens - cached_tokens, cached_tokens)
        return call.due_s if now_s + prefill_s < call.due_s else -inf

    def _count_line(self, sign: int, context_tokens: float) -> None:
        self.lines += sign
        self.line_tokens = self.line_tokens + sign * context_tokens if self.lines else 0.0

    def _let_go(self, context_tokens: float) -> None:
        """A call has left the gateway's line: sent, or ended in it."""
        self.unsent_context_tokens = self.unsent_context_tokens - context_tokens if self.queue.unsent else 0.0

    def drain_s(self, tokens: int) -> float:
        """Seconds in which the engine computes `tokens` of prompts beside its decodes, without the prompts' attention.

        Each decode takes one token of an iteration's budget. Prompts get the rest.
        """
        costs, queue = self.cost_model, self.queue
        decodes = self.calls - queue.unsent - queue.sent
        per_iteration = self.batch_tokens - decodes
        if 0 < tokens < per_iteration:
            return costs.prompts.at(tokens + decodes) / costs.efficiency
        full, rest = divmod(tokens, max(1, per_iteration))
        seconds = full * costs.prompts.at(self.batch_tokens)
        if rest:
            seconds += costs.prompts.at(rest + decodes)
        return seconds / costs.efficiency


def sent_calls(view: EngineView) -> int:
    """The calls of this gateway that the engine was sent and has not ended."""
    return view.outstanding - view.queue.unsent
