"""One engine of the fleet: its view for the policies, its health, its reports, and the calls that are booked on it.

The engine is a part of the router's state: only the router and its parts change it. Each step of a booked call updates
three things together: the view (work and residency), the cache (expected and confirmed blocks), and the progress.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import inf
from typing import Final, NamedTuple

from plait.backends.protocol.cache_state import CacheState
from plait.backends.protocol.dialects import DIALECTS
from plait.backends.protocol.engine_counts import EngineCounts, EngineSizes
from plait.gateway.fleet.booking import Booking, BookingState, CallUsage, Failure, Progress
from plait.gateway.fleet.engine_cache import EngineCache
from plait.gateway.fleet.health import Health, HealthState, Offer
from plait.gateway.fleet.tokenizer_agreement import Agreement
from plait.policy.costs.engine_view import EngineView, sent_calls
from plait.policy.costs.prefill_queue import Prefill
from plait.policy.prefix.learned_cache import Reach
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.types import Call, Placement

SKEW: Final = 1
"""An engine's count of calls may differ from the present one by this many: calls came or ended since it counted."""


class OtherCount(NamedTuple):
    """Different counts of the tokens in one prompt."""

    engine_tokens: int
    gateway_tokens: int

    def __str__(self) -> str:
        return (
            f"the engine counts {self.engine_tokens} tokens in a prompt in which the gateway counts "
            f"{self.gateway_tokens}"
        )


class StockKind(NamedTuple):
    """An engine's key in `DIALECTS`, and the sizes that the engine gives."""

    kind: str
    sizes: EngineSizes


@dataclass(slots=True, eq=False)
class FleetEngine:
    view: EngineView
    health: Health
    cache: EngineCache
    progress: Progress

    address: str = ""
    """The name of the configured address. Each data-parallel rank behind it is an engine."""

    host: str = ""
    """The host of the address."""

    is_ranked: bool = False
    """Whether the address has other ranks."""

    offer: Offer = field(default_factory=Offer)

    draining: bool = False
    """It gets no new calls."""

    asked_s: float = inf
    """When the present trial of the quiet engine began; infinite: the engine is not quiet."""

    stalled: bool = False
    """The trial has no answer so far: new calls come here only if there is no other engine."""

    process: str | None = None
    """The epoch of its reports, which names a process."""

    same_as: str | None = None
    """The engine that is the same process under another address, and gets the calls of both."""

    reported_s: float = -inf
    """When the latest report, or the latest counts, were requested."""

    complete_s: float = -inf
    """When the latest of them were requested that had all calls that the engine was sent before."""

    health_since: float = 0.0
    """When its health last changed, in seconds since 1970."""

    last_error: str = ""

    last_detail: str = ""
    """Details of the last error that only operators see, such as addresses."""

    mismatches: dict[str, str | OtherCount] = field(default_factory=dict)
    """How it differs from what the gateway assumes, in words, by the keys of `comparisons.HINTS`."""

    contradictions: int = 0
    """Answers in a row whose cached tokens contradict the reports."""

    contradicted_s: float = -inf
    """When the last of these answers came."""

    served_s: float = -inf
    """When it last sent a first byte or a whole answer."""

    doubts: int = 0
    """Failed calls of which it is open whether the engine or the request is at fault: other engines are asked."""

    counts: EngineCounts | None = None
    """The counts of an engine without reports."""

    stock: StockKind | None = None
    """The kind of an engine without an adapter."""

    compared: bool = False
    """Whether its tokenizer was compared."""

    refused_fields: dict[str, Sequence[str]] = field(default_factory=dict)
    """Fields of the gateway's own that it refuses, each with the words that it takes there."""

    @property
    def takes_calls(self) -> bool:
        return self.health.takes_calls and not self.is_aside

    @property
    def kind(self) -> str | None:
        """Its key in `DIALECTS`, as its adapter reports or as it was recognised; None: not known."""
        return self.cache.kind or (None if self.stock is None else self.stock.kind)

    @property
    def tier(self) -> str | None:
        """How much its adapter does (`cache_state.TIERS`), by the latest report; None without one."""
        report = self.cache.last_report
        return None if report is None else report.scheduler.tier

    @property
    def is_doubted(self) -> bool:
        """Whether so many doubts are open that calls go to other engines until they are decided."""
        return self.doubts >= self.health.limits.consecutive_failures

    def serves(self, now_s: float) -> bool:
        """Whether calls succeed there: it has answered one within the window of its health, and failed none since."""
        return self.health.state is HealthState.UP and now_s - self.served_s <= self.health.limits.window_s

    def obeys(self, route: str) -> bool:
        """Whether a call on `route` runs on this rank. vLLM and SGLang ignore the header on some routes."""
        row = DIALECTS.get(self.kind or "")
        return not self.is_ranked or self.cache.kind is not None or row is None or route in row.ranked

    @property
    def is_aside(self) -> bool:
        """Whether it gets no new calls, whatever its health is."""
        return self.draining or self.same_as is not None

    @property
    def whole_error(self) -> str:
        """The last error with its detail, for operators."""
        return ": ".join(filter(None, (self.last_error, self.last_detail)))

    @property
    def why_down(self) -> str:
        """Why its latest probe failed, if it is down. Other errors may quote a request."""
        return self.whole_error if self.health.state is HealthState.DOWN else ""

    def went_wrong(self, error: str, detail: str = "") -> None:
        self.last_error, self.last_detail = error, detail

    # Calls.

    def book(
        self, call: Call, placement: Placement, tree: PrefixTree, now_s: float, *, waits: bool, tenant: str
    ) -> Booking:
        """Expect the prompt's blocks, and count the call's work. If it `waits`, `send` follows."""
        view, reach, left, ends = self.view, None, None, self.view.residency.ends
        if ends is not None or not (self.cache.reports or self.cache.learned.is_sure):
            placement, reach, left = self._predicted(call, placement, tree)
        missed_tokens = placement.missed_tokens
        leaf = tree.insert(call.block_hashes)
        if view.tiers.views:
            placement = view.tiers.expect(placement, leaf, call.block_tokens, is_booked=False)
        leaf.use(now_s)
        view.residency.book(leaf, waits=waits)
        if reach is not None:
            view.tiers.lowest.mark(leaf, reach.anywhere, 1, leaf.end_blocks)
        entry = view.ledger.book(leaf, missed_tokens, call.prompt_tokens, now_s)
        context_tokens = call.prompt_tokens + view.ledger.mean_output_tokens / 2
        taken_tokens = view.take(missed_tokens)
        attention_s = view.cost_model.added_s(missed_tokens, placement.cached_tokens)[1]
        answer_s, limit = 0.0, call.output_limit
        if not call.streamed:
            answer_s = inf if limit is None else view.cost_model.decode_time_s(limit, call.prompt_tokens)
        is_small, due_s = view.is_small(missed_tokens, placement.cached_tokens), view.served_by_s(call, now_s)
        prefill = Prefill(
            missed_tokens, entry.prefill_s, attention_s, now_s, call.streamed, due_s < inf, due_s, is_small, tenant,
            is_line=call.is_line,
        )  # fmt: skip
        number = self.cache.report_number
        state = BookingState.WAITING if waits else BookingState.SENT
        booking = Booking(
            call, placement, leaf, entry, context_tokens, now_s, taken_tokens, number, prefill, reach, answer_s, state
        )
        if ends is not None and left is not None:
            ends.expect(leaf, left, call.tokens, booking.computed_at_s)
        if call.slo is not None and call.slo.tpot_s is not None and self._misses(call.slo.tpot_s, call):
            booking.tpot_is_missed, booking.placement = True, placement._replace(meets_slo=False)
        view.begin(context_tokens, prefill, None if waits else now_s)
        if not waits:
            self.progress.sent(booking, now_s)
            if self.cache.sums is not None:
                self.cache.sums.open.append(booking)
            if view.tiers.views:
                view.tiers.send(placement, now_s)
        return booking

    def _predicted(
        self, call: Call, placement: Placement, tree: PrefixTree
    ) -> tuple[Placement, Reach | None, Collection[int] | None]:
        """(the placement with the hit that is expected, not all leading blocks; what an estimated cache has of the
        prompt; the ends that the call will leave).
        """
        path, ends = tree.match(call.block_hashes), self.view.residency.ends
        if ends is None:
            reach = self.view.tiers.lowest.reach(path)
            found_tokens = min(call.cacheable_blocks, self.cache.learned.expected(reach)) * call.block_tokens
            return placement.finding(found_tokens, call.prompt_tokens), reach, None
        hit = ends.hit(path, call.prompt_tokens, call.tokens)
        left = ends.rule.left_by(call.prompt_tokens, hit.leading_tokens)
        return placement.finding(hit.tokens, call.prompt_tokens), None, left

    def _misses(self, tpot_s: float, call: Call) -> bool:
        """Whether no iteration here is as short as a promised TPOT."""
        view = self.view
        least_s = view.slowness * view.cost_model.decode_iteration_s(1, call.prompt_tokens)
        return call.output_limit != 1 and tpot_s < least_s

    def send(self, booking: Booking, now_s: float) -> None:
        """The engine is sent a call that has waited. Its cached prefix may have changed since the placement."""
        booking.enter(BookingState.SENT)
        view = self.view
        self._look_again(booking, now_s)
        if view.tiers.views:
            found = view.tiers.expect(booking.placement, booking.leaf, booking.call.block_tokens, is_booked=True)
            booking.placement = view.tiers.send(found, now_s)
        view.residency.send(booking.leaf)
        self.progress.sent(booking, now_s)
        if self.cache.sums is not None:
            self.cache.sums.open.append(booking)
        view.send(booking.context_tokens, booking.prefill, now_s)

    def ready_tokens(self, booking: Booking, now_s: float) -> int:
        """How many tokens of a waiting call's prompt will be cached once the prompts before it are computed."""
        if not self.cache.reports and not self.cache.learned.is_sure:  # nodes may end where only this call left them
            return booking.placement.cached_tokens
        ends, call = self.view.residency.ends, booking.call
        if ends is not None:
            return ends.hit(booking.leaf.segments(), call.prompt_tokens, call.tokens, sent=True).tokens
        blocks = self.view.tiers.ready_blocks(booking.call, booking.leaf, self.view.cost_model, now_s)
        return blocks * booking.call.block_tokens

    def _look_again(self, booking: Booking, now_s: float) -> None:
        """Update a waiting call's cached tokens and prefill."""
        cached_tokens, costs, call = self.ready_tokens(booking, now_s), self.view.cost_model, booking.call
        if cached_tokens == booking.placement.cached_tokens:
            return
        tokens = call.prompt_tokens - cached_tokens
        booking.placement = booking.placement.finding(cached_tokens, call.prompt_tokens)
        before, attention_s = booking.prefill, costs.added_s(tokens, cached_tokens)[1]
        time_s, is_small = costs.prefill_time_s(tokens, cached_tokens), self.view.is_small(tokens, cached_tokens)
        computed = replace(before, tokens=tokens, time_s=time_s, attention_s=attention_s)
        booking.prefill = replace(computed, is_on_time=before.due_s < inf, is_small=is_small)
        self.view.queue.leave(before, booking.sent_s)
        self.view.queue.add(booking.prefill)

    def refine(self, booking: Booking, call: Call, now_s: float) -> None:
        """The call's objectives have changed."""
        booking.call = call
        self.view.queue.mark(booking.prefill, self.view.served_by_s(call, now_s))

    def first_token(self, booking: Booking, now_s: float) -> None:
        """The first byte arrived, so the prompt has been computed."""
        booking.enter(BookingState.STREAMING)
        booking.first_token_s = self.served_s = now_s
        self.progress.came(booking, now_s, is_whole=False)
        if self.cache.reports:
            self.cache.computed(booking)
        view = self.view
        view.compute(booking.prefill, now_s)
        booking.computed_s, booking.iteration_s = view.computed_s(now_s), view.sent_iteration_s
        if booking.call.streamed:
            view.ledger.answered(booking.entry, now_s)

    def settle(self, booking: Booking, usage: CallUsage | None, now_s: float) -> None:
        """As `Router.settle`."""
        self.served_s = now_s
        if usage is None:
            self.release(booking, now_s, delivered=True)
            self.health.succeeded(booking.sent_s, now_s)
            return
        booking.enter(BookingState.SETTLED)
        self.progress.came(booking, now_s, is_whole=True)
        self.progress.answered(booking, usage.output_tokens, now_s)
        self.health.succeeded(booking.sent_s, now_s)
        self.cache.ended(booking, usage, now_s)
        cached = booking.placement.cached_tokens if usage.cached_tokens is None else usage.cached_tokens
        view = self.view
        view.ledger.settle(booking.entry, max(0, usage.prompt_tokens - cached), usage.output_tokens)
        begun_s = None if booking.call.is_line else booking.first_token_s
        if begun_s is not None and usage.output_tokens > 1:  # the first token ends the prefill
            time_s = now_s - begun_s
            view.observe_decode(time_s, usage.output_tokens - 1, booking.iteration_s, booking.computed_s, now_s)
            if not self.cache.reports:  # the prefill was not as predicted, for the calls beside it
                view.queue.computed_tokens += booking.placement.cached_tokens - cached
        view.end(booking.context_tokens, booking.prefill, now_s)

    def fail(self, booking: Booking, now_s: float) -> None:
        """The engine failed the call. Its cost stays for a time, so that fast failures do not look cheap."""
        booking.enter(BookingState.RELEASED)
        self.progress.leave(booking)
        self.view.lose(booking.context_tokens, booking.prefill, now_s)
        self.cache.given_up(booking)

    def release(self, booking: Booking, now_s: float, *, delivered: bool, refused: bool = False) -> None:
        """The call ended without usage. If it was not delivered, its booking is undone.

        The cost stays if the engine `refused` this call and the one before: otherwise the engine would look idle and
        attract all calls.
        """
        booking.enter(BookingState.RELEASED)
        view, again = self.view, refused and self.progress.refused_again()
        if not delivered and not again:
            if view.ledger.cancel(booking.entry):
                view.residency.unshare(booking.leaf)
            if self.cache.report_number == booking.report_number:  # a later report has counted the free tokens itself
                view.take(-booking.taken_tokens)
        self.progress.leave(booking)
        (view.lose if again else view.end)(booking.context_tokens, booking.prefill, now_s)
        if delivered:
            self.cache.ended(booking, None, now_s)
        else:
            self.cache.given_up(booking)

    # Reports.

    def report(self, state: CacheState, requested_s: float, agreement: Agreement, now_s: float) -> None:
        """Apply a cache-state report that was requested at `requested_s`; raises ValueError as the cache does."""
        if self.cache.report(state, requested_s, agreement, now_s):
            self.progress.byte(requested_s)
        self._has(state.queue.waiting + state.queue.running, requested_s)

    def _has(self, calls: int, asked_s: float) -> None:
        """The engine had this many calls after `asked_s`."""
        self.reported_s = asked_s
        if calls >= self.progress.sent_by(asked_s):
            self.complete_s = asked_s

    def counted(self, counts: EngineCounts | None, asked_s: float) -> None:
        """Use the counts that the engine made after `asked_s`; None: it no longer counts.

        While calls wait in the engine, its running calls fill all of its slots. Work since the last counts is a sign of
        life, as a byte of an answer is.
        """
        view, before, self.counts = self.view, self.counts, counts
        slots = 0 if self.stock is None else self.stock.sizes.slots or 0
        self.cache.counted(counts, before, asked_s)
        if counts is None:
            view.use_report(slots=slots)
            return
        if before is not None and counts.work != before.work:
            self.progress.byte(asked_s)
        if counts.waiting is not None:
            self._has(counts.running + counts.waiting, asked_s)
        others = max(0, counts.running + (counts.waiting or 0) - sent_calls(view) - SKEW)
        view.use_report(slots=counts.running if counts.waiting else counts.slots or slots, others=others)
        if counts.kv_tokens is not None:
            self.cache.use_size(counts.kv_tokens)

    def recognised(self, stock: StockKind | None) -> None:
        """The engine has no adapter, and was recognised as this kind; None: no longer.

        A model that is no longer loaded keeps its known context.
        """
        before, self.stock = self.stock, stock
        if stock is None:
            if self.counts is None and self.cache.kind is None:
                self.view.use_report()
            return
        if before is not None and before.kind == stock.kind:
            contexts = {**before.sizes.contexts, **stock.sizes.contexts}
            self.stock = stock._replace(sizes=replace(stock.sizes, contexts=contexts))
        if self.counts is None:
            self.view.use_report(slots=stock.sizes.slots or 0)
        if stock.sizes.kv_tokens is not None:
            self.cache.use_size(stock.sizes.kv_tokens)

    def age(self, now_s: float) -> None:
        """Drop placements older than the window, and take the engine's latest pace."""
        self.view.refresh(now_s)
        for entry in self.view.ledger.age(now_s):
            self.view.residency.unshare(entry.leaf)


def engine_status(engine: FleetEngine) -> dict[str, str | None]:
    """The engine's health for `/ready` and the admin API: state, cause, since when, and the last error."""
    since = datetime.fromtimestamp(engine.health_since, UTC).isoformat(timespec="seconds")
    state, cause, error = engine.health.state, engine.health.cause, engine.last_error
    return {"health": state.value, "cause": cause or None, "since": since, "last_error": error or None}


def degradation(engine: FleetEngine) -> str | None:
    """Why the gateway does not know the engine's cache, or predicts it wrongly; None: neither is the case."""
    return "; ".join(map(str, filter(None, (engine.cache.problem, *engine.mismatches.values())))) or None


class Doubt(NamedTuple):
    """An engine failed a call, and it is open whether the engine or the request is at fault."""

    engine: FleetEngine
    booking: Booking
    failure: Failure
    said: str
    """What the engine answered, without what differs between engines."""
