"""vLLM's requests as calls of the local scheduler, and vLLM's KV cache as the scheduler's facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Final, cast

from plait.backends.adapter.hit_ends import EngineEnds
from plait.backends.adapter.prefix_search import cached_blocks, shared_blocks
from plait.backends.protocol.call_annotations import EngineAnnotations
from plait.backends.vllm.cache_state import PoolObserver
from plait.backends.vllm.compatibility import CompatibleScheduler
from plait.policy.scheduling.plan import InFlight, LocalCall

_UNKNOWN = b""
"""A key that no block has. As a call's `last_hit`, it makes the next look-up search."""


@dataclass(slots=True, eq=False)
class VllmCall(LocalCall):
    """A request in vLLM. Without a reference to the request, there is no cycle, and vLLM's last reference frees it."""

    received_s: float = field(kw_only=True)
    order: tuple[float, int] = field(kw_only=True)
    """Sorts calls by arrival."""
    block_hashes: Sequence[bytes] = field(kw_only=True)
    reads_cache: bool = field(default=True, kw_only=True)
    hint_tokens: int = field(default=0, kw_only=True)
    """The hit that the gateway expects: the first guess of the first search."""
    waits: bool = field(default=True, kw_only=True)
    admitted: bool = field(default=False, kw_only=True)
    hit_tokens: int = field(default=0, kw_only=True)
    """The prefix found in the cache at the last search."""
    last_hit: bytes | None = field(default=_UNKNOWN, kw_only=True)
    """The key of the prefix's last block; None if nothing was found."""
    first_miss: bytes | None = field(default=None, kw_only=True)
    """The key of the block after the prefix; None if there is no further block."""
    searched_at: int | None = field(default=None, kw_only=True)
    """`EngineEnds.changes` at the last search; None: no search yet. Engines with ends use this, not the two keys."""

    def follow_waiting(self, request: Any) -> None:
        """Update from a waiting request. After a preemption, the output so far has to be computed again too."""
        output_tokens = request.num_tokens - request.num_prompt_tokens
        if not self.waits or output_tokens != self.output_tokens:
            self.last_hit, self.first_miss = _UNKNOWN, None  # blocks of the output can be hit too now
            self.searched_at = None
        self.waits = True
        self.prompt_tokens = request.num_prompt_tokens
        self.computed_tokens = 0
        self.output_tokens = output_tokens

    def follow_running(self, request: Any) -> None:
        """Update from a running request. Output in flight counts as generated, as in vLLM's `num_computed_tokens`."""
        self.waits = False
        self.prompt_tokens = prompt_tokens = request.num_prompt_tokens
        self.computed_tokens = request.num_computed_tokens
        self.output_tokens = request.num_tokens - prompt_tokens + request.num_output_placeholders


def vllm_call(request: Any, annotations: EngineAnnotations, now_s: float, sequence: int) -> VllmCall:
    """The call of a request that vLLM has just received, the engine's `sequence`th."""
    arrived_s = now_s - annotations.age_s
    return VllmCall(
        call_id=request.request_id,
        arrived_s=arrived_s,
        prompt_tokens=request.num_prompt_tokens,
        slo=annotations.slo,
        objective=annotations.objective,
        priority=annotations.priority,
        is_line=annotations.is_line,
        max_output_tokens=request.max_tokens,
        received_s=now_s,
        order=(arrived_s, sequence),
        block_hashes=request.block_hashes,
        reads_cache=not request.skip_reading_prefix_cache,
        hint_tokens=annotations.cached_tokens or 0,
    )


class VllmFacts:
    """The EngineFacts of one vLLM scheduler.

    The facts are exact, unless the adapter cannot follow a model's groups (`PoolObserver.untold`). Then a waiting
    call's blocks are counted in the observed KV cache group only; vLLM checks again before it admits a call.
    """

    def __init__(self, scheduler: Any, compatible: CompatibleScheduler, observer: PoolObserver) -> None:
        self.max_batch_tokens: int = scheduler.max_num_scheduled_tokens
        self.in_flight: InFlight | None = None
        """With asynchronous scheduling, the iteration before the planned one. A scheduler must measure to get it."""
        self.silent_calls = 0
        """Running calls that have nothing to compute now. No plan has them."""
        self.ending_blocks = 0
        """Blocks of calls whose last token is in flight, at the end of vLLM's list. vLLM preempts these calls first."""
        self.found: dict[VllmCall, Any] = {}
        """What waiting calls hit, by group, as long as an iteration is planned."""
        self._scheduler = scheduler
        self._compatible = compatible
        self._observer = observer
        self._ends = observer.ends
        self._copies = observer.blocks.copies
        self._pool = scheduler.kv_cache_manager.block_pool
        self._managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._lookahead_tokens: int = scheduler.num_lookahead_tokens
        self._max_model_len: int = scheduler.max_model_len
        self._hashes_per_block: int = observer.block_tokens // self._pool.hash_block_size
        self._coordinator = scheduler.kv_cache_manager.coordinator
        self._counted = signature(self._coordinator.get_num_blocks_to_allocate).parameters if self._ends else ()
        has_states = self._ends is not None and any(hasattr(one, "mamba_cache_mode") for one in self._managers)
        self.shares_in_iteration: bool = not has_states
        """Whether other calls can hit a block as soon as its computation is scheduled: all but states."""

    @property
    def max_running_calls(self) -> int:
        """The most calls of a plan that may run at once: the slots less those of running calls outside the plan."""
        elsewhere = self.silent_calls + self._scheduler.num_waiting_for_streaming_input
        return int(self._compatible.slots - elsewhere)

    @property
    def free_blocks(self) -> int:
        """KV blocks that no call of a plan uses."""
        return int(self._pool.get_num_free_blocks()) + self.ending_blocks

    def cached_tokens(self, call: LocalCall) -> int:
        """How many tokens of a waiting call are cached now.

        Two look-ups, one on each side of the known prefix's end, show whether it is still the same. If not, search.
        """
        call, copies, ends = cast("VllmCall", call), self._copies, self._ends
        if ends is not None:
            if call.searched_at is None or ends.has_changed(call.block_hashes, call.searched_at, call.hit_tokens):
                most = self._most_hit_blocks(call) * self._observer.block_tokens
                call.hit_tokens = ends.deepest(call.block_hashes, most, call.hit_tokens or call.hint_tokens)
            call.searched_at = ends.changes
            return call.hit_tokens
        if call.first_miss in copies or (call.last_hit is not None and call.last_hit not in copies):
            self._search(call)
        return call.hit_tokens

    def blocks_needed(self, call: LocalCall, new_tokens: int) -> int:
        call = cast("VllmCall", call)
        if self._ends is not None and (call.waits or not self.shares_in_iteration):
            return self._blocks_of_groups(call, new_tokens)
        if call.waits:
            return self._blocks_to_admit(call, new_tokens)
        tokens = min(call.computed_tokens + new_tokens + self._lookahead_tokens, self._max_model_len)
        needed = 0
        for manager in self._managers:
            held = manager.req_to_blocks.get(call.call_id)
            if held is not None:
                needed += max(0, -(-tokens // manager.block_size) - len(held))
        return needed

    def blocks_freed(self, call: LocalCall) -> int:
        return sum(
            block.ref_cnt == 1 and not block.is_null
            for manager in self._managers
            for block in manager.req_to_blocks.get(call.call_id, ())
        )

    loading: Final[Sequence[LocalCall]] = ()
    """Empty: vLLM keeps calls whose blocks are being loaded out of its queue itself."""

    def stored_tokens(self, call: LocalCall) -> int:
        if self._ends is None:
            return call.computed_tokens
        return self._ends.deepest(cast("VllmCall", call).block_hashes, call.computed_tokens, call.computed_tokens)

    def block_key(self, call: LocalCall, tokens: int) -> bytes | None:
        """The key of the block after a call's first `tokens`; None if it is not whole or the call reads no cache."""
        call, index = cast("VllmCall", call), tokens // self._observer.block_tokens
        if index >= self._hashed_blocks(call) or (call.waits and not call.reads_cache):
            return None
        return self._key(call, index)

    def shared_tokens(self, call: LocalCall, other: LocalCall) -> int:
        call, other = cast("VllmCall", call), cast("VllmCall", other)
        most = min(self._most_hit_blocks(call), self._hashed_blocks(other)) * self._hashes_per_block
        blocks = shared_blocks(call.block_hashes, other.block_hashes, most) // self._hashes_per_block
        tokens = blocks * self._observer.block_tokens
        return tokens if self._ends is None else self._left_by(other, tokens, self._ends)

    def _left_by(self, call: VllmCall, tokens: int, ends: EngineEnds[bytes]) -> int:
        """The deepest end that a call will leave within its first `tokens`; 0: none.

        vLLM keeps what a hit needs at each interval, at the end of the prompt, and at the end of the longer prefix that
        the call has found in full attention only. The state of a prompt of whole blocks may be that of all its tokens,
        which only a longer call can hit: before 0.32 it always is.
        """
        last = call.prompt_tokens - 1 if self.shares_in_iteration else call.prompt_tokens
        if call.waits:
            junction = ends.leading(call.block_hashes, call.prompt_tokens - 1)
        else:
            junction = getattr(self._scheduler.requests[call.call_id], "shared_prefix_boundary", 0)
        left = [one // ends.align_tokens * ends.align_tokens for one in (last, junction)]
        if ends.interval_tokens:
            left.append(tokens // ends.interval_tokens * ends.interval_tokens)
        return max((end for end in left if end <= tokens), default=0)

    def _blocks_of_groups(self, call: VllmCall, new_tokens: int) -> int:
        """VLLM's own count over all groups."""
        coordinator, found, computed_tokens = self._coordinator, [()] * len(self._managers), call.computed_tokens
        if call.waits:
            computed_tokens = self.cached_tokens(call)
            if call not in self.found:
                self.found[call] = coordinator.find_longest_cache_hit(call.block_hashes, computed_tokens)[0]
            found = self.found[call]
        coordinator.new_step_starts()  # as `schedule()` does; else a state of the step before could not be hit
        tokens = computed_tokens + new_tokens
        counted = {
            "request_id": call.call_id,
            "num_tokens": min(tokens + self._lookahead_tokens, self._max_model_len),
            "new_computed_blocks": found,
            "num_encoder_tokens": 0,
            "total_computed_tokens": computed_tokens,
            "num_local_computed_tokens": computed_tokens,
            "num_tokens_main_model": tokens,
            "apply_admission_cap": False,
            "prefill_end": call.prompt_tokens + max(0, call.output_tokens - 1),
        }
        return int(coordinator.get_num_blocks_to_allocate(**{name: counted[name] for name in self._counted}))

    def _blocks_to_admit(self, call: VllmCall, new_tokens: int) -> int:
        block_tokens = self._observer.block_tokens
        cached_tokens = self.cached_tokens(call)
        hit = cached_tokens // block_tokens
        return -(-(cached_tokens + new_tokens) // block_tokens) - self._blocks_in_use(call, hit)

    def _blocks_in_use(self, call: VllmCall, hit: int) -> int:
        """How many of the first `hit` blocks running calls use. A call that uses a block uses all blocks before it."""
        get = self._pool.cached_block_hash_to_block.get_one_block
        low, high = 0, hit
        while low < high:
            middle = (low + high) // 2
            if get(self._key(call, middle)).ref_cnt > 0:
                low = middle + 1
            else:
                high = middle
        return low

    def _search(self, call: VllmCall) -> None:
        """Find the cached prefix. The first guess is the last one found, or the one that the gateway expects."""
        block_tokens, copies = self._observer.block_tokens, self._copies
        most = self._most_hit_blocks(call)
        guess = (call.hit_tokens or call.hint_tokens) // block_tokens
        hit = cached_blocks(most, guess, lambda index: self._key(call, index) in copies)
        call.hit_tokens = hit * block_tokens
        call.last_hit = self._key(call, hit - 1) if hit else None
        call.first_miss = self._key(call, hit) if hit < most else None

    def _most_hit_blocks(self, call: VllmCall) -> int:
        """The most blocks that can be hit: vLLM always computes the last token."""
        if not call.reads_cache:
            return 0
        tokens = call.prompt_tokens + call.output_tokens
        return min(self._hashed_blocks(call), max(0, tokens - 1) // self._observer.block_tokens)

    def _hashed_blocks(self, call: VllmCall) -> int:
        return len(call.block_hashes) // self._hashes_per_block

    def _key(self, call: VllmCall, index: int) -> bytes:
        return call.block_hashes[(index + 1) * self._hashes_per_block - 1] + self._observer.group_suffix
