"""SGLang's requests as calls of the local scheduler, and SGLang's KV cache as the scheduler's facts.

The cached tokens of waiting calls are kept as the cache changes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, cast

from plait.backends.adapter.prefix_search import cached_blocks, shared_blocks
from plait.backends.protocol.cache_state import KvState
from plait.backends.protocol.call_annotations import EngineAnnotations
from plait.backends.sglang.cache_state import CacheObserver
from plait.backends.sglang.compatibility import namespace, next_output_ends, prefix_tokens
from plait.policy.prefix.block_hash import chain
from plait.policy.scheduling.plan import LocalCall


@dataclass(slots=True, eq=False)
class SglangCall(LocalCall):
    """A request in SGLang. `order` sorts calls by arrival. `tree_blocks` are the hashes of the prompt's tree blocks.

    `hit_tokens` is the last hit found; the next search starts there. `seen_tokens` counts the output seen so far.
    """

    order: tuple[float, int] = field(kw_only=True)
    received_s: float = field(kw_only=True)
    tree_blocks: Sequence[int] = field(kw_only=True)
    hit_tokens: int = field(default=0, kw_only=True)
    waits: bool = field(default=True, kw_only=True)
    admitted: bool = field(default=False, kw_only=True)
    seen_tokens: int = field(default=0, kw_only=True)

    def follow_waiting(self, request: Any) -> None:
        """Update from a request that waits again. It starts anew: its output is part of the tokens to compute."""
        self.waits = True
        self.prompt_tokens = len(request.origin_input_ids)
        self.computed_tokens = 0
        self.output_tokens = len(request.output_ids)

    def follow_prefill(self, request: Any) -> None:
        """Update from a request whose prompt is computed in chunks."""
        self.waits = False
        self.computed_tokens = prefix_tokens(request)
        self.output_tokens = len(request.output_ids)

    def follow_decode(self, request: Any, in_flight: int) -> None:
        """Update from a decoding request. The `in_flight` tokens, still being computed, count as generated."""
        self.waits = False
        self.output_tokens = output_tokens = len(request.output_ids) + in_flight
        self.computed_tokens = self.prompt_tokens + output_tokens - 1


def sglang_call(
    request: Any, annotations: EngineAnnotations, now_s: float, sequence: int, observer: CacheObserver
) -> SglangCall:
    """The call of a request that SGLang has just received. It is the engine's `sequence`th."""
    arrived_s = now_s - annotations.age_s
    return SglangCall(
        call_id=request.rid,
        arrived_s=arrived_s,
        prompt_tokens=len(request.origin_input_ids),
        slo=annotations.slo,
        objective=annotations.objective,
        priority=annotations.priority,
        max_output_tokens=request.sampling_params.max_new_tokens,
        order=(arrived_s, sequence),
        received_s=now_s,
        tree_blocks=_tree_blocks(request, observer),
        hit_tokens=annotations.cached_tokens or 0,
    )


def _tree_blocks(request: Any, observer: CacheObserver) -> Sequence[int]:
    """The hashes of a prompt's tree blocks; none if the tokens alone do not determine the names of its pages.

    The last token is always computed, so a block that ends with it cannot be a hit.
    """
    salt, key = namespace(request)
    named = request.lora_id is None and key is None and request.multimodal_inputs is None
    if not named:
        return ()
    try:
        return chain(request.origin_input_ids[:-1], observer.granularity_tokens, observer.root(salt))
    except OverflowError:
        return ()


def find_hit(call: SglangCall, stored: Container[int], granularity_tokens: int) -> int:
    """Find the call's `hit_tokens`, and return them. The first guess is the last hit, or what the gateway expects."""
    blocks = call.tree_blocks
    hit = cached_blocks(len(blocks), call.hit_tokens // granularity_tokens, lambda index: blocks[index] in stored)
    call.hit_tokens = hit * granularity_tokens
    return call.hit_tokens


def kv_state(scheduler: Any) -> KvState:
    """A scheduler's current counts of pages."""
    page = scheduler.page_size
    free, cached = scheduler.token_to_kv_pool_allocator.available_size(), scheduler.tree_cache.evictable_size()
    return KvState(scheduler.max_total_num_tokens // page, int(free // page), int(cached // page))


def running_requests(scheduler: Any, beginning: Iterable[Any] = ()) -> list[Any]:
    """Requests that have begun and not ended, including the prompt in chunks, and those `beginning`."""
    last = scheduler.last_batch.reqs if scheduler.last_batch else ()
    begun = [*scheduler.running_batch.reqs, *last, *beginning]
    if scheduler.chunked_req is not None:
        begun.append(scheduler.chunked_req)
    return [request for request in {id(request): request for request in begun}.values() if not request.finished()]


class SglangFacts:
    """The EngineFacts of one SGLang scheduler. KV blocks are its pages.

    SGLang also keeps room for the output of the calls that it admits. It checks again before it admits a call.
    """

    def __init__(self, scheduler: Any, observer: CacheObserver) -> None:
        limit = scheduler.max_prefill_tokens
        self.max_batch_tokens: int = min(scheduler.chunked_prefill_size or limit, limit)
        self.max_running_calls: int = scheduler.max_running_requests
        self._scheduler = scheduler
        self._stored = observer.journal.stored
        self._granularity = observer.granularity_tokens
        self._page_tokens: int = scheduler.page_size
        self._shares: bool = not scheduler.tree_cache.disable
        self._users: dict[int, int] = {}
        self._running: dict[SglangCall, None] = {}
        self.cached_tokens: Callable[[LocalCall], int] = attrgetter("hit_tokens")
        """How many tokens of a waiting call are cached now, in whole tree blocks (see `WaitingHits`)."""

    def follow_running(self, running: Iterable[SglangCall]) -> None:
        """These calls run now. Their prompts' tree blocks are in use."""
        before, self._running, users = self._running, dict.fromkeys(running), self._users
        for call in [call for call in self._running if call not in before]:
            for block in call.tree_blocks:
                users[block] = users.get(block, 0) + 1
        for call in [call for call in before if call not in self._running]:
            for block in call.tree_blocks:
                users[block] -= 1
                if not users[block]:
                    del users[block]

    @property
    def free_blocks(self) -> int:
        """Pages that no running call uses."""
        kv = kv_state(self._scheduler)
        return kv.free_blocks + kv.cached_blocks

    def blocks_needed(self, call: LocalCall, new_tokens: int) -> int:
        """How many free pages `new_tokens` more of a call take, including cached pages that no call uses yet."""
        call, page = cast("SglangCall", call), self._page_tokens
        if not call.waits:
            last_token = call.computed_tokens - 1
            return (last_token + new_tokens) // page - last_token // page
        blocks, users, cached_tokens = call.tree_blocks, self._users, self.cached_tokens(call)
        hit = cached_tokens // self._granularity
        in_use = cached_blocks(hit, hit, lambda index: blocks[index] in users) if hit and blocks[0] in users else 0
        return -(-(cached_tokens + new_tokens) // page) - in_use * self._granularity // page

    def blocks_freed(self, call: LocalCall) -> int:
        """How many pages preempting a running call would free: those that no other call uses."""
        call, page = cast("SglangCall", call), self._page_tokens
        users, blocks = self._users, call.tree_blocks
        shared = cached_blocks(len(blocks), 0, lambda index: users.get(blocks[index], 0) > 1)
        return -(-call.computed_tokens // page) - shared * self._granularity // page

    loading: Final[Sequence[LocalCall]] = ()
    """Empty: SGLang loads while it computes, layer by layer."""

    @property
    def shares_in_iteration(self) -> bool:
        """False: SGLang stores a chunk after its pass, and a prompt's end once the pass's result is there."""
        return False

    def stored_tokens(self, call: LocalCall) -> int:
        """How many tokens of a running call other calls can find in the cache."""
        return find_hit(cast("SglangCall", call), self._stored, self._granularity)

    def block_key(self, call: LocalCall, tokens: int) -> int | None:
        """The hash of the tree block after the call's first `tokens`; None if it is not whole, or without a cache."""
        blocks, index = cast("SglangCall", call).tree_blocks, tokens // self._granularity
        return blocks[index] if index < len(blocks) and self._shares else None

    def shared_tokens(self, call: LocalCall, other: LocalCall) -> int:
        """How many tokens a waiting call could take from another call's blocks."""
        own, others = cast("SglangCall", call).tree_blocks, cast("SglangCall", other).tree_blocks
        return shared_blocks(own, others, min(len(own), len(others))) * self._granularity


class WaitingHits:
    """Keeps the `hit_tokens` of the calls that wait. A step calls `follow` before it reads them.

    A call's hit stays the same while the tree block before its end stays stored and the one behind is not stored. So a
    step looks at the calls beside the blocks that have changed, not at every waiting call.
    """

    def __init__(self, observer: CacheObserver) -> None:
        self._journal = observer.journal
        self._granularity = observer.granularity_tokens
        self._cursor = self._journal.cursor
        self._new: dict[SglangCall, None] = {}
        self._beside: dict[int, set[SglangCall]] = {}
        """By the hash of a tree block: the calls whose hits end before it or behind it."""

    def queued(self, call: SglangCall) -> None:
        self._new[call] = None

    def left(self, call: SglangCall) -> None:
        self._new.pop(call, None)
        self._drop(call)

    def follow(self) -> None:
        """Find the hits of new calls, and of the calls whose hits the cache's changes may have moved."""
        journal, beside = self._journal, self._beside
        changed, self._cursor = journal.changed(self._cursor), journal.cursor
        blocks = beside.keys() if changed is None else beside.keys() & changed
        moved = {call for block in blocks for call in beside[block]}
        for call in moved:
            self._drop(call)
        for call in (*moved, *self._new):
            find_hit(call, journal.stored, self._granularity)
            for block in self._ends(call):
                beside.setdefault(block, set()).add(call)
        self._new.clear()

    def _drop(self, call: SglangCall) -> None:
        for block in self._ends(call):
            calls = self._beside.get(block, set())
            calls.discard(call)
            if not calls:
                self._beside.pop(block, None)

    def _ends(self, call: SglangCall) -> Sequence[int]:
        """The tree blocks before and behind the end of a call's hit."""
        hit = call.hit_tokens // self._granularity
        return call.tree_blocks[max(0, hit - 1) : hit + 1]


_ORDER = attrgetter("order")


class Requests:
    """Maps the requests of one scheduler to the calls of a plan, and back. Each has its call in `plait_call`.

    The waiting ones are kept from step to step, because they can be many. SGLang's queue gets no request that `queued`
    does not get. So if the queue is as long as what is kept, it has the same requests.
    """

    def __init__(self, scheduler: Any, hits: WaitingHits) -> None:
        self._scheduler = scheduler
        self._hits = hits
        self._running: dict[SglangCall, Any] = {}
        self._waiting: dict[SglangCall, Any] = {}
        self._in_order = True

    def of(self, call: SglangCall) -> Any:
        """The request of a call that the last `calls` returned."""
        return self._waiting[call] if call.waits else self._running[call]

    def queued(self, request: Any) -> None:
        call: SglangCall = request.plait_call
        latest = next(reversed(self._waiting), call)
        self._in_order = self._in_order and latest.order <= call.order
        self._waiting[call] = request
        self._hits.queued(call)

    def waiting_but(self, calls: Iterable[SglangCall]) -> list[Any]:
        """The waiting requests in order of arrival, without those of `calls`."""
        left = self._waiting.copy()
        for call in calls:
            del left[call]
        return list(left.values())

    def admitted(self, call: SglangCall) -> None:
        del self._waiting[call]
        self._hits.left(call)

    def calls(self, running_batch: Any) -> tuple[list[SglangCall], list[SglangCall]]:
        """Running calls with something to compute, and waiting calls, both in order of arrival."""
        self._follow_queue()
        in_chunks, in_flight = self._scheduler.chunked_req, self._in_flight()
        self._running = running = {}
        if in_chunks is not None:
            running[in_chunks.plait_call] = in_chunks
            in_chunks.plait_call.follow_prefill(in_chunks)
        for request in running_batch.reqs:
            flying = request.rid in in_flight
            if not request.finished() and not (flying and next_output_ends(request)):
                call: SglangCall = request.plait_call
                running[call] = request
                call.follow_decode(request, flying)
        return sorted(running, key=_ORDER), list(self._waiting)

    def _follow_queue(self) -> None:
        queue = self._scheduler.waiting_queue
        if len(queue) != len(self._waiting):  # some were aborted
            before, self._waiting = self._waiting, {request.plait_call: request for request in queue}
            self._in_order = False
            for call in before.keys() - self._waiting:
                self._hits.left(call)
        if not self._in_order:
            self._waiting = {call: self._waiting[call] for call in sorted(self._waiting, key=_ORDER)}
            self._in_order = True

    def _in_flight(self) -> set[str]:
        """Ids of requests whose next token is still being computed."""
        return {request.rid for batch, _ in self._scheduler.result_queue for request in batch.reqs}
