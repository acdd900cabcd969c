"""Drives a local scheduler with a SGLang scheduler's state, and the SGLang scheduler with its plans.

SGLang's `get_new_batch_prefill()` is called as it is; a plan reaches it through what it reads on its way: the waiting
queue and its order, the prompt in chunks, the chunk size, whether decodes are mixed in, and the limits of its adder.
Preemption is done beforehand. What is decided depends on nothing but what all tensor-parallel ranks have alike.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from operator import attrgetter
from typing import Any, cast

from plait.backends.adapter.attainment import Attainment
from plait.backends.adapter.forced_levers import local_scheduler
from plait.backends.adapter.iterations import Iterations
from plait.backends.adapter.scheduler_settings import cost_model
from plait.backends.protocol.cache_state import CacheState, QueueState, SchedulerState
from plait.backends.protocol.call_annotations import AnnotationReader
from plait.backends.sglang.cache_state import CacheObserver
from plait.backends.sglang.calls import SchedulerFacts, SglangCall, sglang_call
from plait.backends.sglang.event_tap import EventTap
from plait.backends.sglang.levers import Levers, levers_of
from plait.backends.sglang.prefill_pass import NO_LIMITS
from plait.backends.sglang.settings import VARIABLE, Settings
from plait.backends.sglang.step_clock import StepClock, Tick
from plait.policy.scheduling.local_scheduler import LocalCall, LocalScheduler, MeasuringScheduler, Plan

_ORDER = attrgetter("order")

Work = list[tuple[int, int]]
"""(new tokens, context tokens) of each call of an iteration."""


class Driver:
    """One rank's local scheduler; `release` is SGLang's `release_req`, which frees what a request holds.

    While a prefill pass is under way, `prefill_pass` is what the plan allows it.
    """

    def __init__(
        self,
        scheduler: Any,
        observer: CacheObserver,
        events: EventTap,
        settings: Settings,
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
        """Picks that SGLang did not schedule as planned: it found more cached, or no room."""
        self._scheduler = scheduler
        self._events = events
        self._settings = settings
        self._release = release
        self._policy = policy or local_scheduler(settings)
        self._measuring = self._policy if isinstance(self._policy, MeasuringScheduler) else None
        costs = cost_model(settings, VARIABLE)
        if self._measuring is not None and costs is not None:
            self._measuring.expect(costs)
        self._facts = SchedulerFacts(scheduler, observer)
        self._mixes: bool = scheduler.is_mixed_chunk
        self._chunk_size: int = scheduler.chunked_prefill_size
        self._decodes_are_due = False
        self._begun: deque[tuple[int, Work]] = deque()
        self._unmeasured: deque[Work] = deque()
        self._iterations = Iterations()
        self._attainment = Attainment()
        self._requests: dict[SglangCall, Any] = {}
        self._batches = count()
        self._sequence = count()
        self._budget_tokens = self._facts.max_batch_tokens

    # What SGLang's scheduler tells.

    def tick(self) -> Tick | None:
        """What the leading rank sends along with the next step's requests."""
        scheduler = self._scheduler
        busy = scheduler.waiting_queue or scheduler.running_batch.reqs or scheduler.last_batch or scheduler.chunked_req
        return self.clock.tick(idle=not busy)

    def ticked(self, tick: Tick) -> None:
        """The leading rank's tick has come."""
        for duration_s in self.clock.ticked(tick):
            work = self._unmeasured.popleft()
            if self._measuring is not None and work:
                self._measuring.observe(duration_s, work)

    def received(self, request: Any) -> SglangCall:
        """A request has come; its call stays with it."""
        annotations = self.annotations.read(request.sampling_params.custom_params)
        call = sglang_call(request, annotations, self.clock.now_s, next(self._sequence), self.observer)
        request.plait_call = call
        self._attainment.received(call.call_id, call)
        return call

    def step(self, running_batch: Any, schedule: Callable[[Any], Any]) -> Any:
        """A prefill pass by plan, in which SGLang's own `schedule` gets the batch of running decodes."""
        self._events.drain()
        running, waiting = self._calls(running_batch)
        if not running and not waiting:
            return schedule(running_batch)
        plan = self._policy.plan(
            self.clock.now_s, cast("list[LocalCall]", waiting), cast("list[LocalCall]", running), self._facts
        )
        preempted = self._preempt(plan, running_batch)
        result = self._pulled(self._levers(plan), running_batch, schedule)
        for request in preempted:  # not before: what of it is still being computed would count for its next run
            self._scheduler._add_request_to_queue(request, is_retracted=True)  # noqa: SLF001
        self._observe(plan, result.batch_to_run)
        return result

    def begins(self, batch: Any) -> None:
        """A batch is being run."""
        if batch.forward_mode.is_decode():
            work = [(1, request.plait_call.computed_tokens) for request in batch.reqs]
        else:
            work = list(zip(batch.extend_lens or (), batch.prefix_lens or (), strict=True))
        number = next(self._batches)
        self._begun.append((number, work))
        self._iterations.begin(number, self.clock.present_s)
        self._iterations.computes([tokens for tokens, _ in work])

    def ended(self, batch: Any) -> None:
        """Its result has been processed: results come in the order of batches."""
        number, work = self._begun.popleft()
        now_s = self.clock.present_s
        self._unmeasured.append(work)
        self.clock.measured(self._iterations.end(number, now_s) or 0.0)
        for request in batch.reqs:
            call: SglangCall = request.plait_call
            tokens = len(request.output_ids)
            self._attainment.produced(call.call_id, tokens - call.seen_tokens, now_s)
            call.seen_tokens = tokens
            if request.finished():
                self._attainment.ended(call.call_id, now_s)

    def given_up(self) -> None:
        """Requests were ended from outside: of those that had not begun, SGLang says nothing more."""
        scheduler = self._scheduler
        present = {request.rid for request in (*scheduler.waiting_queue, *self._running(scheduler.running_batch))}
        present.update(request.rid for batch in (scheduler.last_batch,) if batch for request in batch.reqs)
        self._attainment.retain(present, self.clock.present_s)

    # What is asked from outside.

    def report(self, since: int | None, epoch: str | None) -> CacheState:
        """The report of DESIGN 4.7 since a cursor of `epoch`."""
        self._events.drain()
        scheduler, observer = self._scheduler, self.observer
        snapshot, stored, removed = observer.journal.since(since if epoch in {None, self.epoch} else None)
        waiting = scheduler.waiting_queue
        return CacheState(
            engine=self._settings.name,
            kind="sglang",
            epoch=self.epoch,
            cursor=observer.journal.cursor,
            model=observer.model,
            block_tokens=observer.page_tokens,
            granularity_tokens=observer.granularity_tokens,
            snapshot=snapshot,
            stored=stored,
            removed=removed,
            kv=self._facts.kv_state(),
            queue=QueueState(
                waiting=len(waiting),
                running=len(self._running(scheduler.running_batch)),
                waiting_tokens=sum(len(request.origin_input_ids) for request in waiting),
                mean_queue_s=self._iterations.mean_queue_s,
            ),
            iteration=self._iterations.state(self._budget_tokens),
            scheduler=SchedulerState(self._settings.scheduler, self._attainment.share, self.preemptions),
        )

    # From SGLang's state to a plan, and back.

    def _calls(self, running_batch: Any) -> tuple[list[SglangCall], list[SglangCall]]:
        """Running calls with something to compute, and waiting ones, both in order of arrival."""
        scheduler, in_chunks = self._scheduler, self._scheduler.chunked_req
        in_flight = self._in_flight()
        running = []
        self._requests = {}
        if in_chunks is not None:
            running.append(self._call(in_chunks))
            running[0].follow_prefill(in_chunks)
        for request in running_batch.reqs:
            flying = request.rid in in_flight
            if not request.finished() and not (flying and request.next_output_finishes_by_length()):
                call = self._call(request)
                call.follow_decode(request, int(flying))
                running.append(call)
        waiting = []
        for request in scheduler.waiting_queue:
            call = self._call(request)
            call.follow_waiting(request)
            waiting.append(call)
        running.sort(key=_ORDER)
        waiting.sort(key=_ORDER)
        self._facts.follow_running(running)
        return running, waiting

    def _call(self, request: Any) -> SglangCall:
        call: SglangCall = getattr(request, "plait_call", None) or self.received(request)
        self._requests[call] = request
        return call

    def _in_flight(self) -> set[str]:
        """Requests whose next token is still being computed."""
        return {request.rid for batch, _ in self._scheduler.result_queue for request in batch.reqs}

    def _running(self, running_batch: Any) -> list[Any]:
        """Requests that have begun and not ended, the one in chunks included."""
        scheduler = self._scheduler
        begun = [*running_batch.reqs, *(scheduler.last_batch.reqs if scheduler.last_batch else ())]
        if scheduler.chunked_req is not None:
            begun.append(scheduler.chunked_req)
        return [request for request in {id(request): request for request in begun}.values() if not request.finished()]

    def _preempt(self, plan: Plan, running_batch: Any) -> list[Any]:
        """Take back what the calls hold that are to be preempted; those are the requests to queue again."""
        victims = [self._requests[cast("SglangCall", call)] for call in plan.preempt]
        victims = [request for request in victims if _can_start_anew(request)]
        if not victims:
            return []
        scheduler, ids = self._scheduler, {id(request) for request in victims}
        staying = [index for index, request in enumerate(running_batch.reqs) if id(request) not in ids]
        for index, request in enumerate(running_batch.reqs):
            if id(request) in ids:
                running_batch.release_req(index, len(staying))
        if len(staying) < len(running_batch.reqs):
            running_batch.filter_batch(keep_indices=staying)
            running_batch.batch_is_full = False
        if id(scheduler.chunked_req) in ids:
            self._release(
                req=scheduler.chunked_req,
                remaing_req_count=len(staying),
                req_to_token_pool=scheduler.req_to_token_pool,
                token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
                tree_cache=scheduler.tree_cache,
                hisparse_coordinator=None,
            )
            scheduler.chunked_req = None
        return victims

    def _levers(self, plan: Plan) -> Levers:
        request = self._scheduler.chunked_req
        in_chunks = None if request is None else request.plait_call
        levers = levers_of(plan, in_chunks, self._facts, self._scheduler.page_size)
        self._budget_tokens = self._facts.max_batch_tokens
        if plan.budget_tokens is not None:
            self._budget_tokens = min(self._budget_tokens, max(0, plan.budget_tokens))
        if self._mixes or not levers.decodes:
            return levers
        # Prompts and decodes take turns where SGLang does not compute them together.
        self._decodes_are_due = not self._decodes_are_due and levers.prompt_tokens > 0
        return levers if self._decodes_are_due else Levers()

    def _pulled(self, levers: Levers, running_batch: Any, schedule: Callable[[Any], Any]) -> Any:
        """What SGLang schedules with the levers set; they are given back."""
        scheduler, chunked = self._scheduler, self._scheduler.chunked_req
        queue, shown = scheduler.waiting_queue, [self._requests[call] for call in levers.shown]
        seen = set(map(id, shown))
        hidden = [request for request in queue if id(request) not in seen]
        mixes = self._mixes and levers.decodes
        scheduler.waiting_queue = shown
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

    def _observe(self, plan: Plan, batch: Any) -> None:
        """Count what became of the plan's prompts, and who was admitted."""
        extends = dict(zip(map(id, batch.reqs), batch.extend_lens, strict=True)) if batch is not None else {}
        for call, tokens in cast("Sequence[tuple[SglangCall, int]]", plan.picks):
            request = self._requests[call]
            if call.waits or call.uncomputed_tokens > 1:
                self.diverged_picks += extends.get(id(request)) != tokens
            if call.waits and not call.admitted and id(request) in extends:
                call.admitted = True
                self._iterations.admitted(self.clock.now_s - call.received_s)


def _can_start_anew(request: Any) -> bool:
    """Whether SGLang can compute a request again from its tokens."""
    return request.beam_group is None and request.input_embeds is None and request.session is None
