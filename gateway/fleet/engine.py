"""One engine of the fleet: its view for the policies, its health, its reports, and the calls that are booked on it.

Part of the router's state: only the router calls the methods that change it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

import msgspec

from plait.backends.protocol.cache_state import CacheState, EngineKind
from plait.gateway.fleet.booking import Booking, BookingState, CallUsage
from plait.gateway.fleet.health import Health
from plait.gateway.fleet.offer import Offer
from plait.gateway.fleet.progress import Progress
from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.prefill_queue import Prefill
from plait.policy.prefix.expected_evictions import ExpectedEvictions
from plait.policy.prefix.node import Node
from plait.policy.types import Call, Placement

SLO_SCHEDULER = "slo"
"""The local scheduler that serves calls with a TTFT before others, by its name in `local_scheduler.SCHEDULERS`."""


@dataclass(slots=True, eq=False)
class FleetEngine:
    """One engine. `kv_tokens` bounds its estimated cache while the engine does not report; None: not known.

    `offer` is what it serves. `reports` says whether the engine
    reports its cache; None: not known yet. `last_report` is the latest report. `unconfirmed` holds the end time and
    the prefix of each ended call, until a report that was requested after that time confirms the prefix. A `draining`
    engine gets no new calls; one that is `stalled` gets them if there is no other. `evictions` are expected for the
    prompts that it still has to compute. `problem` says why an engine that has our plugin has no usable report.
    """

    view: EngineView
    health: Health
    block_tokens: int
    kv_tokens: int | None
    offer: Offer = field(default_factory=Offer)
    progress: Progress = field(default_factory=Progress)
    epoch: str | None = None
    cursor: int | None = None
    reports: bool | None = None
    kind: EngineKind | None = None
    problem: str | None = None
    last_report: CacheState | None = None
    report_number: int = 0
    unconfirmed: deque[tuple[float, Node]] = field(default_factory=deque)
    draining: bool = False
    stalled: bool = False
    evictions: ExpectedEvictions = field(init=False)

    def __post_init__(self) -> None:
        self.evictions = ExpectedEvictions(self.view.residency, self.block_tokens)

    @property
    def takes_calls(self) -> bool:
        """Whether a call may be placed here now."""
        return self.health.takes_calls and not self.draining

    # Calls.

    def book(self, call: Call, placement: Placement, leaf: Node, now_s: float) -> Booking:
        """Expect the prompt's blocks, which end at `leaf`, and count the call's work."""
        view, missed_tokens = self.view, placement.missed_tokens
        view.residency.book(leaf)
        entry = view.ledger.book(leaf, missed_tokens, call.prompt_tokens, now_s)
        context_tokens = call.prompt_tokens + view.ledger.mean_output_tokens / 2
        taken_tokens = 0.0
        if view.free_tokens is not None:
            taken_tokens = min(view.free_tokens, missed_tokens)
            view.free_tokens -= taken_tokens
        attention_s = view.cost_model.attention_time_s(missed_tokens, placement.cached_tokens)
        prefill = Prefill(missed_tokens, entry.prefill_s, attention_s, now_s, call.streamed, _is_urgent(call))
        booking = Booking(
            call, placement, leaf, entry, context_tokens, now_s, taken_tokens, self.report_number, prefill
        )
        self.evictions.begin(booking, leaf, call.prompt_tokens)
        self.progress.book(booking, entry.prefill_s, _answer_s(call, view))
        view.begin(context_tokens, prefill)
        return booking

    def refine(self, booking: Booking, call: Call) -> None:
        """The call's objectives have changed."""
        booking.call = call
        self.view.queue.mark(booking.prefill, is_urgent=_is_urgent(call))

    def first_token(self, booking: Booking, now_s: float) -> None:
        """The prompt has been computed."""
        booking.enter(BookingState.STREAMING)
        booking.first_token_s = now_s
        self.progress.first_byte(booking, now_s)
        view = self.view
        view.compute(booking.prefill, now_s)
        booking.computed_s, booking.iteration_s = view.computed_s, view.iteration_s
        if booking.call.streamed:
            view.ledger.answered(booking.entry, now_s)
        self.evictions.computed(booking)

    def settle(self, booking: Booking, usage: CallUsage, now_s: float) -> None:
        """The call ended; the engine's token counts replace the predicted ones."""
        booking.enter(BookingState.SETTLED)
        cached = booking.placement.cached_tokens if usage.cached_tokens is None else usage.cached_tokens
        view = self.view
        view.ledger.settle(booking.entry, max(0, usage.prompt_tokens - cached), usage.output_tokens)
        if booking.first_token_s is not None and usage.output_tokens > 1:
            time_s = now_s - booking.first_token_s
            view.observe_decode(time_s, usage.output_tokens - 1, booking.iteration_s, booking.computed_s, now_s)
        self.progress.answered(booking, now_s)
        self._leave(booking, now_s, stored=True)

    def fail(self, booking: Booking, now_s: float) -> None:
        """The engine failed the call. Its cost stays for a time: a fast failure must not look cheap."""
        booking.enter(BookingState.RELEASED)
        self._leave(booking, now_s, stored=False, is_lost=True)

    def release(self, booking: Booking, now_s: float, *, delivered: bool, refused: bool = False) -> None:
        """The call ended without usage. If it was not delivered, its booking is undone.

        Its cost stays if the engine `refused` one call after the other: it must not look idle and draw all calls.
        """
        booking.enter(BookingState.RELEASED)
        view, again = self.view, refused and self.progress.refused_again()
        if not delivered and not again:
            if view.ledger.cancel(booking.entry):
                view.residency.unshare(booking.leaf)
            if view.free_tokens is not None and self.report_number == booking.report_number:
                view.free_tokens += booking.taken_tokens
        self._leave(booking, now_s, stored=delivered, is_lost=again)

    # Reports.

    def report(self, state: CacheState, requested_s: float) -> None:
        """Apply a cache-state report that was requested at `requested_s`.

        Raises ValueError for a report that cannot be true, or in blocks that differ from the tree's. The engine's cache
        is estimated from then on.
        """
        try:
            state.check()
            self._apply(state, requested_s)
        except ValueError:
            self.view.residency.resident.clear()
            self.no_reports()
            raise

    def _apply(self, state: CacheState, requested_s: float) -> None:
        if state.granularity_tokens != self.block_tokens:
            raise ValueError(
                f"engine {self.view.engine_id} reports its cache in blocks of {state.granularity_tokens} tokens, "
                f"but the prefix tree has blocks of {self.block_tokens}; its cache is estimated instead"
            )
        if self.last_report is None or (state.cursor, state.iteration) != (
            self.last_report.cursor,
            self.last_report.iteration,
        ):
            self.progress.byte(requested_s)
        residency = self.view.residency
        if state.snapshot or state.epoch != self.epoch:
            residency.resident.clear()
        residency.resident.apply(state.removed, ((run.parent, run.hashes) for run in state.stored))
        self.reports, self.epoch, self.cursor, self.kind = True, state.epoch, state.cursor, state.kind
        self.problem = None
        self.view.free_tokens = float(state.kv_free_tokens)
        self.view.use_report(state.iteration.budget_tokens, urgent_first=state.scheduler.policy == SLO_SCHEDULER)
        self.last_report = msgspec.structs.replace(state, stored=[], removed=[])
        self.report_number += 1
        while self.unconfirmed and self.unconfirmed[0][0] <= requested_s:
            residency.unbook(self.unconfirmed.popleft()[1])
        self.evictions.update(state.kv_free_tokens)

    def no_reports(self, problem: str | None = None) -> None:
        """The engine has no usable cache-state report. Its cache is estimated from the calls placed there."""
        self.problem = problem
        self.reports, self.cursor, self.epoch, self.kind = False, None, None, None
        self.view.free_tokens = self.last_report = None
        self.report_number += 1
        self.evictions.update(None)
        while self.unconfirmed:
            self._assume_stored(self.unconfirmed.popleft()[1])

    def age(self, now_s: float) -> None:
        """Drop placements older than the window, and take the engine's latest pace."""
        self.view.refresh(now_s)
        for entry in self.view.ledger.age(now_s):
            self.view.residency.unshare(entry.leaf)

    def forget_cache(self) -> None:
        """Another process serves from now on. Nothing is known of its cache, but calls are still booked here."""
        self.view.residency.resident.clear()
        while self.unconfirmed:
            self.view.residency.unbook(self.unconfirmed.popleft()[1])
        self.no_reports()
        self.reports = None

    def check(self) -> None:
        """Assert the invariants; for tests."""
        self.view.residency.check()
        self.view.ledger.check()
        assert self.view.outstanding >= len(self.view.queue)
        self.progress.check(self.view.outstanding)
        self.view.queue.check()

    def _leave(self, booking: Booking, now_s: float, *, stored: bool, is_lost: bool = False) -> None:
        """Remove an ended call. Stored blocks of an engine that reports stay expected until a later report."""
        view = self.view
        (view.lose if is_lost else view.end)(booking.context_tokens, booking.prefill, now_s)
        self.progress.leave(booking)
        self.evictions.given_up(booking)
        if not stored:
            view.residency.unbook(booking.leaf)
        elif self.reports:
            view.residency.touch(booking.leaf)
            self.unconfirmed.append((now_s, booking.leaf))
        else:
            self._assume_stored(booking.leaf)

    def _assume_stored(self, leaf: Node) -> None:
        residency = self.view.residency
        residency.resident.store_path(leaf)
        residency.unbook(leaf)
        if self.kv_tokens is not None:
            residency.evict(len(residency.resident) - self.kv_tokens // self.block_tokens)


def _is_urgent(call: Call) -> bool:
    """Whether the engine serves the call before others: it has a TTFT."""
    return call.slo is not None and call.slo.ttft_s is not None


def _answer_s(call: Call, view: EngineView) -> float:
    """The longest time from the prompt's end to the answer's first byte, as predicted; infinite if not bounded."""
    if call.streamed:
        return 0.0
    if call.output_limit is None:
        return inf
    return view.cost_model.decode_time_s(call.output_limit, call.prompt_tokens)
