"""Shows a vLLM scheduler's state to a local scheduler, and makes the vLLM scheduler follow its plans.

vLLM's `schedule()` runs unchanged. A plan sets the state that `schedule()` reads: the waiting queue and its order, and
the token budget. In the tier `chunks`, it also limits requests' chunks, and preempts before `schedule()`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from operator import attrgetter
from typing import Any, cast

from plait.backends.adapter.scheduler_settings import WHERE, VllmSettings, cost_model, local_scheduler, measuring
from plait.backends.vllm.cache_state import PoolObserver
from plait.backends.vllm.calls import VllmCall, VllmFacts
from plait.backends.vllm.compatibility import CompatibleScheduler
from plait.backends.vllm.levers import VllmLevers
from plait.policy.scheduling.plan import InFlight, IterationWork, LocalCall, LocalScheduler, Plan

_ORDER = attrgetter("order")


class VllmPlanner:
    """Runs one engine's local scheduler. `statuses` is vLLM's RequestStatus.

    `levers` write a plan's limits on requests' chunks into `limits`, by request id. Below the tier `chunks` it is None:
    there are no limits and no preemption.
    """

    def __init__(
        self,
        scheduler: Any,
        compatible: CompatibleScheduler,
        observer: PoolObserver,
        settings: VllmSettings,
        *,
        statuses: Any,
        limits: dict[str, int] | None,
        policy: LocalScheduler | None = None,
    ) -> None:
        self.policy = policy or local_scheduler(settings, WHERE)
        self.facts = VllmFacts(scheduler, compatible, observer)
        self.levers = VllmLevers(scheduler, self.facts, limits)
        self.diverged_picks = 0
        """Picks that vLLM did not schedule as planned, because it found fewer cached tokens or too few blocks."""
        self._scheduler = scheduler
        self._compatible = compatible
        self._preempts = limits is not None
        self._ready, self._preempted = statuses.WAITING, statuses.PREEMPTED
        self._measuring = measuring(self.policy, cost_model(settings, WHERE))
        self._in_flight: dict[int, InFlight] = {}
        """Iterations whose outputs have not come, each with the time of its plan."""
        self._ended_s = self._lasted_s = 0.0  # of the iteration that has ended last

    def step(self, now_s: float, schedule: Callable[[], Any]) -> Any:
        """Schedule an iteration by a plan, and return vLLM's output. `schedule` is vLLM's own method."""
        self.facts.in_flight, self.facts.found = self._latest(), {}
        paused = self._scheduler.pause_state.value  # in part or in full: vLLM decides what runs
        output = schedule() if paused else self._planned(now_s, schedule)
        if output.num_scheduled_tokens and self._measuring is not None:
            self._in_flight[id(output)] = InFlight(self._computed(output.num_scheduled_tokens), now_s)
        return output

    def ended(self, output: Any, now_s: float, duration_s: float | None) -> None:
        """An iteration's output was processed. The iteration took `duration_s`; None: not known."""
        ended = self._in_flight.pop(id(output), None)
        if self._measuring is not None and duration_s is not None and ended is not None:
            self._ended_s, self._lasted_s = now_s, duration_s
            self._measuring.observe(duration_s, ended.work)

    def _latest(self) -> InFlight | None:
        """The iteration that was planned last, if it is still computed. It begins when the one before has ended.

        With pipeline parallelism, several are in flight. Those before the latest last as long as the one that ended.
        """
        if not self._in_flight:
            return None
        first, latest = next(iter(self._in_flight.values())), next(reversed(self._in_flight.values()))
        began_s = max(first.began_s, self._ended_s)
        return InFlight(latest.work, began_s + (len(self._in_flight) - 1) * self._lasted_s)

    def _planned(self, now_s: float, schedule: Callable[[], Any]) -> Any:
        running, waiting, blocked = self._calls()
        plan = self.policy.plan(now_s, waiting, running, self.facts)
        if self._preempts:
            self._preempt(plan)
        self.levers.show(plan, blocked)
        self.levers.limit(plan, running, self._compatible.count_loaded())
        try:
            output = schedule()
        finally:
            self.levers.give_back()
        scheduled = output.num_scheduled_tokens
        self.diverged_picks += sum(scheduled.get(call.call_id) != tokens for call, tokens in plan.picks)
        return output

    # From vLLM's state to a plan, and back.

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
        self.facts.silent_calls = len(scheduler.running) - len(running)
        # vLLM preempts from the end of its list. A call whose last token is in flight loses nothing by that.
        ending = takewhile(_is_ending, reversed(scheduler.running))
        self.facts.ending_blocks = sum(self.facts.blocks_freed(request.plait_call) for request in ending)
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

    def _computed(self, scheduled: dict[str, int]) -> IterationWork:
        """An iteration's work, from the scheduled tokens of each request. vLLM has counted them as computed."""
        requests, tokens = self._scheduler.requests, scheduled.values()
        return IterationWork.of(
            tokens, [requests[name].num_computed_tokens - new for name, new in zip(scheduled, tokens, strict=True)]
        )


def _is_ending(request: Any) -> bool:
    """Whether the step in flight computes a request's last token under asynchronous scheduling, by vLLM's formula."""
    in_flight = request.num_output_placeholders
    if not in_flight:
        return False
    return bool(request.num_computed_tokens + 2 - in_flight >= request.num_prompt_tokens + request.max_tokens)
