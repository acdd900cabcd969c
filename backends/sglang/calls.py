"""SGLang's requests as calls of the local scheduler, and SGLang's KV cache as the scheduler's facts.

A step must not look at every waiting call, since there can be thousands. So `Requests` keeps the calls from step to
step, and `WaitingHits` keeps their cached tokens and searches again only beside blocks that have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Any, Final, cast

from plait.backends.adapter.prefix_search import cached_blocks, shared_blocks
from plait.backends.protocol.cache_state import KvState
from plait.backends.protocol.call_annotations import EngineAnnotations
from plait.backends.sglang.cache_state import CacheObserver
from plait.backends.sglang.compatibility import (
    evictable_tokens,
    found_tokens,
    namespace,
    next_output_ends,
    prefix_tokens,
)
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, chain
from plait.policy.scheduling.plan import InFlight, LocalCall


@dataclass(slots=True, eq=False)
class SglangCall(LocalCall):
    """A request in SGLang. `order` sorts calls by arrival. `tree_blocks` has the hashes of the prompt's tree blocks.

    `hit_blocks` is the cached prefix found last, in tree blocks, where the next search starts. `hit_tokens` counts the
    tokens of its whole pages. `seen_tokens` is the output reported.
    """

    order: tuple[float, int] = field(kw_only=True)
    received_s: float = field(kw_only=True)
    tree_blocks: Sequence[int] = field(kw_only=True)
    hit_blocks: int = field(default=0, kw_only=True)
    hit_tokens: int = field(default=0, kw_only=True)
    waits: bool = field(default=True, kw_only=True)
    admitted: bool = field(default=False, kw_only=True)
    seen_tokens: int = field(default=0, kw_only=True)

    def follow_waiting(self, request: Any) -> None:
        """Update from a request that waits again. The output so far has to be computed again too."""
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
    """The call of a request that SGLang has just received, the engine's `sequence`th."""
    arrived_s = now_s - annotations.age_s
    return SglangCall(
        call_id=request.rid,
        arrived_s=arrived_s,
        prompt_tokens=len(request.origin_input_ids),
        slo=annotations.slo,
        objective=annotations.objective,
        priority=annotations.priority,
        is_line=annotations.is_line,
        max_output_tokens=request.sampling_params.max_new_tokens,
        order=(arrived_s, sequence),
        received_s=now_s,
        tree_blocks=_tree_blocks(request, observer),
        hit_blocks=(annotations.cached_tokens or 0) // TREE_BLOCK_TOKENS,
    )


def _tree_blocks(request: Any, observer: CacheObserver) -> Sequence[int]:
    """The hashes of a prompt's tree blocks; none if the names of its pages depend on more than its tokens.

    SGLang always computes the last token, so a block that ends with that token cannot be a hit.
    """
    salt, key = namespace(request)
    named = request.lora_id is None and key is None and request.multimodal_inputs is None
    if not named:
        return ()
    try:
        return chain(request.origin_input_ids[:-1], TREE_BLOCK_TOKENS, observer.root(salt))
    except OverflowError:
        return ()


def find_hit(call: SglangCall, stored: Container[int], page_tokens: int) -> int:
    """Update the call's hit and return its tokens. The first `hit_blocks` are those that the gateway expects."""
    blocks = call.tree_blocks
    call.hit_blocks = cached_blocks(len(blocks), call.hit_blocks, lambda index: blocks[index] in stored)
    call.hit_tokens = _whole_pages(call.hit_blocks, page_tokens)
    return call.hit_tokens


def _whole_pages(tree_blocks: int, page_tokens: int) -> int:
    """The tokens of the whole pages in a prompt's first tree blocks."""
    return tree_blocks * TREE_BLOCK_TOKENS // page_tokens * page_tokens


def kv_state(scheduler: Any) -> KvState:
    """A scheduler's current counts of pages, without those of sliding windows, which may have a pool of their own."""
    page, pool = scheduler.page_size, scheduler.token_to_kv_pool_allocator
    free = getattr(pool, "full_available_size", pool.available_size)()
    cached = evictable_tokens(scheduler.tree_cache)
    return KvState(scheduler.max_total_num_tokens // page, int(free // page), int(cached // page))


def running_requests(scheduler: Any, beginning: Iterable[Any] = ()) -> list[Any]:
    """Requests that run, including the prompt that is computed in chunks, and those `beginning`."""
    last = scheduler.last_batch.reqs if scheduler.last_batch else ()
    begun = [*scheduler.running_batch.reqs, *last, *beginning]
    if scheduler.chunked_req is not None:
        begun.append(scheduler.chunked_req)
    return [request for request in {id(request): request for request in begun}.values() if not request.finished()]


class SglangFacts:
    """The EngineFacts of one SGLang scheduler, whose pages are the KV blocks.

    SGLang checks again before it admits a call, and wants room for some of the call's output too.
    """

    def __init__(self, scheduler: Any, observer: CacheObserver) -> None:
        limit = scheduler.max_prefill_tokens
        self.max_batch_tokens: int = min(scheduler.chunked_prefill_size or limit, limit)
        self.max_running_calls: int = scheduler.max_running_requests
        self.in_flight: InFlight | None = None
        """The batch that is computed now, with SGLang's overlap."""
        self._scheduler = scheduler
        self._stored = observer.journal.stored
        self._page_tokens: int = scheduler.page_size
        self._shares: bool = not scheduler.tree_cache.disable
        self._users: dict[int, int] = {}
        self._running: dict[SglangCall, None] = {}
        self.cached_tokens: Callable[[LocalCall], int] = attrgetter("hit_tokens")
        """How many tokens of a waiting call are cached now, in whole pages (see `WaitingHits`)."""

    def follow_running(self, running: Iterable[SglangCall]) -> None:
        """Count the users of each tree block. `running` are all calls that run now."""
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
        hit = cached_tokens // TREE_BLOCK_TOKENS
        in_use = cached_blocks(hit, hit, lambda index: blocks[index] in users) if hit and blocks[0] in users else 0
        return -(-(cached_tokens + new_tokens) // page) - in_use * TREE_BLOCK_TOKENS // page

    def blocks_freed(self, call: LocalCall) -> int:
        """How many pages preempting a running call would free: those that no other call uses."""
        call, page = cast("SglangCall", call), self._page_tokens
        users, blocks = self._users, call.tree_blocks
        shared = cached_blocks(len(blocks), 0, lambda index: users.get(blocks[index], 0) > 1)
        return -(-call.computed_tokens // page) - shared * TREE_BLOCK_TOKENS // page

    loading: Final[Sequence[LocalCall]] = ()
    """Empty: SGLang loads while it computes, layer by layer."""

    @property
    def shares_in_iteration(self) -> bool:
        """False: SGLang stores a chunk after its forward pass, and a prompt's end with the pass's result."""
        return False

    def stored_tokens(self, call: LocalCall) -> int:
        return find_hit(cast("SglangCall", call), self._stored, self._page_tokens)

    def block_key(self, call: LocalCall, tokens: int) -> int | None:
        """The hash of a tree block after the call's first `tokens`; None if it is not whole, or without a cache.

        The block is the last one within the next page, or the next one if a page is smaller.
        """
        page_end = (tokens // self._page_tokens + 1) * self._page_tokens
        index = max(tokens, page_end - TREE_BLOCK_TOKENS) // TREE_BLOCK_TOKENS
        blocks = cast("SglangCall", call).tree_blocks
        return blocks[index] if index < len(blocks) and self._shares else None

    def shared_tokens(self, call: LocalCall, other: LocalCall) -> int:
        own, others = cast("SglangCall", call).tree_blocks, cast("SglangCall", other).tree_blocks
        return _whole_pages(shared_blocks(own, others, min(len(own), len(others))), self._page_tokens)


class WaitingHits:
    """Keeps the `hit_tokens` of the waiting calls. A step calls `follow` before it reads them.

    A call's hit stays the same while the last tree block of the hit stays stored and the next one is not stored. So a
    change of a block concerns only the calls whose hits end at that block.
    """

    def __init__(self, observer: CacheObserver) -> None:
        self._journal = observer.journal
        self._page_tokens = observer.page_tokens
        self._cursor = self._journal.cursor
        self._new: dict[SglangCall, None] = {}
        self._beside: dict[int, set[SglangCall]] = {}
        """By tree block: the calls for which it is the last block of the hit, or the next one."""

    def queued(self, call: SglangCall) -> None:
        self._new[call] = None

    def left(self, call: SglangCall) -> None:
        self._new.pop(call, None)
        self._drop(call)

    def follow(self) -> None:
        """Search the hits of new calls, and of calls at whose hits the cache has changed."""
        journal, beside = self._journal, self._beside
        changed, self._cursor = journal.changed(self._cursor), journal.cursor
        blocks = beside.keys() if changed is None else beside.keys() & changed
        moved = {call for block in blocks for call in beside[block]}
        for call in moved:
            self._drop(call)
        for call in (*moved, *self._new):
            find_hit(call, journal.stored, self._page_tokens)
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
        """The last tree block of a call's hit and the next one, as far as there are any."""
        hit = call.hit_blocks
        return call.tree_blocks[max(0, hit - 1) : hit + 1]


_ORDER = attrgetter("order")


class Requests:
    """Maps the requests of one scheduler to the calls of a plan, and back. A request's call is its `plait_call`.

    Waiting requests are kept from step to step, in order of arrival. Each request that enters SGLang's queue comes
    through `queued`. So if the queue is as long as what is kept, both have the same requests.
    """

    def __init__(self, scheduler: Any, hits: WaitingHits) -> None:
        self._scheduler = scheduler
        self._hits = hits
        self._running: dict[SglangCall, Any] = {}
        self._waiting: dict[SglangCall, Any] = {}
        self._in_order = True
        self._asked = 0

    def of(self, call: SglangCall) -> Any:
        """The request of a call that the last `calls` returned."""
        return self._waiting[call] if call.waits else self._running[call]

    def queued(self, request: Any) -> None:
        call: SglangCall = request.plait_call
        latest = next(reversed(self._waiting), call)
        self._in_order = self._in_order and latest.order <= call.order
        self._waiting[call] = request
        self._hits.queued(call)

    def limit_hits(self) -> None:
        """Limit the hits of the next 8 waiting calls to what SGLang finds, in some 30 us each.

        SGLang notes a use of what it finds, so all ranks have to ask for the same.
        """
        first = self._asked if self._asked < len(self._waiting) else 0
        self._asked = first + 8
        tree, page = self._scheduler.tree_cache, self._scheduler.page_size
        for call, request in islice(self._waiting.items(), first, self._asked):
            call.hit_tokens = min(_whole_pages(call.hit_blocks, page), found_tokens(tree, request))

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
