"""The embedded engine's core: an iteration loop over a block cache, with time as an argument.

`step(now)` ends the iteration in flight and begins the next one: the local scheduler plans it, blocks are found or
allocated, and the cost model says how long an accelerator would take. A real-time server sleeps until then; the
simulator jumps. Blocks become findable when their computation is scheduled, as in vLLM: a later iteration reads them.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter

from plait.backends.adapter.attainment import Attainment
from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.embedded.block_cache import BlockCache
from plait.backends.protocol.cache_state import CacheState, IterationState, KvState, QueueState, SchedulerState
from plait.policy.cost_model import CostModel
from plait.policy.prefix.block_hash import HashChain, tree_block_tokens
from plait.policy.scheduling.local_scheduler import SCHEDULERS, LocalCall, LocalScheduler, MeasuringScheduler
from plait.policy.scheduling.plan import RECENT_ITERATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What one emulated engine is: `kv_tokens` is the KV cache's size, `max_batch_tokens` an iteration's budget.

    `scheduler` is the local scheduler, by its name in `plait.policy.scheduling.local_scheduler.SCHEDULERS`.
    """

    name: str
    model: str
    kv_tokens: int
    block_tokens: int = 16
    max_batch_tokens: int = 2048
    max_running_calls: int = 256
    scheduler: str = "slo"


@dataclass(slots=True, eq=False)
class EmbeddedCall(LocalCall):
    """A call in this engine: its tokens as hashes of KV blocks and of tree blocks, and where its output comes from.

    `cached_tokens` is what the first admission found in the cache, as vLLM reports it in `usage`. `received_s` is when
    it came here, which can be later than its zero; `matched_blocks` is what was last found in the cache.
    """

    chain: HashChain = field(kw_only=True)
    tree_chain: HashChain = field(kw_only=True)
    max_output_tokens: int = field(kw_only=True)
    output: Iterator[int] = field(default_factory=lambda: repeat(0), kw_only=True)
    blocks: list[int] = field(default_factory=list, kw_only=True)
    registered_blocks: int = field(default=0, kw_only=True)
    cached_tokens: int | None = field(default=None, kw_only=True)
    received_s: float | None = field(default=None, kw_only=True)
    matched_blocks: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class Output:
    """One generated token of a call; `finished` when it was the last."""

    call: EmbeddedCall
    token: int
    finished: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What the ended iteration brought, and when the one that began will end (None: the engine is idle)."""

    outputs: tuple[Output, ...]
    ends_s: float | None


@dataclass(slots=True)
class Counters:
    """Totals since the start; `computed_prompt_tokens` counts recomputation after preemption too."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    output_tokens: int = 0
    iterations: int = 0
    busy_s: float = 0.0
    preemptions: int = 0
    aborted_calls: int = 0


class Engine:
    """One emulated engine. It also is the `EngineFacts` that its local scheduler plans from.

    `scheduler` is used in place of a new one of the settings' name.
    """

    def __init__(
        self,
        settings: EngineSettings,
        cost_model: CostModel,
        *,
        scheduler: LocalScheduler | None = None,
        epoch: str = "0",
    ) -> None:
        self.settings = settings
        self.granularity_tokens = tree_block_tokens(settings.block_tokens)
        self.epoch = epoch
        self.counters = Counters()
        self.journal = CacheJournal()
        self.waiting: list[EmbeddedCall] = []
        self.running: list[EmbeddedCall] = []
        self._cost_model = cost_model
        self._scheduler = scheduler or SCHEDULERS[settings.scheduler]()
        self._measuring = self._scheduler if isinstance(self._scheduler, MeasuringScheduler) else None
        if self._measuring is not None:
            self._measuring.expect(cost_model)
        self._cache = BlockCache(settings.kv_tokens // settings.block_tokens, self._evicted)
        self._tree_block_of: dict[int, int] = {}
        self._in_flight: list[EmbeddedCall] = []
        self._ends_s: float | None = None
        self._work: list[tuple[int, int]] = []
        self._recent_s: deque[float] = deque(maxlen=RECENT_ITERATIONS)
        self._recent_chunks: deque[int] = deque(maxlen=RECENT_ITERATIONS)
        self._recent_queue_s: deque[float] = deque(maxlen=RECENT_ITERATIONS)
        self._attainment = Attainment()
        self._stepped_s = 0.0
        """When the last iteration ended: the tokens that calls have until the next step came then."""

    # What the local scheduler asks (EngineFacts).

    @property
    def max_batch_tokens(self) -> int:
        """The most new tokens one iteration may compute."""
        return self.settings.max_batch_tokens

    @property
    def max_running_calls(self) -> int:
        """The most calls that may run at once."""
        return self.settings.max_running_calls

    @property
    def free_blocks(self) -> int:
        """KV blocks that no running call uses."""
        return self._cache.free_blocks

    def cached_tokens(self, call: LocalCall) -> int:
        """Tokens of a waiting call that are in the cache now; its last token is always computed."""
        assert isinstance(call, EmbeddedCall)
        return self._matched_blocks(call) * self.settings.block_tokens

    def blocks_needed(self, call: LocalCall, new_tokens: int) -> int:
        """Free blocks that computing `new_tokens` more of a call takes, cached ones it would pin included."""
        assert isinstance(call, EmbeddedCall)
        if call.blocks:
            return -(-(call.computed_tokens + new_tokens) // self.settings.block_tokens) - len(call.blocks)
        matched = self._matched_blocks(call)
        new_blocks = self._blocks_for(new_tokens)
        return new_blocks + self._cache.idle(call.chain.hashes, matched)

    def blocks_freed(self, call: LocalCall) -> int:
        """Blocks that preempting a running call would set free."""
        assert isinstance(call, EmbeddedCall)
        return self._cache.exclusive(call.blocks)

    # What happens to it.

    @property
    def idle(self) -> bool:
        """No iteration is in flight: a call that is added now needs a `step` to begin one."""
        return self._ends_s is None

    def fits(self, prompt_tokens: int, max_output_tokens: int) -> bool:
        """Whether a call can ever run: its KV has to fit an otherwise empty cache."""
        return self._blocks_for(prompt_tokens + max_output_tokens) <= self._cache.total_blocks

    def add(self, call: EmbeddedCall) -> None:
        """Queue a call that `fits`."""
        assert call.prompt_tokens > 0
        assert call.max_output_tokens > 0
        self.counters.calls += 1
        insort(self.waiting, call, key=attrgetter("arrived_s"))
        self._attainment.received(call, call)

    def abort(self, call: EmbeddedCall) -> None:
        """Nobody waits for a call any more: its blocks are free at once."""
        if self.remove(call):
            self.counters.aborted_calls += 1

    def remove(self, call: EmbeddedCall) -> bool:
        """End a call early; False if it had ended already."""
        if call in self.running:
            self.running.remove(call)
            self._cache.release(call.blocks)
        elif call in self.waiting:
            self.waiting.remove(call)
        else:
            return False
        if call in self._in_flight:
            self._in_flight.remove(call)
        self._attainment.ended(call, self._stepped_s)
        return True

    def step(self, now_s: float) -> Step:
        """End the iteration in flight if it is over by now, and begin the next one."""
        if self._ends_s is not None and now_s < self._ends_s:
            return Step((), self._ends_s)
        if self._measuring is not None and self._work:
            self._measuring.observe(self._recent_s[-1], self._work)
        self._stepped_s = now_s
        outputs = tuple(self._emit(call) for call in self._in_flight)
        self._in_flight = []
        self._ends_s = self._begin(now_s)
        return Step(outputs, self._ends_s)

    def cache_state(self, since: int | None = None) -> CacheState:
        """The report of DESIGN 4.7."""
        snapshot, stored, removed = self.journal.since(since)
        cache, chunks, times = self._cache, self._recent_chunks, self._recent_s
        return CacheState(
            engine=self.settings.name,
            kind="embedded",
            epoch=self.epoch,
            cursor=self.journal.cursor,
            model=self.settings.model,
            block_tokens=self.settings.block_tokens,
            granularity_tokens=self.granularity_tokens,
            snapshot=snapshot,
            stored=stored,
            removed=removed,
            kv=KvState(cache.total_blocks, cache.free_blocks - cache.cached_blocks, cache.cached_blocks),
            queue=QueueState(
                waiting=len(self.waiting),
                running=len(self.running),
                waiting_tokens=sum(call.prompt_tokens for call in self.waiting),
                mean_queue_s=_mean(self._recent_queue_s),
            ),
            iteration=IterationState(
                mean_s=_mean(times),
                max_s=max(times, default=0.0),
                mean_chunk_tokens=_mean(chunks),
                budget_tokens=self.settings.max_batch_tokens,
            ),
            scheduler=SchedulerState(self.settings.scheduler, self._attainment.share, self.counters.preemptions),
        )

    def _begin(self, now_s: float) -> float | None:
        """Plan and start the next iteration; returns its end."""
        plan = self._scheduler.plan(now_s, self.waiting, self.running, self)
        for call in plan.preempt:
            assert isinstance(call, EmbeddedCall)
            self._preempt(call)
        work = self._work = []
        for call, planned_tokens in plan.picks:
            tokens = planned_tokens
            assert isinstance(call, EmbeddedCall)
            if not call.blocks:
                self._admit(call, now_s)
                tokens = min(tokens, call.uncomputed_tokens)  # an earlier pick may just have cached more of it
            work.append((tokens, call.computed_tokens))
            self._schedule(call, tokens)
        if not work:
            return None
        duration_s = self._cost_model.iteration_time_s(work)
        self.counters.iterations += 1
        self.counters.busy_s += duration_s
        self._recent_s.append(duration_s)
        return now_s + duration_s

    def _admit(self, call: EmbeddedCall, now_s: float) -> None:
        """Move a waiting call to the running ones, on the blocks it finds cached."""
        matched = self._matched_blocks(call)
        call.blocks = self._cache.acquire(call.chain.hashes[:matched])
        call.registered_blocks = matched
        call.computed_tokens = matched * self.settings.block_tokens
        if call.cached_tokens is None:
            call.cached_tokens = call.computed_tokens
            self.counters.prompt_tokens += call.prompt_tokens
            self.counters.cached_prompt_tokens += call.cached_tokens
            self._recent_queue_s.append(now_s - (call.arrived_s if call.received_s is None else call.received_s))
        self.waiting.remove(call)
        self.running.append(call)

    def _schedule(self, call: EmbeddedCall, tokens: int) -> None:
        """Give `call` the blocks for `tokens` more, and make those that they fill findable."""
        cache, block_tokens = self._cache, self.settings.block_tokens
        self.counters.computed_prompt_tokens += max(0, min(tokens, call.prompt_tokens - call.computed_tokens))
        if tokens > 1:
            self._recent_chunks.append(tokens)
        call.computed_tokens += tokens
        call.blocks += cache.allocate(self._blocks_for(call.computed_tokens) - len(call.blocks))
        for index in range(call.registered_blocks, call.computed_tokens // block_tokens):
            block_hash = call.chain.hashes[index]
            call.blocks[index] = cache.register(call.blocks[index], block_hash)
            self._stored(call, index)
        call.registered_blocks = call.computed_tokens // block_tokens
        if call.uncomputed_tokens == 0:
            self._in_flight.append(call)

    def _emit(self, call: EmbeddedCall) -> Output:
        token = next(call.output)
        call.output_tokens += 1
        call.chain.extend((token,))
        if call.tree_chain is not call.chain:
            call.tree_chain.extend((token,))
        self.counters.output_tokens += 1
        self._attainment.produced(call, 1, self._stepped_s)
        finished = call.output_tokens >= call.max_output_tokens
        if finished:
            self._attainment.ended(call, self._stepped_s)
            self.running.remove(call)
            self._cache.release(call.blocks)
        return Output(call, token, finished)

    def _preempt(self, call: EmbeddedCall) -> None:
        """Back to the head of the queue: its blocks stay cached until their room is needed (vLLM's recomputation)."""
        self.counters.preemptions += 1
        self.running.remove(call)
        self._cache.release(call.blocks)
        call.blocks = []
        call.computed_tokens = 0
        self.waiting.insert(0, call)

    def _matched_blocks(self, call: EmbeddedCall) -> int:
        most = (call.prompt_tokens + call.output_tokens - 1) // self.settings.block_tokens
        call.matched_blocks = self._cache.match(call.chain.hashes, most, call.matched_blocks)
        return call.matched_blocks

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.settings.block_tokens)

    def _stored(self, call: EmbeddedCall, index: int) -> None:
        """Report a tree block while the last of its KV blocks is there: eviction takes that one first."""
        per_tree_block = self.granularity_tokens // self.settings.block_tokens
        tree_index, offset = divmod(index, per_tree_block)
        if offset == per_tree_block - 1:
            tree_block = self._tree_block_of[call.chain.hashes[index]] = call.tree_chain.hashes[tree_index]
            self.journal.store(tree_block, call.tree_chain.parent(tree_index))

    def _evicted(self, block_hash: int) -> None:
        tree_block = self._tree_block_of.pop(block_hash, None)
        if tree_block is not None:
            self.journal.remove(tree_block)


def _mean(values: deque[float] | deque[int]) -> float:
    return sum(values) / len(values) if values else 0.0
