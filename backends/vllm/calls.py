"""vLLM's requests as calls of the local scheduler, and vLLM's KV cache as the scheduler's facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from plait.backends.adapter.prefix_search import cached_blocks, shared_blocks
from plait.backends.protocol.call_annotations import EngineAnnotations
from plait.backends.vllm.cache_state import PoolObserver
from plait.backends.vllm.compatibility import CompatibleScheduler
from plait.policy.scheduling.plan import LocalCall

_UNKNOWN = b""
"""The key of no block: this call's hit was never looked up."""


@dataclass(slots=True, eq=False)
class VllmCall(LocalCall):
    """A request in vLLM. It does not refer to the request object, so that vLLM can free it without garbage collection.

    `order` sorts calls by arrival. `last_hit` and `first_miss` are the keys on both sides of the known hit's end.
    """

    received_s: float = field(kw_only=True)
    order: tuple[float, int] = field(kw_only=True)
    block_hashes: Sequence[bytes] = field(kw_only=True)
    reads_cache: bool = field(default=True, kw_only=True)
    hint_tokens: int = field(default=0, kw_only=True)
    waits: bool = field(default=True, kw_only=True)
    admitted: bool = field(default=False, kw_only=True)
    hit_tokens: int = field(default=0, kw_only=True)
    last_hit: bytes | None = field(default=_UNKNOWN, kw_only=True)
    first_miss: bytes | None = field(default=None, kw_only=True)

    def follow_waiting(self, request: Any) -> None:
        """Update from a waiting request. A preempted one starts anew: its output is part of the tokens to compute."""
        output_tokens = request.num_tokens - request.num_prompt_tokens
        if not self.waits or output_tokens != self.output_tokens:
            self.last_hit, self.first_miss = _UNKNOWN, None  # there may be more blocks to hit now
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
    """The call of a request that vLLM has just received. It is the engine's `sequence`th."""
    arrived_s = now_s - annotations.age_s
    return VllmCall(
        call_id=request.request_id,
        arrived_s=arrived_s,
        prompt_tokens=request.num_prompt_tokens,
        slo=annotations.slo,
        objective=annotations.objective,
        priority=annotations.priority,
        max_output_tokens=request.max_tokens,
        received_s=now_s,
        order=(arrived_s, sequence),
        block_hashes=request.block_hashes,
        reads_cache=not request.skip_reading_prefix_cache,
        hint_tokens=annotations.cached_tokens or 0,
    )


class VllmFacts:
    """The EngineFacts of one vLLM scheduler.

    They are exact for models with one kind of attention. For other models, only the observed group's blocks count for a
    waiting call. vLLM checks again before it admits a call.
    """

    def __init__(self, scheduler: Any, compatible: CompatibleScheduler, observer: PoolObserver) -> None:
        self.max_batch_tokens: int = scheduler.max_num_scheduled_tokens
        self.silent_calls = 0
        """Running calls that have nothing to compute now. They are in no plan."""
        self.ending_blocks = 0
        """Blocks that vLLM takes from calls in no plan before it takes one from a call in the plan."""
        self._scheduler = scheduler
        self._compatible = compatible
        self._observer = observer
        self._copies = observer.blocks.copies
        self._pool = scheduler.kv_cache_manager.block_pool
        self._managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._lookahead_tokens: int = scheduler.num_lookahead_tokens
        self._max_model_len: int = scheduler.max_model_len
        self._hashes_per_block: int = observer.block_tokens // self._pool.hash_block_size

    @property
    def max_running_calls(self) -> int:
        """The most calls of a plan that may run at once. Calls outside the plan keep their sequence slots."""
        elsewhere = self.silent_calls + self._scheduler.num_waiting_for_streaming_input
        return int(self._compatible.slots - elsewhere)

    @property
    def free_blocks(self) -> int:
        """KV blocks that no call of a plan uses."""
        return int(self._pool.get_num_free_blocks()) + self.ending_blocks

    def cached_tokens(self, call: LocalCall) -> int:
        """How many tokens of a waiting call are cached now. Two look-ups check whether the known hit still holds.

        vLLM evicts a prefix from its end, so bisection finds the hit.
        """
        call, copies = cast("VllmCall", call), self._copies
        if call.first_miss in copies or (call.last_hit is not None and call.last_hit not in copies):
            self._search(call)
        return call.hit_tokens

    def blocks_needed(self, call: LocalCall, new_tokens: int) -> int:
        """How many free blocks `new_tokens` more of a call take, including cached blocks that no call uses yet."""
        call = cast("VllmCall", call)
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
        """How many blocks preempting a running call would free."""
        return sum(
            block.ref_cnt == 1 and not block.is_null
            for manager in self._managers
            for block in manager.req_to_blocks.get(call.call_id, ())
        )

    loading: Final[Sequence[LocalCall]] = ()
    """Empty: vLLM hides such calls from its queue itself."""

    @property
    def shares_in_iteration(self) -> bool:
        """True: vLLM stores a block once its computation is scheduled."""
        return True

    def stored_tokens(self, call: LocalCall) -> int:
        """How many tokens of a running call other calls can find in the cache."""
        return call.computed_tokens

    def block_key(self, call: LocalCall, tokens: int) -> bytes | None:
        """The name of the block after a call's first `tokens`; None if it is not whole or the call reads no cache."""
        call, index = cast("VllmCall", call), tokens // self._observer.block_tokens
        if index >= self._hashed_blocks(call) or (call.waits and not call.reads_cache):
            return None
        return self._key(call, index)

    def shared_tokens(self, call: LocalCall, other: LocalCall) -> int:
        """How many tokens a waiting call could take from another call's blocks."""
        call, other = cast("VllmCall", call), cast("VllmCall", other)
        most = min(self._most_hit_blocks(call), self._hashed_blocks(other)) * self._hashes_per_block
        blocks = shared_blocks(call.block_hashes, other.block_hashes, most) // self._hashes_per_block
        return blocks * self._observer.block_tokens

    def _blocks_to_admit(self, call: VllmCall, new_tokens: int) -> int:
        block_tokens = self._observer.block_tokens
        cached_tokens = self.cached_tokens(call)
        hit = cached_tokens // block_tokens
        return -(-(cached_tokens + new_tokens) // block_tokens) - self._blocks_in_use(call, hit)

    def _blocks_in_use(self, call: VllmCall, hit: int) -> int:
        """How many of the hit blocks are in use. A call that uses a block uses all blocks before it."""
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
        """Find the end of the hit. The first guess is the last known end, or the end that the gateway expects."""
        block_tokens, copies = self._observer.block_tokens, self._copies
        most = self._most_hit_blocks(call)
        guess = (call.hit_tokens or call.hint_tokens) // block_tokens
        hit = cached_blocks(most, guess, lambda index: self._key(call, index) in copies)
        call.hit_tokens = hit * block_tokens
        call.last_hit = self._key(call, hit - 1) if hit else None
        call.first_miss = self._key(call, hit) if hit < most else None

    def _most_hit_blocks(self, call: VllmCall) -> int:
        """The most blocks that can be hit. The last token is always computed."""
        if not call.reads_cache:
            return 0
        tokens = call.prompt_tokens + call.output_tokens
        return min(self._hashed_blocks(call), max(0, tokens - 1) // self._observer.block_tokens)

    def _hashed_blocks(self, call: VllmCall) -> int:
        return len(call.block_hashes) // self._hashes_per_block

    def _key(self, call: VllmCall, index: int) -> bytes:
        return call.block_hashes[(index + 1) * self._hashes_per_block - 1] + self._observer.group_suffix
