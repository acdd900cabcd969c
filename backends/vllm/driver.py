"""Follows a vLLM scheduler's requests and iterations, for the planner and for the cache-state reports.

vLLM's scheduler calls `received` for each new request, `step` around its `schedule()`, `ended` once an iteration's
output is processed, and `given_up` after aborts. Each request has its call in `plait_call`. The planner changes the
inputs of `schedule()`. The reporter records calls and iterations, and makes the reports.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

from plait.backends.adapter.scheduler_settings import VllmSettings
from plait.backends.adapter.state_reporter import StateReporter
from plait.backends.adapter.tier_journal import TierJournal
from plait.backends.protocol.cache_state import CacheState, Tier
from plait.backends.protocol.call_annotations import AnnotationReader
from plait.backends.protocol.call_objectives import read_changes
from plait.backends.vllm.cache_state import PoolObserver
from plait.backends.vllm.calls import VllmCall, vllm_call
from plait.backends.vllm.compatibility import CompatibleScheduler
from plait.backends.vllm.planner import VllmPlanner
from plait.policy.scheduling.plan import LocalScheduler


class VllmDriver:
    """Follows one engine. `statuses` is vLLM's RequestStatus. `lower` are the tiers of the cache below the accelerator.

    `planner` is None in the tier `reports`. While an iteration is being scheduled, `limits` has the most tokens that
    some requests may compute, by request id.
    """

    def __init__(
        self,
        scheduler: Any,
        observer: PoolObserver,
        settings: VllmSettings,
        *,
        statuses: Any,
        tier: Tier = "chunks",
        lower: Sequence[TierJournal] = (),
        policy: LocalScheduler | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.annotations = AnnotationReader()
        self.epoch = uuid.uuid4().hex
        self.observer = observer
        self.limits: dict[str, int] = {}
        self.preemptions = 0
        self._scheduler = scheduler
        self._clock, self._wall_clock = clock, wall_clock
        self._compatible = CompatibleScheduler(scheduler)
        self.planner: VllmPlanner | None = None
        if tier != "reports":
            self._compatible = CompatibleScheduler(scheduler, (statuses.WAITING, statuses.PREEMPTED))
            self.planner = VllmPlanner(
                *(scheduler, self._compatible, observer, settings),
                statuses=statuses,
                limits=self.limits if tier == "chunks" else None,
                policy=policy,
            )
        self._reporter = StateReporter(
            engine=settings.name,
            kind="vllm",
            epoch=self.epoch,
            model=served_model(scheduler.vllm_config),
            block_tokens=observer.block_tokens,
            policy=settings.policy(tier),
            journal=observer.journal,
            takes_objectives=True,
            slots=self._compatible.slots,
            tier=tier,
            lower=lower,
            ends=observer.ends,
            untold=observer.untold,
        )
        self._iterations = self._reporter.iterations
        self._sequence = count()

    # Called by vLLM's scheduler.

    def received(self, request: Any) -> None:
        arguments = request.sampling_params.extra_args if request.sampling_params is not None else None
        annotations = self.annotations.read(arguments)
        received_s = self._clock() - self._waited_s(request)
        call = request.plait_call = vllm_call(request, annotations, received_s, next(self._sequence))
        tree_blocks = partial(self.observer.prompt_blocks, request)
        self._reporter.received(call.call_id, call, annotations.handle, annotations.gateway, tree_blocks)

    def change_objectives(self, body: bytes) -> int:
        """Change objectives of calls. Returns for how many of the changes there is a call. Raises `CallerError`."""
        return self._reporter.refinable.refine(read_changes(body, self.annotations))

    def step(self, schedule: Callable[[], Any]) -> Any:
        """Schedule an iteration, by a plan if there is a planner, and return it. `schedule` is vLLM's own method."""
        now_s = self._clock()
        output = schedule() if self.planner is None else self.planner.step(now_s, schedule)
        self._observe(output, now_s)
        return output

    def ended(self, output: Any, results: Any) -> None:
        """An iteration's output has been processed. `results` are its EngineCoreOutputs in vLLM, by client."""
        now_s, reporter = self._clock(), self._reporter
        duration_s = self._iterations.end(id(output), now_s)
        if self.planner is not None:
            self.planner.ended(output, now_s, duration_s)
        for of_client in results.values():
            for one in of_client.outputs:
                reporter.produced(one.request_id, len(one.new_token_ids), now_s)
                if one.finished:
                    reporter.ended(one.request_id, now_s)

    def given_up(self) -> None:
        """Requests were ended from outside: their clients have gone, or a stop string was found in their output."""
        self._reporter.retain(self._scheduler.requests, self._clock())

    @property
    def held_back(self) -> int:
        """How many waiting requests the planner hides from vLLM while an iteration is being scheduled."""
        return 0 if self.planner is None else len(self.planner.levers.hidden)

    # Called for reports.

    @property
    def cursor(self) -> int:
        """The number of changes of the cache and of calls so far."""
        if self.observer.ends is not None:
            self.observer.ends.settle()
        return self.observer.journal.cursor

    def has_news(self, since: int, epoch: str | None, gateway: str | None) -> bool:
        """Whether a report since a cursor of `epoch` would have a change for the `gateway` that asks."""
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
            budget_tokens=self._budget_tokens,
            preemptions=self.preemptions,
            gateway=gateway,
        )

    @property
    def _budget_tokens(self) -> int:
        """The latest plan's token budget. Without plans it is vLLM's, or 0 if this version lacks the name."""
        if self.planner is not None:
            return self.planner.levers.budget_tokens
        return int(getattr(self._scheduler, "max_num_scheduled_tokens", 0))

    def _waited_s(self, request: Any) -> float:
        """How long a request took from the API server to the scheduler, which reads requests between iterations only.

        The server stamps requests by its time of day, maybe on another machine. So the wait is capped at one iteration.
        """
        waited_s = self._wall_clock() - float(request.arrival_time)
        return min(max(0.0, waited_s), self._iterations.last_s)

    def _observe(self, output: Any, now_s: float) -> None:
        scheduled, iterations = output.num_scheduled_tokens, self._iterations
        if scheduled:
            iterations.begin(id(output), now_s)  # vLLM gives the same object to `update_from_output`
            iterations.computes(scheduled.values())
        for new in output.scheduled_new_reqs:
            call: VllmCall = self._scheduler.requests[new.req_id].plait_call
            if not call.admitted:
                call.admitted = True
                iterations.admitted(now_s - call.received_s)


def served_model(vllm_config: Any) -> str:
    """The model's name for clients; the first of several."""
    names = vllm_config.model_config.served_model_name
    return str(names if isinstance(names, str) else names[0])
