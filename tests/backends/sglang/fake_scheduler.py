"""One rank of SGLang, without SGLang: its scheduler's loop over made-up requests, with our hooks.

The KV cache has pages but finds no prefixes. The scheduler records what each prefill pass was handed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from plait.backends.adapter.scheduler_settings import SglangSettings
from plait.backends.protocol.cache_state import Tier
from plait.backends.sglang.cache_state import CacheObserver, EventTap, untold
from plait.backends.sglang.driver import SglangDriver
from plait.backends.sglang.scheduler import PlannedSglangScheduler
from plait.policy.scheduling.plan import LocalScheduler

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Setup:
    """The sizes and options of an engine. Each rank has the same."""

    pages: int = 120
    chunk_tokens: int = 256
    max_running: int = 6
    mixes: bool = True
    overlaps: bool = True
    has_windows: bool = False


@dataclass(frozen=True, slots=True)
class Handed:
    """What SGLang was handed for one prefill pass. Requests are named by their ids.

    `shown` is the waiting queue that SGLang sees. `queue` is the whole one after the pass, with the preempted requests.
    """

    shown: tuple[str, ...]
    chunk_tokens: int
    chunked: str | None
    mixes: bool
    limits: Mapping[str, int]
    may_cut: bool
    preempted: tuple[str, ...] = ()
    queue: tuple[str, ...] = ()


@dataclass(eq=False)
class Request:
    """A request as SGLang keeps it. `prefix_len` counts its tokens in the KV cache."""

    rid: str
    origin_input_ids: Sequence[int]
    max_new_tokens: int
    sampling_params: Any
    output_ids: list[int] = field(default_factory=list)
    prefix_len: int = 0
    ended: bool = False
    retracted: bool = False
    plait_call: Any = None
    lora_id: None = None
    extra_key: None = None
    cache_salt: None = None
    multimodal_inputs: None = None
    beam_group: None = None
    input_embeds: None = None
    session: None = None

    def __post_init__(self) -> None:
        self.sampling_params.max_new_tokens = self.max_new_tokens

    @property
    def tokens(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    def finished(self) -> bool:
        return self.ended

    def next_output_finishes_by_length(self) -> bool:
        return len(self.output_ids) + 1 >= self.max_new_tokens


class Batch:
    """A batch of requests. It decodes if it has no `extend_lens`. `produces` names those that get a token."""

    def __init__(
        self,
        reqs: Sequence[Request],
        release: Callable[[Request], None],
        extend_lens: Sequence[int] | None = None,
        prefix_lens: Sequence[int] | None = None,
        produces: Sequence[Request] = (),
    ) -> None:
        self.reqs = list(reqs)
        self.extend_lens, self.prefix_lens, self.produces = extend_lens, prefix_lens, produces
        self.forward_mode = SimpleNamespace(is_decode=lambda: extend_lens is None)
        self.batch_is_full = False
        self._release = release

    @property
    def computed_tokens(self) -> int:
        return len(self.reqs) if self.extend_lens is None else sum(self.extend_lens)

    def release_req(self, index: int, _remaining: int) -> None:
        self._release(self.reqs[index])

    def filter_batch(self, keep_indices: Sequence[int]) -> None:
        self.reqs = [self.reqs[index] for index in keep_indices]


class FakeScheduler:
    """The parts of SGLang's scheduler that the hooks and the driver use. `handed` has an entry for each pass."""

    plait: SglangDriver

    def __init__(self, setup: Setup) -> None:
        self.page_size = PAGE_TOKENS
        self.max_prefill_tokens = self.chunked_prefill_size = setup.chunk_tokens
        self.max_running_requests = setup.max_running
        self.max_total_num_tokens = setup.pages * PAGE_TOKENS
        self.is_mixed_chunk = setup.mixes
        self.waiting_queue: list[Request] = []
        self.running_batch = Batch((), self._release)
        self.last_batch: Batch | None = None
        self.chunked_req: Request | None = None
        self.result_queue: deque[tuple[Batch, None]] = deque()
        self.req_to_token_pool = None
        self.tree_cache = SimpleNamespace(
            evictable_size=lambda: 0,
            take_events=list,
            disable=False,
            supports_swa=lambda: setup.has_windows,
            supports_mamba=lambda: False,
        )
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: self._free_pages * PAGE_TOKENS)
        self.handed: list[Handed] = []
        self.retractions = 0
        """Preemptions by SGLang itself, when decodes lack pages."""
        self._overlaps = setup.overlaps
        self._holders: dict[str, Request] = {}
        self._released: list[str] = []

    # The loop: a step's requests arrive, a batch begins, and later the results of batches come.

    def begin_step(self, received: list[Any]) -> Batch | None:
        """Receive a step's requests and begin a batch."""
        self.process_input_requests(received)
        self._merge()
        self._released = []
        batch: Batch | None = self.get_new_batch_prefill(self.running_batch).batch_to_run
        queue = tuple(request.rid for request in self.waiting_queue)
        self.handed[-1] = replace(self.handed[-1], preempted=tuple(self._released), queue=queue)
        batch = batch or self._decodes()
        if batch is not None:
            self.run_batch(batch)
            self.result_queue.append((batch, None))
        self.last_batch = batch
        return batch

    def end_step(self) -> None:
        """Process the results that are there: with overlap, those of the batches before the last."""
        in_flight = int(self._overlaps and self.last_batch is not None)
        while len(self.result_queue) > in_flight:
            self.process_batch_result(*self.result_queue.popleft())

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.waiting_queue or self._holders)

    def _poll_timeout_aborts(self) -> list[Any]:
        return []

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        for received in recv_reqs:
            if isinstance(received, Request):
                self._add_request_to_queue(received)
            else:
                self.abort_request(received)

    def _add_request_to_queue(self, req: Request, is_retracted: bool = False) -> None:
        del is_retracted
        self.waiting_queue.append(req)

    def abort_request(self, recv_req: Any) -> None:
        self.waiting_queue = [request for request in self.waiting_queue if request.rid != recv_req.rid]
        request = self._holders.pop(recv_req.rid, None)
        if request is not None:
            request.ended = True
        if request is not None and request is self.chunked_req:
            self.chunked_req = None

    def process_pending_chunked_abort(self) -> None: ...

    def run_batch(self, batch: Batch) -> None: ...

    def process_batch_result(self, batch: Batch, _result: None) -> None:
        for request in batch.produces:
            if not (request.ended or request.retracted):
                request.output_ids.append(0)
                if len(request.output_ids) >= request.max_new_tokens:
                    request.ended = True
                    del self._holders[request.rid]

    # Scheduling.

    def get_new_batch_prefill(self, running_batch: Batch) -> Any:
        """Admit the waiting requests in order, as far as chunk, limits, slots and pages allow."""
        limits = self.plait.prefill_pass
        chunked = None if self.chunked_req is None else self.chunked_req.rid
        shown = tuple(request.rid for request in self.waiting_queue)
        self.handed.append(
            Handed(shown, self.chunked_prefill_size, chunked, self.is_mixed_chunk, limits.limits, limits.may_cut)
        )
        decodes = running_batch.reqs if self.is_mixed_chunk else []
        room, pages = self.chunked_prefill_size - len(decodes), self._free_pages - _new_pages(running_batch.reqs)
        admitted: dict[Request, int] = {}
        begun, may_cut = len(running_batch.reqs) + (self.chunked_req is not None), limits.may_cut
        for request in [self.chunked_req, *self.waiting_queue] if self.chunked_req else list(self.waiting_queue):
            waits = request is not self.chunked_req
            rest = request.tokens - request.prefix_len
            tokens = min(rest, room, max(PAGE_TOKENS, limits.limits.get(request.rid, room)))
            needed = _pages(request.prefix_len + tokens) - _pages(request.prefix_len)
            if tokens <= 0 or needed > pages or (waits and begun >= self.max_running_requests):
                break
            if waits and tokens < rest and not may_cut:
                continue
            may_cut = may_cut and tokens == rest
            admitted[request] = tokens
            room, pages, begun = room - tokens, pages - needed, begun + waits
        return SimpleNamespace(batch_to_run=self._prefill(admitted, decodes), running_batch=running_batch)

    def _prefill(self, admitted: dict[Request, int], decodes: list[Request]) -> Batch | None:
        if not admitted:
            return None
        self.waiting_queue = [request for request in self.waiting_queue if request not in admitted]
        extends = {**admitted, **dict.fromkeys(decodes, 1)}
        prefixes = [request.prefix_len for request in extends]
        for request, tokens in admitted.items():
            request.retracted = False
            if request.prefix_len + tokens < request.tokens:
                self.chunked_req = request
            elif request is self.chunked_req:
                self.chunked_req = None
        for request, tokens in extends.items():
            request.prefix_len += tokens
            if not request.ended:
                self._holders[request.rid] = request
        produces = [request for request in extends if request is not self.chunked_req]
        return Batch(list(extends), self._release, list(extends.values()), prefixes, produces)

    def _decodes(self) -> Batch | None:
        reqs = self.running_batch.reqs
        while _new_pages(reqs) > self._free_pages:
            victim = reqs.pop()
            self._release(victim)
            self._add_request_to_queue(victim, is_retracted=True)
            self.retractions += 1
        for request in reqs:
            request.prefix_len += 1
        return Batch(reqs, self._release, produces=list(reqs)) if reqs else None

    def _merge(self) -> None:
        """The prompts of the last batch decode from now on."""
        running = dict.fromkeys([*self.running_batch.reqs, *(self.last_batch.produces if self.last_batch else ())])
        self.running_batch.reqs = [request for request in running if not (request.ended or request.retracted)]

    def _release(self, request: Request) -> None:
        request.prefix_len, request.retracted = 0, True
        del self._holders[request.rid]
        self._released.append(request.rid)

    @property
    def _free_pages(self) -> int:
        held = sum(_pages(request.prefix_len) for request in self._holders.values())
        return self.max_total_num_tokens // PAGE_TOKENS - held


class Rank(PlannedSglangScheduler, FakeScheduler):
    """A rank whose driver has its own clock."""

    def __init__(
        self,
        setup: Setup,
        clock: Callable[[], float],
        settings: SglangSettings | None = None,
        policy: LocalScheduler | None = None,
        tier: Tier = "chunks",
        *,
        rank: int = 0,
    ) -> None:
        FakeScheduler.__init__(self, setup)
        self.ps = SimpleNamespace(dp_rank=rank)
        observer = CacheObserver(page_tokens=PAGE_TOKENS, model="tiny", untold=untold(self.tree_cache))
        events = EventTap(self.tree_cache, observer, published=False)
        release = lambda req, **_: self._release(req)  # noqa: E731
        self.plait = SglangDriver(
            *(self, observer, events, settings or SglangSettings()),
            release=release,
            tier=tier,
            policy=policy,
            clock=clock,
        )


def _new_pages(decodes: Sequence[Request]) -> int:
    """How many pages the next tokens of decodes take."""
    return sum(request.prefix_len % PAGE_TOKENS == 0 for request in decodes)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
