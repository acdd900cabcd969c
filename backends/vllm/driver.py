"""Shows a vLLM scheduler's state to a local scheduler, and makes the vLLM scheduler follow its plans.

vLLM's `schedule()` runs unchanged. A plan sets the state that `schedule()` reads: the waiting queue and its order, the
token budget, and the limit on a request's chunk. Preemption comes before.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, takewhile
from operator import attrgetter
from typing import Any, cast

from plait.backends.adapter.scheduler_settings import WHERE, VllmSettings, cost_model, local_scheduler, measuring
from plait.backends.adapter.state_reporter import StateReporter
from plait.backends.protocol.cache_state import CacheState
from plait.backends.protocol.call_annotations import AnnotationReader
from plait.backends.protocol.call_objectives import read_changes
from plait.backends.vllm.cache_state import PoolObserver
from plait.backends.vllm.calls import VllmCall, VllmFacts, vllm_call
from plait.backends.vllm.compatibility import CompatibleScheduler
from plait.policy.scheduling.plan import IterationWork, LocalCall, LocalScheduler, Plan


class VllmLevers:
    """Sets the state that vLLM's scheduler reads: its waiting queue, the token budget, and limits on requests' chunks.

    While an iteration is being scheduled, `limits` has the chunk limits by request id, and `hidden` has the waiting
    requests that are held back. `budget_tokens` is the latest plan's budget.
    """

    def __init__(self, scheduler: Any, facts: VllmFacts) -> None:
        self.limits: dict[str, int] = {}
        self.hidden: list[Any] = []
        self.budget_tokens = facts.max_batch_tokens
        self._scheduler = scheduler
        self._facts = facts

    def show(self, plan: Plan, blocked: list[Any]) -> None:
        """Leave in vLLM's queue only the calls that the plan admits, in its order. The others are `hidden`."""
        requests, queue = self._scheduler.requests, self._scheduler.waiting
        shown = [requests[call.call_id] for call, _ in _picks(plan) if call.waits]
        shown += [requests[call.call_id] for call in _backfill(plan) if call.waits]
        shown += blocked
        if len(shown) < len(queue):
            kept = set(map(id, shown))
            self.hidden = [request for request in queue if id(request) not in kept]
        queue.clear()
        queue.extend(shown)

    def limit(self, plan: Plan, running: list[LocalCall]) -> None:
        """Set the budget, and limits for calls that get only a part of their tokens."""
        budget_tokens = self._facts.max_batch_tokens
        if plan.budget_tokens is not None:
            budget_tokens = min(budget_tokens, max(0, plan.budget_tokens))
        self.budget_tokens = self._scheduler.max_num_scheduled_tokens = budget_tokens
        picks, go_on = _picks(plan), len(plan.preempt)
        uses_up = budget_tokens <= sum(tokens for _, tokens in picks)
        last = _served_last(picks, running) if uses_up else None
        for call, tokens in picks:
            wanted = call.prompt_tokens + call.output_tokens - call.computed_tokens
            if call.waits:
                wanted -= self._facts.cached_tokens(call)
            else:
                go_on += 1
            if tokens < wanted and call is not last:  # vLLM cuts the last call itself where the budget ends
                self._limit_call(call, tokens)
        go_on += sum(not call.waits for call in _backfill(plan))
        if go_on < len(running):
            self._hold(plan, running)

    def give_back(self) -> None:
        """The iteration is scheduled. Give vLLM its queue and its budget back."""
        self._scheduler.waiting.extend(self.hidden)
        self._scheduler.max_num_scheduled_tokens = self._facts.max_batch_tokens
        self.limits, self.hidden = {}, []

    def _hold(self, plan: Plan, running: list[LocalCall]) -> None:
        """Give no tokens to running calls that are not in the plan."""
        named = {id(call) for call, _ in plan.picks}
        named.update(map(id, plan.backfill))
        self.limits.update((call.call_id, 0) for call in running if id(call) not in named)

    def _limit_call(self, call: LocalCall, tokens: int) -> None:
        if self._scheduler.need_mamba_block_aligned_split:  # such models need chunks that end with a block
            block_tokens = self._scheduler.cache_config.block_size
            tokens = (call.computed_tokens + tokens) // block_tokens * block_tokens - call.computed_tokens
        if tokens > 0:
            self.limits[call.call_id] = tokens


def _picks(plan: Plan) -> tuple[tuple[VllmCall, int], ...]:
    """A plan's picks, with this adapter's call type."""
    return cast("tuple[tuple[VllmCall, int], ...]", plan.picks)


def _backfill(plan: Plan) -> tuple[VllmCall, ...]:
    return cast("tuple[VllmCall, ...]", plan.backfill)


def _served_last(picks: Sequence[tuple[VllmCall, int]], running: Sequence[LocalCall]) -> LocalCall | None:
    """The pick that vLLM serves last. It serves running calls in its own order, then waiting calls in the plan's."""
    for call, _ in reversed(picks):
        if call.waits:
            return call
    picked = {id(call) for call, _ in picks}
    return next((call for call in reversed(running) if id(call) in picked), None)


_ORDER = attrgetter("order")


class VllmDriver:
    """Runs one engine's local scheduler. `statuses` is vLLM's RequestStatus. `levers` carry out the plans."""

    def __init__(
        self,
        scheduler: Any,
        observer: PoolObserver,
        settings: VllmSettings,
        *,
        statuses: Any,
        policy: LocalScheduler | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.annotations = AnnotationReader()
        self.epoch = uuid.uuid4().hex
        self.observer = observer
        self.preemptions = 0
        self.diverged_picks = 0
        """Picks that vLLM did not schedule as planned, because it found fewer cached tokens or too few blocks."""
        self._scheduler = scheduler
        self._ready, self._preempted = statuses.WAITING, statuses.PREEMPTED
        self._policy = policy or local_scheduler(settings, WHERE)
        self._measuring = measuring(self._policy, cost_model(settings, WHERE))
        self._work: dict[int, IterationWork] = {}
        self._clock, self._wall_clock = clock, wall_clock
        self._compatible = CompatibleScheduler(scheduler, (self._ready, self._preempted))
        self._facts = VllmFacts(scheduler, self._compatible, observer)
        self.levers = VllmLevers(scheduler, self._facts)
        self._reporter = StateReporter(
            engine=settings.name,
            kind="vllm",
            epoch=self.epoch,
            model=served_model(scheduler.vllm_config),
            block_tokens=observer.block_tokens,
            granularity_tokens=observer.granularity_tokens,
            policy=settings.scheduler,
            journal=observer.journal,
            takes_objectives=True,
            slots=self._compatible.slots,
        )
        self._iterations = self._reporter.iterations
        self._sequence = count()

    # Called by vLLM's scheduler.

    def received(self, request: Any) -> None:
        """A request has arrived. Its call is stored in it."""
        arguments = request.sampling_params.extra_args if request.sampling_params is not None else None
        annotations = self.annotations.read(arguments)
        received_s = self._clock() - self._waited_s(request)
        call = request.plait_call = vllm_call(request, annotations, received_s, next(self._sequence))
        tree_blocks = partial(self.observer.prompt_blocks, request)
        self._reporter.received(call.call_id, call, annotations.handle, annotations.gateway, tree_blocks)

    def change_objectives(self, body: bytes) -> int:
        """The objectives of calls have changed. Returns how many of them are known. Raises `CallerError`."""
        return self._reporter.refinable.refine(read_changes(body, self.annotations))

    def step(self, schedule: Callable[[], Any]) -> Any:
        """Schedule an iteration by a plan. `schedule` is vLLM's own method."""
        scheduler, now_s = self._scheduler, self._clock()
        if scheduler.pause_state.value:  # paused, in part or in full: vLLM decides what runs
            output = schedule()
            self._observe(Plan((), ()), output, now_s)
            return output
        running, waiting, blocked = self._calls()
        plan = self._policy.plan(now_s, waiting, running, self._facts)
        self._preempt(plan)
        self.levers.show(plan, blocked)
        self.levers.limit(plan, running)
        try:
            output = schedule()
        finally:
            self.levers.give_back()
        self._observe(plan, output, now_s)
        return output

    def ended(self, output: Any, results: Any) -> None:
        """An iteration's output has been processed. `results` are its EngineCoreOutputs in vLLM, by client."""
        now_s, reporter = self._clock(), self._reporter
        duration_s = self._iterations.end(id(output), now_s)
        work = self._work.pop(id(output), None)
        if self._measuring is not None and duration_s is not None and work is not None:
            self._measuring.observe(duration_s, work)
        for of_client in results.values():
            for one in of_client.outputs:
                reporter.produced(one.request_id, len(one.new_token_ids), now_s)
                if one.finished:
                    reporter.ended(one.request_id, now_s)

    def given_up(self) -> None:
        """Requests were ended from outside, because their clients have gone or they have enough output."""
        self._reporter.retain(self._scheduler.requests, self._clock())

    # Called for reports.

    @property
    def cursor(self) -> int:
        """Changes with the cache's content and with the calls."""
        return self.observer.journal.cursor

    def has_news(self, since: int, epoch: str | None, gateway: str | None) -> bool:
        """Whether a report since a cursor of `epoch` would say anything to the `gateway` that asks."""
        return self._reporter.has_news(since, epoch, gateway)

    def report(self, since: int | None, epoch: str | None, gateway: str | None = None) -> CacheState:
        """The cache-state report since a cursor of `epoch`, without the calls of the `gateway` that asks."""
        scheduler = self._scheduler
        waiting = [*scheduler.waiting, *self._compatible.waiting_elsewhere]
        return self._reporter.report(
            since,
            epoch,
            kv=self.observer.kv_state(),
            waiting_prompts=[request.num_prompt_tokens for request in waiting],
            running=len(scheduler.running),
            budget_tokens=self.levers.budget_tokens,
            preemptions=self.preemptions,
            gateway=gateway,
        )

    # From vLLM's state to a plan, and back.

    def _waited_s(self, request: Any) -> float:
        """How long a request took from the API server to here. Requests arrive only between iterations.

        The server stamps them by its time of day, maybe on another machine. So the wait is capped at one iteration.
        """
        waited_s = self._wall_clock() - float(request.arrival_time)
        return min(max(0.0, waited_s), self._iterations.last_s)

    def _calls(self) -> tuple[list[LocalCall], list[LocalCall], list[Any]]:
        """Running calls with something to compute, waiting calls in order of arrival, and requests not yet ready."""
        scheduler, ready, preempted = self._scheduler, self._ready, self._preempted
        self._compatible.take_back_skipped()
        running: list[LocalCall] = []
        for request in scheduler.running:
            call: VllmCall = request.plait_call
            call.follow_running(request)
            if call.uncomputed_tokens > 0 and not _is_ending(request):
                running.append(call)
        self._facts.silent_calls = len(scheduler.running) - len(running)
        # vLLM preempts from the end of its list. A call whose last token is in flight loses nothing by it.
        ending = takewhile(_is_ending, reversed(scheduler.running))
        self._facts.ending_blocks = sum(self._facts.blocks_freed(request.plait_call) for request in ending)
        waiting: list[VllmCall] = []
        blocked = []
        for request in scheduler.waiting:
            if request.status is ready:
                waiting.append(request.plait_call)
            elif request.status is preempted:
                request.plait_call.follow_waiting(request)
                waiting.append(request.plait_call)
            else:  # waits for a grammar, a transfer or more input: vLLM checks that
                blocked.append(request)
        waiting.sort(key=_ORDER)
        return running, cast("list[LocalCall]", waiting), blocked

    def _preempt(self, plan: Plan) -> None:
        for call in plan.preempt:
            self._compatible.preempt(self._scheduler.requests[call.call_id])

    def _observe(self, plan: Plan, output: Any, now_s: float) -> None:
        scheduled, iterations = output.num_scheduled_tokens, self._iterations
        if scheduled:
            iterations.begin(id(output), now_s)
            iterations.computes(scheduled.values())
            if self._measuring is not None:
                self._work[id(output)] = self._computed(scheduled)
        self.diverged_picks += sum(scheduled.get(call.call_id) != tokens for call, tokens in plan.picks)
        for new in output.scheduled_new_reqs:
            call: VllmCall = self._scheduler.requests[new.req_id].plait_call
            if not call.admitted:
                call.admitted = True
                iterations.admitted(now_s - call.received_s)

    def _computed(self, scheduled: dict[str, int]) -> IterationWork:
        """What an iteration computes, from the tokens of each request."""
        requests = self._scheduler.requests
        calls = [requests[request_id].plait_call for request_id in scheduled]
        return IterationWork.of(
            scheduled.values(), [call.hit_tokens if call.waits else call.computed_tokens for call in calls]
        )


def served_model(vllm_config: Any) -> str:
    """The model's name for clients; the first of several."""
    names = vllm_config.model_config.served_model_name
    return str(names if isinstance(names, str) else names[0])


def _is_ending(request: Any) -> bool:
    """Whether the step in flight computes a request's last token under asynchronous scheduling, by vLLM's formula."""
    in_flight = request.num_output_placeholders
    if not in_flight:
        return False
    return bool(request.num_computed_tokens + 2 - in_flight >= request.num_prompt_tokens + request.max_tokens)
