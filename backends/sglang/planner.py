"""Shows a SGLang scheduler's state to a local scheduler, and makes the SGLang scheduler follow its plans.

SGLang's `get_new_batch_prefill()` runs unchanged. A plan sets the state that this method reads: the waiting queue and
its order, the prompt in chunks, the chunk size, and whether decodes are mixed in. In the tier `chunks`, a plan also
limits the tokens of each prompt, and preempts before the method runs. Decisions depend only on state that is the same
on all tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

from plait.backends.adapter.scheduler_settings import VARIABLE, SglangSettings, cost_model, local_scheduler, measuring
from plait.backends.sglang.cache_state import CacheObserver
from plait.backends.sglang.calls import Requests, SglangCall, SglangFacts, WaitingHits
from plait.backends.sglang.compatibility import CompatibleAdder, batch_of
from plait.backends.sglang.levers import NO_LIMITS, SglangLevers, levers_of, limited, preempt
from plait.policy.scheduling.plan import IterationWork, LocalCall, LocalScheduler, Plan


class SglangPlanner:
    """Runs one rank's local scheduler. `release` is SGLang's `release_req`, which frees a request's resources.

    `prefill_pass` has the plan's limits on the current prefill pass. Without `cuts` (below the tier `chunks`) there is
    neither a limit nor a preemption.
    """

    def __init__(
        self,
        scheduler: Any,
        observer: CacheObserver,
        settings: SglangSettings,
        *,
        release: Callable[..., Any],
        cuts: bool,
        policy: LocalScheduler | None = None,
    ) -> None:
        self.policy = policy or local_scheduler(settings, VARIABLE)
        self.facts = SglangFacts(scheduler, observer)
        self.prefill_pass = NO_LIMITS
        self.budget_tokens = self.facts.max_batch_tokens
        self.diverged_picks = 0
        """Picks that SGLang did not schedule as planned, because it found more cached tokens or too few pages."""
        self._scheduler = scheduler
        self._release = release
        self._cuts = cuts
        self._adder = CompatibleAdder(scheduler, limited) if cuts else None
        self._measuring = measuring(self.policy, cost_model(settings, VARIABLE))
        self._mixes: bool = scheduler.is_mixed_chunk
        self._chunk_size: int = scheduler.chunked_prefill_size
        self._decodes_are_due = False
        self._untold = observer.untold
        self._hits = WaitingHits(observer)
        self._requests = Requests(scheduler, self._hits)

    def measured(self, duration_s: float, work: IterationWork) -> None:
        if self._measuring is not None and work.new_tokens:
            self._measuring.observe(duration_s, work)

    def queued(self, request: Any) -> None:
        """A request begins to wait, for the first time or after a preemption."""
        self._requests.queued(request)

    def step(self, now_s: float, running_batch: Any, schedule: Callable[[], Any]) -> Any:
        """Schedule a prefill pass by a plan, beside the decodes of `running_batch`. `schedule` is SGLang's own."""
        running, waiting = self._requests.calls(running_batch)
        self.facts.follow_running(running)
        self._hits.follow()
        if self._untold:  # windows and states come and go without an event
            self._requests.limit_hits()
        if not running and not waiting:
            return schedule()
        plan = self.policy.plan(now_s, cast("list[LocalCall]", waiting), cast("list[LocalCall]", running), self.facts)
        victims = [self._requests.of(cast("SglangCall", call)) for call in plan.preempt if self._cuts]
        preempted = preempt(self._scheduler, running_batch, victims, self._release)
        levers = self._levers(plan)
        result = self._pulled(levers, running_batch, schedule)
        for request in preempted:  # not before `schedule`, or output in flight would count for the request's next run
            self._scheduler._add_request_to_queue(request, is_retracted=True)  # noqa: SLF001
        self._observe(levers, batch_of(result))
        return result

    # From a plan to SGLang's state, and back.

    def _levers(self, plan: Plan) -> SglangLevers:
        request = self._scheduler.chunked_req
        in_chunks = None if request is None else request.plait_call
        levers = levers_of(plan, in_chunks, self.facts, self._scheduler.page_size, cuts=self._cuts)
        self.budget_tokens = self.facts.max_batch_tokens
        if plan.budget_tokens is not None:
            self.budget_tokens = min(self.budget_tokens, max(0, plan.budget_tokens))
        if self._mixes or not levers.decodes:
            return levers
        # If SGLang does not mix prompts and decodes in a batch, they take turns.
        self._decodes_are_due = not self._decodes_are_due and levers.prompt_tokens > 0
        return levers if self._decodes_are_due else SglangLevers()

    def _pulled(self, levers: SglangLevers, running_batch: Any, schedule: Callable[[], Any]) -> Any:
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
            with nullcontext() if self._adder is None else self._adder.limiting(self.prefill_pass):
                return schedule()
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
