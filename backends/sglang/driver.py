"""Shows a SGLang scheduler's state to a local scheduler, and makes the SGLang scheduler follow its plans.

SGLang's `get_new_batch_prefill()` runs unchanged. A plan sets the state that it reads: the waiting queue and its order,
the prompt in chunks, the chunk size, whether decodes are mixed in, and the adder's limits. Preemption comes before.
Decisions depend only on state that is the same on all tensor-parallel ranks.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any, cast

from plait.backends.adapter.scheduler_settings import VARIABLE, SglangSettings, cost_model, local_scheduler, measuring
from plait.backends.adapter.state_reporter import StateReporter
from plait.backends.protocol.cache_state import CacheState
from plait.backends.protocol.call_annotations import AnnotationReader
from plait.backends.protocol.call_objectives import read_changes
from plait.backends.sglang.cache_state import CacheObserver, EventTap
from plait.backends.sglang.calls import Requests, SglangCall, SglangFacts, WaitingHits, sglang_call
from plait.backends.sglang.levers import NO_LIMITS, SglangLevers, levers_of, preempt
from plait.backends.sglang.step_clock import StepClock, Tick
from plait.policy.scheduling.plan import IterationWork, LocalCall, LocalScheduler, Plan


class SglangDriver:
    """Runs one rank's local scheduler. `release` is SGLang's `release_req`, which frees a request's resources.

    `prefill_pass` has the plan's limits on the current prefill pass.
    """

    def __init__(
        self,
        scheduler: Any,
        observer: CacheObserver,
        events: EventTap,
        settings: SglangSettings,
        *,
        release: Callable[..., Any],
        policy: LocalScheduler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.annotations = AnnotationReader()
        self.clock = StepClock(clock)
        self.epoch = uuid.uuid4().hex
        self.observer = observer
        self.prefill_pass = NO_LIMITS
        self.preemptions = 0
        self.diverged_picks = 0
        """Picks that SGLang did not schedule as planned, because it found more cached tokens or too few pages."""
        self._scheduler = scheduler
        self._events = events
        self._release = release
        self._policy = policy or local_scheduler(settings, VARIABLE)
        self._measuring = measuring(self._policy, cost_model(settings, VARIABLE))
        self._facts = SglangFacts(scheduler, observer)
        self._mixes: bool = scheduler.is_mixed_chunk
        self._chunk_size: int = scheduler.chunked_prefill_size
        self._decodes_are_due = False
        self._begun: deque[tuple[int, IterationWork]] = deque()
        self._unmeasured: deque[IterationWork] = deque()
        self._reporter = _reporter(settings, observer, self.epoch, self._facts.max_running_calls)
        self._iterations = self._reporter.iterations
        self._hits = WaitingHits(observer)
        self._requests = Requests(scheduler, self._hits)
        self._batches, self._sequence = count(), count()
        self._budget_tokens = self._facts.max_batch_tokens

    # Called by SGLang's scheduler.

    def tick(self) -> Tick | None:
        """The tick that the leading rank sends with the next step's requests; None while idle."""
        self._events.tell(self.report, self._reporter.calls)
        scheduler = self._scheduler
        busy = scheduler.waiting_queue or scheduler.running_batch.reqs or scheduler.last_batch or scheduler.chunked_req
        return self.clock.tick(idle=not busy)

    def ticked(self, ticks: Sequence[Tick]) -> None:
        """A step begins, with the leading rank's tick; without one, the engine was idle."""
        if not ticks:
            self.clock.rested()
        for duration_s in (duration_s for tick in ticks for duration_s in self.clock.ticked(tick)):
            work = self._unmeasured.popleft()
            if self._measuring is not None and work.new_tokens:
                self._measuring.observe(duration_s, work)

    def queued(self, request: Any) -> None:
        """A request begins to wait. It has arrived, or if it has a call already, it was preempted."""
        call: SglangCall | None = getattr(request, "plait_call", None)
        if call is None:
            self._received(request)
        else:
            self.preemptions += 1
            call.follow_waiting(request)
        self._requests.queued(request)

    def _received(self, request: Any) -> None:
        annotations = self.annotations.read(request.sampling_params.custom_params)
        call = sglang_call(request, annotations, self.clock.received_s, next(self._sequence), self.observer)
        request.plait_call = call
        tree_blocks = call.tree_blocks
        self._reporter.received(call.call_id, call, annotations.handle, annotations.gateway, lambda: tree_blocks)

    def change_objectives(self, body: bytes) -> int:
        """The objectives of calls have changed. Returns how many of them are known. Raises `CallerError`."""
        return self._reporter.refinable.refine(read_changes(body, self.annotations))

    def step(self, running_batch: Any, schedule: Callable[[Any], Any]) -> Any:
        """Schedule a prefill pass by a plan. SGLang's own `schedule` takes the batch of running decodes."""
        self._events.drain()
        running, waiting = self._requests.calls(running_batch)
        self._facts.follow_running(running)
        self._hits.follow()
        if not running and not waiting:
            return schedule(running_batch)
        plan = self._policy.plan(
            self.clock.now_s, cast("list[LocalCall]", waiting), cast("list[LocalCall]", running), self._facts
        )
        victims = [self._requests.of(cast("SglangCall", call)) for call in plan.preempt]
        preempted = preempt(self._scheduler, running_batch, victims, self._release)
        levers = self._levers(plan)
        result = self._pulled(levers, running_batch, schedule)
        for request in preempted:  # only now, or output in flight would count for the request's next run
            self._scheduler._add_request_to_queue(request, is_retracted=True)  # noqa: SLF001
        self._observe(levers, result.batch_to_run)
        return result

    def begins(self, batch: Any) -> None:
        """A batch begins to run. Evictions that made room for it are told before its forward pass."""
        self._events.tell_again(partial(self.report, beginning=batch.reqs), self._reporter.calls)
        work, number = _work(batch), next(self._batches)
        self._begun.append((number, work))
        self._iterations.begin(number, self.clock.present_s)
        self._iterations.computes(work.chunks)

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
        """Requests were ended from outside. SGLang reports no end for requests that had not begun."""
        scheduler = self._scheduler
        begun = self._requests.running(scheduler.running_batch)
        present = {request.rid for request in (*scheduler.waiting_queue, *begun)}
        present.update(request.rid for batch in (scheduler.last_batch,) if batch for request in batch.reqs)
        self._reporter.retain(present, self.clock.present_s)

    def aborted(self, request: Any) -> None:
        """A request has ended outside of batches."""
        self._reporter.ended(request.rid, self.clock.present_s)

    # Called for reports.

    def report(
        self, since: int | None, epoch: str | None, gateway: str | None = None, *, beginning: Iterable[Any] = ()
    ) -> CacheState:
        """The cache-state report since a cursor of `epoch`, without the calls of the `gateway` that asks.

        Requests `beginning` are of a batch about to run.
        """
        self._events.drain()
        waiting = self._scheduler.waiting_queue
        return self._reporter.report(
            since,
            epoch,
            kv=self._facts.kv_state(),
            waiting_prompts=[len(request.origin_input_ids) for request in waiting],
            running=len(self._requests.running(self._scheduler.running_batch, beginning)),
            budget_tokens=self._budget_tokens,
            preemptions=self.preemptions,
            gateway=gateway,
        )

    # From a plan to SGLang's state, and back.

    def _levers(self, plan: Plan) -> SglangLevers:
        request = self._scheduler.chunked_req
        in_chunks = None if request is None else request.plait_call
        levers = levers_of(plan, in_chunks, self._facts, self._scheduler.page_size)
        self._budget_tokens = self._facts.max_batch_tokens
        if plan.budget_tokens is not None:
            self._budget_tokens = min(self._budget_tokens, max(0, plan.budget_tokens))
        if self._mixes or not levers.decodes:
            return levers
        # Prompts and decodes take turns if SGLang does not mix them in a batch.
        self._decodes_are_due = not self._decodes_are_due and levers.prompt_tokens > 0
        return levers if self._decodes_are_due else SglangLevers()

    def _pulled(self, levers: SglangLevers, running_batch: Any, schedule: Callable[[Any], Any]) -> Any:
        """Set the levers, let SGLang schedule, and give the levers back."""
        scheduler, chunked = self._scheduler, self._scheduler.chunked_req
        hidden = self._requests.waiting_but(levers.shown)
        mixes = self._mixes and levers.decodes
        scheduler.waiting_queue = [self._requests.of(call) for call in levers.shown]
        scheduler.is_mixed_chunk = mixes
        mixed_tokens = len(running_batch.reqs) if mixes else 0
        scheduler.chunked_prefill_size = min(self._chunk_size, levers.prompt_tokens + mixed_tokens)
        if not levers.goes_on or mixed_tokens >= self._chunk_size:
            scheduler.chunked_req = None
        self.prefill_pass = levers.limits
        held = scheduler.chunked_req is not chunked
        try:
            return schedule(running_batch)
        finally:
            scheduler.waiting_queue.extend(hidden)
            scheduler.is_mixed_chunk, scheduler.chunked_prefill_size = self._mixes, self._chunk_size
            if held:
                scheduler.chunked_req = chunked
            self.prefill_pass = NO_LIMITS

    def _observe(self, levers: SglangLevers, batch: Any) -> None:
        """Count the prompts that were not scheduled as planned, and note the admitted calls."""
        begun = () if batch is None else zip(batch.reqs, batch.extend_lens, strict=True)
        computed = {request.plait_call: tokens for request, tokens in begun}
        self.diverged_picks += sum([computed.get(call) != tokens for call, tokens in levers.picks])
        for call in [call for call in levers.shown if call in computed]:
            self._requests.admitted(call)
            if not call.admitted:
                call.admitted = True
                self._iterations.admitted(self.clock.now_s - call.received_s)


def _work(batch: Any) -> IterationWork:
    """What a batch computes."""
    if batch.forward_mode.is_decode():
        return IterationWork.of([1] * len(batch.reqs), [request.plait_call.computed_tokens for request in batch.reqs])
    return IterationWork.of(batch.extend_lens or (), batch.prefix_lens or ())


def _reporter(settings: SglangSettings, observer: CacheObserver, epoch: str, slots: int) -> StateReporter:
    return StateReporter(
        engine=settings.name,
        kind="sglang",
        epoch=epoch,
        model=observer.model,
        block_tokens=observer.page_tokens,
        granularity_tokens=observer.granularity_tokens,
        policy=settings.scheduler_name,
        journal=observer.journal,
        takes_objectives=True,
        slots=slots,
    )
