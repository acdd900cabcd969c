"""The embedded engine's core: an iteration loop over a block cache, with time as an argument.

Calls come by `add` and leave with their last token, or by `remove` or `abort`. `step(now)` ends the iteration in
flight, returns its tokens and begins the next one. The local scheduler plans an iteration from the engine's facts,
blocks are found or allocated, and the cost model predicts how long an accelerator would take. A real-time server sleeps
for that time (`lab/embedded/clock.py`); the simulator advances its virtual clock. At most one iteration is in
flight.

As vLLM and SGLang do on a GPU, the engine plans the next iteration when one begins (`EngineSettings.ahead`). So the
plan does not know the tokens that are being computed. A call that ends with one of them, other than by its limit, has
a place in the next iteration that is computed for nothing.
"""

from __future__ import annotations

import random
from bisect import insort
from dataclasses import dataclass
from operator import attrgetter
from typing import cast

from plait.backends.adapter.prefix_search import shared_blocks
from plait.backends.adapter.scheduler_settings import measuring
from plait.backends.adapter.state_reporter import StateReporter
from plait.backends.protocol.cache_state import CacheState
from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint
from plait.lab.embedded.call import EmbeddedCall, Output
from plait.lab.embedded.kv_blocks import KvBlocks, Load
from plait.lab.embedded.lower_tiers import TierSettings
from plait.lab.embedded.windowed_blocks import WindowedBlocks
from plait.policy.costs.cost_model import CostModel
from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.scheduling.plan import InFlight, IterationWork, LocalCall, LocalScheduler, Plan
from plait.policy.scheduling.preemption import WATERMARK_BLOCKS


class EmbeddedFacts:
    """The `EngineFacts` of one embedded engine, read from its `blocks`."""

    def __init__(self, blocks: KvBlocks, *, max_batch_tokens: int, max_running_calls: int) -> None:
        self.max_batch_tokens = max_batch_tokens
        """The most new tokens one iteration may compute."""
        self.max_running_calls = max_running_calls
        """The most calls of a plan that may run at once."""
        self.in_flight: InFlight | None = None
        """The iteration that is computed now."""
        self.shares_in_iteration = True
        """Other calls can hit a block once its computation is scheduled."""
        self.loading: dict[LocalCall, Load] = {}
        """The waiting calls whose blocks are being loaded from lower tiers."""
        self.window = blocks if isinstance(blocks, WindowedBlocks) else None
        """The blocks, if they have a window."""
        self._cache = blocks.cache
        self._matched = blocks.matched
        self._loadable = blocks.loadable
        self._has_lower = bool(blocks.lower)
        self._block_tokens = blocks.block_tokens

    @property
    def free_blocks(self) -> int:
        """KV blocks that no call uses. A waiting call uses the blocks that were loaded or are kept for it."""
        return self._cache.free_blocks

    def cached_tokens(self, call: LocalCall) -> int:
        """How many tokens of a waiting call some tier has now, without the last token, which is always computed."""
        assert isinstance(call, EmbeddedCall)
        blocks = self._matched(call) + self._loadable(call) if self._has_lower else self._matched(call)
        return blocks * self._block_tokens

    def blocks_needed(self, call: LocalCall, new_tokens: int) -> int:
        """How many free blocks a call takes for its next `new_tokens` tokens.

        Cached blocks that no call uses count as free, so a waiting call's hits on them are included.
        """
        assert isinstance(call, EmbeddedCall)
        more = self.window.window_needed(call, new_tokens) if self.window is not None else 0
        if call.blocks:
            return -(-(call.computed_tokens + new_tokens) // self._block_tokens) - len(call.blocks) + more
        more += self._cache.idle(call.chain.hashes, self._matched(call))
        return -(-new_tokens // self._block_tokens) + more + (self._loadable(call) if self._has_lower else 0)

    def blocks_freed(self, call: LocalCall) -> int:
        """How many blocks preempting a running call would free."""
        assert isinstance(call, EmbeddedCall)
        return self._cache.exclusive(call.blocks + call.window_blocks)

    def stored_tokens(self, call: LocalCall) -> int:
        """How many tokens of a running call other calls can find in the cache."""
        tokens = call.computed_tokens
        return tokens if self.window is None else self.window.end_of(cast("EmbeddedCall", call), tokens)

    def block_key(self, call: LocalCall, tokens: int) -> int | None:
        """The hash of the block after the call's first `tokens`; None if the call has no whole block there."""
        assert isinstance(call, EmbeddedCall)
        hashes, index = call.chain.hashes, tokens // self._block_tokens
        return hashes[index] if index < len(hashes) else None

    def shared_tokens(self, call: LocalCall, other: LocalCall) -> int:
        """How many tokens a waiting call could take from another call's blocks."""
        assert isinstance(call, EmbeddedCall)
        assert isinstance(other, EmbeddedCall)
        own, others = call.chain.hashes, other.chain.hashes
        most = min(len(others), (call.prompt_tokens + call.output_tokens - 1) // self._block_tokens)
        tokens = shared_blocks(own, others, most) * self._block_tokens
        return tokens if self.window is None else self.window.end_of(other, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    name: str
    model: str
    kv_tokens: int
    """Tokens that fit into the accelerator's KV cache."""
    block_tokens: int = 16
    max_batch_tokens: int = 2048
    """The most new tokens of an iteration."""
    max_running_calls: int = 256
    ahead: int = 1
    """1: an iteration is planned while the one before is computed; 0: when that has ended."""
    scheduler: str = "slo"
    """A name in `plait.policy.scheduling.local_scheduler.SCHEDULERS`."""
    jitter: float = 0.0
    """An iteration's time is off by up to this share of it, either way, drawn by `seed`."""
    seed: int = 0
    lower: tuple[TierSettings, ...] = ()
    """The tiers below the KV cache, the fastest first."""
    window_tokens: int = 0
    """The window of a second group of layers, whose blocks come from the same cache. 0: all layers see all tokens."""


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens of the iteration that ended, and when to call `step` again (None: when a call is added)."""

    outputs: tuple[Output, ...]
    ends_s: float | None


@dataclass(slots=True)
class _Iteration:
    """A planned iteration: (new tokens, context tokens) of each call, and the calls that get an output token."""

    calls: list[tuple[int, int]]
    emits: list[EmbeddedCall]
    ends_s: float = 0.0


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    """Found at calls' first admissions, including loaded tokens."""
    loaded_tokens: int = 0
    """Tokens of all loads from lower tiers that have begun."""
    computed_prompt_tokens: int = 0
    """With the prompts computed again after preemptions."""
    output_tokens: int = 0
    iterations: int = 0
    busy_s: float = 0.0
    preemptions: int = 0
    aborted_calls: int = 0


class Engine:
    """One embedded engine. `scheduler` replaces the settings' scheduler. `tokenizer` is reported with the cache state.

    A caller may replace `cost_model`, which makes the emulated accelerator faster or slower from then on.
    """

    def __init__(
        self,
        settings: EngineSettings,
        cost_model: CostModel,
        *,
        scheduler: LocalScheduler | None = None,
        epoch: str = "0",
        tokenizer: TokenizerFingerprint | None = None,
    ) -> None:
        self.settings = settings
        self.epoch = epoch
        self.counters = Counters()
        self.waiting: list[EmbeddedCall] = []
        self.running: list[EmbeddedCall] = []
        self.cost_model = cost_model
        self.tokenizer = tokenizer
        self._scheduler = scheduler or SCHEDULERS[settings.scheduler]()
        self._measuring = measuring(self._scheduler, cost_model)
        size, window_tokens = (settings.kv_tokens, settings.block_tokens), settings.window_tokens
        if window_tokens and settings.lower:
            raise ValueError(f"a window of {window_tokens} tokens: the KV cache can have no lower tiers beside it")
        self._blocks = KvBlocks(*size, settings.lower)
        if window_tokens:
            self._blocks = WindowedBlocks(*size, window_tokens, settings.max_batch_tokens)
        self.room_tokens = self._blocks.room_tokens
        """The tokens of the longest call whose KV fits into an otherwise empty cache."""
        self.journal = self._blocks.journal
        self.facts = EmbeddedFacts(
            self._blocks, max_batch_tokens=settings.max_batch_tokens, max_running_calls=settings.max_running_calls
        )
        self._current: _Iteration | None = None
        self._planned: _Iteration | None = None
        self._noise = random.Random(settings.seed)  # noqa: S311 - not for security
        self._reporter = StateReporter(
            engine=settings.name, kind="embedded", epoch=epoch, model=settings.model, tokenizer=tokenizer,
            block_tokens=settings.block_tokens,
            policy=settings.scheduler, journal=self.journal, takes_objectives=True, slots=settings.max_running_calls,
            lower=self._blocks.lower.told, ends=self._blocks.ends,
        )  # fmt: skip
        self._iterations = self._reporter.iterations
        self.refinable = self._reporter.refinable
        self._stepped_s = 0.0
        """When `step` ended the last iteration: the time of its tokens."""

    @property
    def idle(self) -> bool:
        """Whether no iteration is in flight, so that a new call needs a `step`."""
        return self._current is None

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether a call's KV fits into an otherwise empty cache."""
        return prompt_tokens + output_tokens <= self.room_tokens

    def add(self, call: EmbeddedCall) -> None:
        """Queue a call, which must fit (see `fits`)."""
        assert call.prompt_tokens > 0
        assert call.final_output_tokens > 0
        self.counters.calls += 1
        insort(self.waiting, call, key=attrgetter("arrived_s"))
        tree_chain = call.tree_chain
        self._reporter.received(call, call, call.handle, call.gateway, lambda: tree_chain.hashes)

    def abort(self, call: EmbeddedCall) -> None:
        """Abort a call whose client has gone. Its blocks are free at once."""
        if self.remove(call):
            self.counters.aborted_calls += 1

    def remove(self, call: EmbeddedCall) -> bool:
        """End a call early. Returns False if it had ended already."""
        if call in self.running:
            self.running.remove(call)
            self._blocks.release(call)
        elif call in self.waiting:
            self.waiting.remove(call)
            load = self.facts.loading.pop(call, None)
            if load is None:
                self._blocks.let_go(call)
            else:
                self._blocks.give_up(call, load)
        else:
            return False
        for iteration in (self._current, self._planned):
            if iteration is not None and call in iteration.emits:
                iteration.emits.remove(call)
        call.output_tokens = call.sent_tokens
        self._reporter.ended(call, self._stepped_s)
        return True

    def step(self, now_s: float) -> Step:
        """End the iteration in flight and begin the next. No effect before the end of an iteration in flight."""
        ended = self._current
        if ended is not None and now_s < ended.ends_s:
            return Step((), ended.ends_s)
        self._stepped_s = now_s
        if self.facts.loading:
            self._end_loads(now_s)
        if self._measuring is not None and self.facts.in_flight is not None:
            self._measuring.observe(self._iterations.last_s, self.facts.in_flight.work)
        self._current = self.facts.in_flight = None
        outputs = () if ended is None else tuple([self._emit(call) for call in ended.emits])
        begun = self._current = self._planned or self._plan_next(now_s)
        if begun is None:
            return Step(outputs, min((load.ends_s for load in self.facts.loading.values()), default=None))
        self._begin(begun, now_s)
        self._planned = self._plan_next(now_s) if self.settings.ahead else None
        return Step(outputs, begun.ends_s)

    def extend(self, ends_s: float) -> None:
        """Let the iteration in flight, if any, end at `ends_s`, which is not before its own end."""
        if self._current is not None:
            self._iterations.extend(ends_s - self._current.ends_s)
            self._current.ends_s = ends_s

    def has_news(self, since: int, gateway: str | None = None) -> bool:
        """Whether cached blocks or other gateways' calls changed since the report with cursor `since`."""
        return self._reporter.has_news(since, None, gateway)

    def cache_state(self, since: int | None = None, gateway: str | None = None) -> CacheState:
        """The cache-state report (docs/design/residency.md). The calls of `gateway`, which asks, are left out."""
        return self._reporter.report(
            since,
            self.epoch,
            kv=self._blocks.state(),
            waiting_prompts=[call.prompt_tokens for call in self.waiting],
            running=len(self.running),
            budget_tokens=self.settings.max_batch_tokens,
            preemptions=self.counters.preemptions,
            gateway=gateway,
        )

    def _plan_next(self, now_s: float) -> _Iteration | None:
        """Plan an iteration, with the blocks of its calls. None if there is nothing to compute."""
        window = self.facts.window
        if window is not None:
            window.slide(self.running)
        plan = self._plan(now_s)
        for call in plan.preempt:
            assert isinstance(call, EmbeddedCall)
            self._preempt(call)
        planned = _Iteration([], [])
        for call, planned_tokens in plan.picks:
            tokens = planned_tokens
            assert isinstance(call, EmbeddedCall)
            if not call.blocks:
                if window is not None and self.facts.blocks_needed(call, tokens) > self.facts.free_blocks:
                    continue  # an earlier pick has evicted a part of the call's hit, and a shorter one takes more
                self._admit(call, now_s)
                tokens = min(tokens, call.uncomputed_tokens)  # an earlier pick may have cached more of the prompt
            planned.calls.append((tokens, call.computed_tokens))
            self._schedule(call, tokens, planned)
        self._load_ahead(plan, now_s)
        return planned if planned.calls else None

    def _begin(self, iteration: _Iteration, now_s: float) -> None:
        calls = iteration.calls
        duration_s = self.cost_model.iteration_time_s(calls)
        if self.settings.jitter:
            duration_s *= 1 + self.settings.jitter * self._noise.uniform(-1, 1)
        work = IterationWork.of([tokens for tokens, _ in calls], [context for _, context in calls])
        iteration.ends_s = now_s + duration_s
        self.facts.in_flight = InFlight(work, now_s)
        self.counters.iterations += 1
        self.counters.busy_s += duration_s
        self._iterations.computes([tokens for tokens, _ in work.chunks])
        self._iterations.took(duration_s)

    def _plan(self, now_s: float) -> Plan:
        """The next iteration's plan.

        If loading a picked call's blocks from a lower tier takes less time than computing them, the load begins, and
        the plan is made again without the call.
        """
        waiting, running, facts = self.waiting, self._to_run(), self.facts
        plan = self._scheduler.plan(now_s, waiting, running, facts)
        if not self._blocks.lower:
            return plan
        while self._load_picked(plan, now_s):
            plan = self._scheduler.plan(now_s, waiting, running, facts)
        if not plan.picks and not facts.loading and self.idle and any(call.kept for call in waiting):
            for call in waiting:  # a deadlock: the blocks kept for each call leave no room for any
                self._blocks.let_go(call)
            plan = self._scheduler.plan(now_s, waiting, running, facts)
        return plan

    def _to_run(self) -> list[EmbeddedCall]:
        """The running calls without those whose last token, by their limit, is in flight."""
        running = self.running
        if not self.idle:
            running = [
                call
                for call in running
                if call.max_output_tokens is None or call.output_tokens < call.max_output_tokens
            ]
        self.facts.max_running_calls = self.settings.max_running_calls - len(self.running) + len(running)
        return running

    def _load_picked(self, plan: Plan, now_s: float) -> bool:
        """Begin loads for the calls that a plan starts. Returns whether a load has begun."""
        before = len(self.facts.loading)
        for call, _ in plan.picks:
            if not cast("EmbeddedCall", call).blocks:
                self._load(call, now_s)
        return len(self.facts.loading) > before

    def _load(self, call: LocalCall, now_s: float) -> None:
        """Begin to load a waiting call's blocks if lower tiers have some, and loading is faster than computing."""
        assert isinstance(call, EmbeddedCall)
        load = self._blocks.load(call, now_s, self.cost_model.added_s)
        if load is None:
            return
        self.facts.loading[call] = load
        tokens = len(load.blocks) * self.settings.block_tokens
        call.loaded_tokens += tokens
        self.counters.loaded_tokens += tokens

    def _load_ahead(self, plan: Plan, now_s: float) -> None:
        """Begin loads for `plan.backfill`, the calls that may take the rest of the budget.

        `WATERMARK_BLOCKS` stay free for each running call.
        """
        if self._blocks.lower and not plan.preempt:
            spare = WATERMARK_BLOCKS * len(self.running)
            for call in plan.backfill:
                if call in self.waiting and self.facts.blocks_needed(call, 1) + spare <= self.facts.free_blocks:
                    self._load(call, now_s)

    def _end_loads(self, now_s: float) -> None:
        loading = self.facts.loading
        for call in [call for call, load in loading.items() if load.ends_s <= now_s]:
            assert isinstance(call, EmbeddedCall)
            self._blocks.loaded(call, loading.pop(call))

    def _admit(self, call: EmbeddedCall, now_s: float) -> None:
        """Start a waiting call on its cached blocks."""
        self._blocks.admit(call)
        if call.cached_tokens is None:
            call.cached_tokens = call.computed_tokens
            self.counters.prompt_tokens += call.prompt_tokens
            self.counters.cached_prompt_tokens += call.cached_tokens
            self._iterations.admitted(now_s - call.queued_since_s)
        self.waiting.remove(call)
        self.running.append(call)

    def _schedule(self, call: EmbeddedCall, tokens: int, iteration: _Iteration) -> None:
        if call.computed_tokens < call.prompt_tokens:
            self.counters.computed_prompt_tokens += min(tokens, call.prompt_tokens - call.computed_tokens)
        self._blocks.extend(call, tokens)
        if call.uncomputed_tokens == 0:
            iteration.emits.append(call)
            call.output_tokens += 1

    def _emit(self, call: EmbeddedCall) -> Output:
        token = next(call.output)
        call.sent_tokens += 1
        has_filled_block = call.chain.append(token)
        if call.tree_chain is not call.chain:
            call.tree_chain.append(token)
        self.counters.output_tokens += 1
        self._reporter.produced(call, 1, self._stepped_s)
        finished = call.sent_tokens >= call.final_output_tokens
        if finished:
            self.remove(call)
        elif has_filled_block and self._planned is not None:
            self._blocks.register(call)
        return Output(call, token, finished)

    def _preempt(self, call: EmbeddedCall) -> None:
        """Put a call back at the head of the queue. The blocks stay cached until they are evicted, as in vLLM."""
        self.counters.preemptions += 1
        self.running.remove(call)
        self._blocks.take_back(call)
        self.waiting.insert(0, call)
