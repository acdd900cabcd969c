"""Follows a SGLang scheduler's requests and batches, for the planner and for the cache-state reports.

SGLang's scheduler calls, in each step: `tick` on the leading rank and `ticked` on all, `queued` for each request,
`step` around the prefill pass, `begins` before a batch's forward pass, and `ended` with its result. A tick has the
leading rank's time and the durations of the batches since its last tick: all ranks must plan by the same measurements.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any

from plait.backends.adapter.scheduler_settings import SglangSettings
from plait.backends.adapter.state_reporter import StateReporter
from plait.backends.adapter.tier_journal import TierJournal
from plait.backends.protocol.cache_state import CacheState, Tier
from plait.backends.protocol.call_annotations import AnnotationReader
from plait.backends.protocol.call_objectives import read_changes
from plait.backends.sglang.cache_state import CacheObserver, EventTap
from plait.backends.sglang.calls import SglangCall, kv_state, running_requests, sglang_call
from plait.backends.sglang.compatibility import rank_of
from plait.backends.sglang.levers import NO_LIMITS, PrefillPass
from plait.backends.sglang.planner import SglangPlanner
from plait.backends.sglang.step_clock import StepClock, Tick
from plait.policy.scheduling.plan import InFlight, IterationWork, LocalScheduler


class SglangDriver:
    """Follows one scheduler. `tier` is the adapter's level (`Tier`): `planner` is None at `reports`.

    `release` is SGLang's `release_req`, which frees a request's resources; called only at `chunks`. `lower` has the
    journals of the KV cache below the accelerator (CPU memory, disk).
    """

    def __init__(
        self,
        scheduler: Any,
        observer: CacheObserver,
        events: EventTap,
        settings: SglangSettings,
        *,
        release: Callable[..., Any],
        tier: Tier = "chunks",
        lower: Sequence[TierJournal] = (),
        policy: LocalScheduler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.annotations = AnnotationReader()
        self.clock = StepClock(clock)
        self.epoch = uuid.uuid4().hex
        self.rank = rank_of(scheduler)
        self.observer = observer
        self.cuts = tier == "chunks"
        """Whether plans set each call's tokens in a step, and preempt calls."""
        self.preemptions = 0
        self._scheduler = scheduler
        self._events = events
        self.planner: SglangPlanner | None = None
        if tier != "reports":
            self.planner = SglangPlanner(scheduler, observer, settings, release=release, cuts=self.cuts, policy=policy)
        self._begun: deque[tuple[int, IterationWork]] = deque()  # batches that run
        self._unmeasured: deque[IterationWork] = deque()  # ended batches whose durations come with the next tick
        self._reporter = StateReporter(
            engine=settings.name,
            kind="sglang",
            epoch=self.epoch,
            model=observer.model,
            block_tokens=observer.page_tokens,
            policy=settings.policy(tier),
            journal=observer.journal,
            takes_objectives=True,
            slots=getattr(scheduler, "max_running_requests", 0),
            tier=tier,
            lower=lower,
            untold=observer.untold,
        )
        self._iterations = self._reporter.iterations
        self._batches, self._sequence = count(), count()

    @property
    def prefill_pass(self) -> PrefillPass:
        """The plan's limits on the current prefill pass."""
        return NO_LIMITS if self.planner is None else self.planner.prefill_pass

    # Called by SGLang's scheduler.

    def tick(self) -> Tick | None:
        """The tick that the leading rank sends with the next step's requests; None while idle."""
        self._events.tell(self.report, self._reporter.calls)
        scheduler = self._scheduler
        busy = scheduler.waiting_queue or scheduler.running_batch.reqs or scheduler.last_batch or scheduler.chunked_req
        return self.clock.tick(idle=not busy)

    def ticked(self, ticks: Sequence[Tick]) -> None:
        """A step begins, with the leading rank's ticks that came with it; without any, the engine was idle."""
        if not ticks:
            self.clock.rested()
        for duration_s in (duration_s for tick in ticks for duration_s in self.clock.ticked(tick)):
            work = self._unmeasured.popleft()
            if self.planner is not None:
                self.planner.measured(duration_s, work)
        if self.planner is not None:
            self.planner.facts.in_flight = self._in_flight(self.planner.facts.in_flight)

    def _in_flight(self, before: InFlight | None) -> InFlight | None:
        """The batch that is computed now. Its beginning is a tick's time, the same on all ranks: its first tick's.

        With overlap, SGLang launches a batch and waits for the end of the one before, which the next tick follows.
        """
        work = self._begun[-1][1] if self._begun else None
        if before is not None and before.work is work:
            return before  # SGLang is paused
        return InFlight(work, self.clock.now_s) if work is not None and work.new_tokens else None

    def queued(self, request: Any) -> None:
        """A request joins the queue: a new one, or a preempted one, which has its `SglangCall` already."""
        call: SglangCall | None = getattr(request, "plait_call", None)
        if call is None:
            self._received(request)
        else:
            self.preemptions += 1
            call.follow_waiting(request)
        if self.planner is not None:
            self.planner.queued(request)

    def _received(self, request: Any) -> None:
        annotations = self.annotations.read(request.sampling_params.custom_params)
        call = sglang_call(request, annotations, self.clock.received_s, next(self._sequence), self.observer)
        request.plait_call = call
        tree_blocks = call.tree_blocks
        self._reporter.received(call.call_id, call, annotations.handle, annotations.gateway, lambda: tree_blocks)

    def change_objectives(self, body: bytes) -> int:
        """Change objectives of calls. Returns the number of changes that found a call. Raises `CallerError`."""
        return self._reporter.refinable.refine(read_changes(body, self.annotations))

    def step(self, running_batch: Any, schedule: Callable[[], Any]) -> Any:
        """Schedule a prefill pass by a plan, beside the decodes of `running_batch`. `schedule` is SGLang's own."""
        self._events.drain()
        assert self.planner is not None
        return self.planner.step(self.clock.now_s, running_batch, schedule)

    def begins(self, batch: Any) -> None:
        """A batch begins to run. Evictions that made room for the batch are reported before its forward pass."""
        self._events.tell_again(partial(self.report, beginning=batch.reqs), self._reporter.calls)
        work, number = _work(batch), next(self._batches)
        self._begun.append((number, work))
        self._iterations.begin(number, self.clock.present_s)
        self._iterations.computes([new for new, _ in work.chunks])
        if batch.forward_mode.is_decode():
            return
        for call in [request.plait_call for request in batch.reqs]:
            if not call.admitted:
                call.admitted = True
                self._iterations.admitted(self.clock.now_s - call.received_s)

    def ended(self, batch: Any) -> None:
        """A batch's result has been processed. Results come in the order of batches."""
        number, work = self._begun.popleft()
        now_s, reporter = self.clock.present_s, self._reporter
        self._unmeasured.append(work)
        self.clock.measured(self._iterations.end(number, now_s) or 0.0)
        for request in batch.reqs:
            call: SglangCall = request.plait_call
            tokens = len(request.output_ids)
            reporter.produced(call.call_id, tokens - call.seen_tokens, now_s)
            call.seen_tokens = tokens
            if request.finished():
                reporter.ended(call.call_id, now_s)

    def given_up(self) -> None:
        """SGLang has aborted requests. For waiting requests that are aborted, it calls no other hook."""
        scheduler = self._scheduler
        begun = running_requests(scheduler)
        present = {request.rid for request in (*scheduler.waiting_queue, *begun)}
        present.update(request.rid for batch in (scheduler.last_batch,) if batch for request in batch.reqs)
        self._reporter.retain(present, self.clock.present_s)

    def aborted(self, request: Any) -> None:
        self._reporter.ended(request.rid, self.clock.present_s)

    # Called for reports.

    def report(
        self, since: int | None, epoch: str | None, gateway: str | None = None, *, beginning: Iterable[Any] = ()
    ) -> CacheState:
        """The cache-state report since a cursor of `epoch`, without the calls of the `gateway` that asks.

        `beginning` has the requests of a batch that is about to run.
        """
        self._events.drain()
        waiting = self._scheduler.waiting_queue
        return self._reporter.report(
            since,
            epoch,
            kv=kv_state(self._scheduler),
            waiting_prompts=[len(request.origin_input_ids) for request in waiting],
            running=len(running_requests(self._scheduler, beginning)),
            budget_tokens=self._budget_tokens,
            preemptions=self.preemptions,
            gateway=gateway,
        )

    @property
    def _budget_tokens(self) -> int:
        """The latest plan's token budget. Without plans: SGLang's chunk size, or 0 if SGLang has none."""
        if self.planner is not None:
            return self.planner.budget_tokens
        return int(getattr(self._scheduler, "chunked_prefill_size", None) or 0)


def _work(batch: Any) -> IterationWork:
    if batch.forward_mode.is_decode():
        return IterationWork.of([1] * len(batch.reqs), [request.plait_call.computed_tokens for request in batch.reqs])
    return IterationWork.of(batch.extend_lens or (), batch.prefix_lens or ())
