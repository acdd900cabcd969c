"""Drives a local scheduler with a vLLM scheduler's state, and the vLLM scheduler with its plans.

vLLM's `schedule()` is called as it is; a plan reaches it through what it reads on its way: the order of its waiting
queue, which calls stand in it, the token budget, and the limit on one request's chunk. Preemption is done beforehand.
"""

from __future__ import annotations

import time
import uuid
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
from plait.backends.vllm.cache_state import PoolObserver
from plait.backends.vllm.calls import SchedulerFacts, VllmCall, vllm_call
from plait.backends.vllm.settings import WHERE, Settings
from plait.policy.scheduling.local_scheduler import LocalCall, LocalScheduler, MeasuringScheduler, Plan

_ORDER = attrgetter("order")


class Driver:
    """One engine's local scheduler; `statuses` is vLLM's RequestStatus.

    While an iteration is being scheduled, `limits` are the chunk limits by request id, and `hidden` the waiting
    requests that are held back.
    """

    def __init__(
        self,
        scheduler: Any,
        observer: PoolObserver,
        settings: Settings,
        *,
        statuses: Any,
        policy: LocalScheduler | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.annotations = AnnotationReader()
        self.epoch = uuid.uuid4().hex
        self.limits: dict[str, int] = {}
        self.hidden: list[Any] = []
        self.observer = observer
        self.preemptions = 0
        self.diverged_picks = 0
        """Picks that vLLM did not schedule as planned: it found less cached, or no room."""
        self._scheduler = scheduler
        self._settings = settings
        self._ready, self._preempted = statuses.WAITING, statuses.PREEMPTED
        self._policy = policy or local_scheduler(settings)
        self._measuring = self._policy if isinstance(self._policy, MeasuringScheduler) else None
        costs = cost_model(settings, WHERE)
        if self._measuring is not None and costs is not None:
            self._measuring.expect(costs)
        self._work: dict[int, list[tuple[int, int]]] = {}
        self._clock, self._wall_clock = clock, wall_clock
        self._facts = SchedulerFacts(scheduler, observer)
        self._iterations = Iterations()
        self._attainment = Attainment()
        self._sequence = count()
        self._budget_tokens = self._facts.max_batch_tokens

    # What vLLM's scheduler tells.

    def received(self, request: Any) -> None:
        """A request has come; its call stays with it."""
        arguments = request.sampling_params.extra_args if request.sampling_params is not None else None
        annotations = self.annotations.read(arguments)
        received_s = self._clock() - self._waited_s(request)
        call = request.plait_call = vllm_call(request, annotations, received_s, next(self._sequence))
        self._attainment.received(call.call_id, call)

    def step(self, schedule: Callable[[], Any]) -> Any:
        """Schedule an iteration by plan; `schedule` is vLLM's own."""
        scheduler, now_s = self._scheduler, self._clock()
        if scheduler.pause_state.value:  # paused in part or in full: what is to run then is vLLM's business
            output = schedule()
            self._observe(Plan((), ()), output, now_s)
            return output
        running, waiting, blocked = self._calls()
        plan = self._policy.plan(now_s, waiting, running, self._facts)
        self._preempt(plan)
        self._show(plan, blocked)
        self._limit(plan, running)
        try:
            output = schedule()
        finally:
            scheduler.waiting.extend(self.hidden)
            scheduler.max_num_scheduled_tokens = self._facts.max_batch_tokens
            self.limits, self.hidden = {}, []
        self._observe(plan, output, now_s)
        return output

    def ended(self, output: Any, results: Any) -> None:
        """An iteration's output has been processed; `results` are vLLM's EngineCoreOutputs of it by client."""
        now_s, attainment = self._clock(), self._attainment
        duration_s = self._iterations.end(id(output), now_s)
        work = self._work.pop(id(output), None)
        if self._measuring is not None and duration_s is not None and work:
            self._measuring.observe(duration_s, work)
        for of_client in results.values():
            for one in of_client.outputs:
                attainment.produced(one.request_id, len(one.new_token_ids), now_s)
                if one.finished:
                    attainment.ended(one.request_id, now_s)

    def given_up(self) -> None:
        """Requests were ended from outside: nobody waits for them, or they have all that was wanted of them."""
        self._attainment.retain(self._scheduler.requests, self._clock())

    # What is asked from outside.

    @property
    def cursor(self) -> int:
        """Changes when the cache's content does."""
        return self.observer.journal.cursor

    def report(self, since: int | None, epoch: str | None) -> CacheState:
        """The report of DESIGN 4.7 since a cursor of `epoch`."""
        scheduler, observer = self._scheduler, self.observer
        snapshot, stored, removed = observer.journal.since(since if epoch in {None, self.epoch} else None)
        waiting = [*scheduler.waiting, *scheduler.kv_holding_waiting]
        return CacheState(
            engine=self._settings.name,
            kind="vllm",
            epoch=self.epoch,
            cursor=observer.journal.cursor,
            model=served_model(scheduler.vllm_config),
            block_tokens=observer.block_tokens,
            granularity_tokens=observer.granularity_tokens,
            snapshot=snapshot,
            stored=stored,
            removed=removed,
            kv=observer.kv_state(),
            queue=QueueState(
                waiting=len(waiting),
                running=len(scheduler.running),
                waiting_tokens=sum(request.num_prompt_tokens for request in waiting),
                mean_queue_s=self._iterations.mean_queue_s,
            ),
            iteration=self._iterations.state(self._budget_tokens),
            scheduler=SchedulerState(self._settings.scheduler, self._attainment.share, self.preemptions),
        )

    # From vLLM's state to a plan, and back.

    def _waited_s(self, request: Any) -> float:
        """How long a request has been on its way from the API server: it is handed over between iterations only.

        By the time of day there, which may be another machine's: so never longer than an iteration.
        """
        waited_s = self._wall_clock() - float(request.arrival_time)
        return min(max(0.0, waited_s), self._iterations.last_s)

    def _calls(self) -> tuple[list[LocalCall], list[LocalCall], list[Any]]:
        """Running calls with something to compute, waiting ones in order of arrival, and requests not yet ready."""
        scheduler, ready, preempted = self._scheduler, self._ready, self._preempted
        running: list[LocalCall] = []
        for request in scheduler.running:
            call: VllmCall = request.plait_call
            call.follow_running(request)
            if call.uncomputed_tokens > 0 and not (request.num_output_placeholders and _is_ending(request)):
                running.append(call)
        self._facts.silent_calls = len(scheduler.running) - len(running)
        waiting: list[VllmCall] = []
        blocked = []
        for request in scheduler.waiting:
            if request.status is ready:
                waiting.append(request.plait_call)
            elif request.status is preempted:
                request.plait_call.follow_waiting(request)
                waiting.append(request.plait_call)
            else:  # waits for a grammar, a transfer or more input: vLLM looks whether it is there
                blocked.append(request)
        waiting.sort(key=_ORDER)
        return running, cast("list[LocalCall]", waiting), blocked

    def _preempt(self, plan: Plan) -> None:
        scheduler = self._scheduler
        for call in plan.preempt:
            request = scheduler.requests[call.call_id]
            # As vLLM preempts itself. A KV connector may still write to its blocks: then it stays.
            if scheduler._request_blocks_can_be_freed(request):  # noqa: SLF001
                scheduler.running.remove(request)
                scheduler._preempt_request(  # noqa: SLF001
                    request, time.monotonic(), drop_stale_output=scheduler.requires_kv_delivery
                )
                scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def _show(self, plan: Plan, blocked: list[Any]) -> None:
        """Leave in vLLM's queue, in the plan's order, only whom the plan admits; the others are `hidden`."""
        requests, queue = self._scheduler.requests, self._scheduler.waiting
        shown = [requests[call.call_id] for call, _ in _picks(plan) if call.waits]
        shown += [requests[call.call_id] for call in _backfill(plan) if call.waits]
        shown += blocked
        if len(shown) < len(queue):
            kept = set(map(id, shown))
            self.hidden = [request for request in queue if id(request) not in kept]
        queue.clear()
        queue.extend(shown)

    def _limit(self, plan: Plan, running: list[LocalCall]) -> None:
        """Set the budget, and limits for the calls that get less than they could take."""
        budget_tokens = self._facts.max_batch_tokens
        if plan.budget_tokens is not None:
            budget_tokens = min(budget_tokens, max(0, plan.budget_tokens))
        self._budget_tokens = self._scheduler.max_num_scheduled_tokens = budget_tokens
        picks, go_on = _picks(plan), len(plan.preempt)
        uses_up = budget_tokens <= sum(tokens for _, tokens in picks)
        last = _served_last(picks, running) if uses_up else None
        for call, tokens in picks:
            wanted = call.prompt_tokens + call.output_tokens - call.computed_tokens
            if call.waits:
                wanted -= self._facts.cached_tokens(call)
            else:
                go_on += 1
            if tokens < wanted and call is not last:  # the last one is cut by the budget's end: vLLM sees that itself
                self._limit_call(call, tokens)
        go_on += sum(not call.waits for call in _backfill(plan))
        if go_on < len(running):
            self._hold(plan, running)

    def _hold(self, plan: Plan, running: list[LocalCall]) -> None:
        """Give nothing to running calls that the plan does not name."""
        named = {id(call) for call, _ in plan.picks}
        named.update(map(id, plan.backfill))
        self.limits.update((call.call_id, 0) for call in running if id(call) not in named)

    def _limit_call(self, call: LocalCall, tokens: int) -> None:
        if self._scheduler.need_mamba_block_aligned_split:  # a chunk of such a model ends where a block does
            block_tokens = self._scheduler.cache_config.block_size
            tokens = (call.computed_tokens + tokens) // block_tokens * block_tokens - call.computed_tokens
        if tokens > 0:
            self.limits[call.call_id] = tokens

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

    def _computed(self, scheduled: dict[str, int]) -> list[tuple[int, int]]:
        """(new tokens, context tokens) of each call of an iteration."""
        requests = self._scheduler.requests
        calls = ((requests[request_id].plait_call, tokens) for request_id, tokens in scheduled.items())
        return [(tokens, call.hit_tokens if call.waits else call.computed_tokens) for call, tokens in calls]


def served_model(vllm_config: Any) -> str:
    """The name that clients know the model by: the first, where it has several."""
    names = vllm_config.model_config.served_model_name
    return str(names if isinstance(names, str) else names[0])


def _picks(plan: Plan) -> tuple[tuple[VllmCall, int], ...]:
    """The picks of a plan over our calls."""
    return cast("tuple[tuple[VllmCall, int], ...]", plan.picks)


def _backfill(plan: Plan) -> tuple[VllmCall, ...]:
    return cast("tuple[VllmCall, ...]", plan.backfill)


def _served_last(picks: Sequence[tuple[VllmCall, int]], running: Sequence[LocalCall]) -> LocalCall | None:
    """The pick that vLLM comes to last: it serves running calls in their order, and waiting ones in the plan's."""
    for call, _ in reversed(picks):
        if call.waits:
            return call
    picked = {id(call) for call, _ in picks}
    return next((call for call in reversed(running) if id(call) in picked), None)


def _is_ending(request: Any) -> bool:
    """Whether the step in flight brings an asynchronous request's last token; reckoned as vLLM does."""
    sure = request.num_computed_tokens + 2 - request.num_output_placeholders
    return bool(sure >= request.num_prompt_tokens + request.max_tokens)
