"""A made-up package `vllm` with every name that the adapter relies on, so that tests can take some away.

Its scheduler serves running requests first, then the queue, within the budget. Nothing is computed or finished.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest

from plait.backends.vllm.scheduler import create_scheduler, scheduler_class
from tests.backends.vllm.fake_pool import BlockMap, Pool, request

BLOCK_TOKENS = 16
BUDGET_TOKENS = 100


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"


class PauseState(Enum):
    UNPAUSED = 0


class FullAttentionSpec: ...


class Queue(list[Any]):
    def remove_requests(self, requests: Collection[Any]) -> None:
        self[:] = [one for one in self if one not in requests]


class Scheduler:
    """The names of vLLM 0.32, but for the attributes that it `lacks`. Each gets the connector that is `made`."""

    lacks: Sequence[str] = ()
    made: Any = None

    def __init__(self, vllm_config: Any) -> None:
        pool = Pool(100)
        manager = SimpleNamespace(block_size=BLOCK_TOKENS, req_to_blocks={})
        self.vllm_config = vllm_config
        self.cache_config = SimpleNamespace(block_size=BLOCK_TOKENS)
        group = SimpleNamespace(kv_cache_spec=FullAttentionSpec())
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group])
        coordinator = SimpleNamespace(single_type_managers=(manager,))
        self.kv_cache_manager = SimpleNamespace(block_pool=pool, coordinator=coordinator)
        self.requests: dict[str, Any] = {}
        self.waiting = Queue()
        self.kv_holding_waiting = Queue()
        self.running: list[Any] = []
        self.pause_state = PauseState.UNPAUSED
        self.max_num_active_reqs = 8
        self.max_num_scheduled_tokens = BUDGET_TOKENS
        self.max_model_len = 4096
        self.num_lookahead_tokens = self.num_waiting_for_streaming_input = 0
        self.connector = self.made
        self.need_mamba_block_aligned_split = False
        self.prev_step_scheduled_req_ids: set[str] = set()
        for name in self.lacks:
            delattr(self, name)

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> Any:
        left, scheduled, new = self.max_num_scheduled_tokens, {}, []
        for one in (*self.running, *self.waiting):
            tokens = min(left, one.num_tokens - one.num_computed_tokens)
            if hasattr(self, "_reserve_prefill_lookahead"):
                tokens = self._reserve_prefill_lookahead(one, one.num_computed_tokens, tokens)
            if tokens:
                left -= tokens
                scheduled[one.request_id] = tokens
                one.num_computed_tokens += tokens
        for one in [one for one in self.waiting if one.request_id in scheduled]:
            self.waiting.remove(one)
            self.running.append(one)
            new.append(SimpleNamespace(req_id=one.request_id))
        return SimpleNamespace(num_scheduled_tokens=scheduled, scheduled_new_reqs=new)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        del scheduler_output, model_runner_output
        return {}

    def finish_requests(self, request_ids: Any, finished_status: Any) -> None: ...

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        del timestamp
        request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED
        self.waiting.append(request)

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        del request, num_computed_tokens
        return num_new_tokens


class AsyncScheduler(Scheduler): ...


class EngineCore: ...


class AsyncMPClient:
    """The API server's client of engine cores."""

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any: ...


class AsyncLLM:
    async def add_request(  # noqa: PLR0917 - vLLM's own parameters
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> Any: ...


MODULES: Final[dict[str, dict[str, Any]]] = {
    "vllm": {"__version__": "9.9"},
    "vllm.v1": {},
    "vllm.v1.core": {},
    "vllm.v1.core.block_pool": {"BlockPool": Pool, "BlockHashToBlockMap": BlockMap},
    "vllm.v1.core.sched": {},
    "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
    "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": AsyncScheduler},
    "vllm.v1.core.sched.request_queue": {"FCFSRequestQueue": Queue},
    "vllm.v1.core.sched.interface": {"PauseState": PauseState},
    "vllm.v1.engine": {},
    "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
    "vllm.v1.engine.core": {"EngineCore": EngineCore},
    "vllm.v1.engine.core_client": {"AsyncMPClient": AsyncMPClient},
    "vllm.v1.kv_cache_interface": {"FullAttentionSpec": FullAttentionSpec},
    "vllm.v1.request": {"RequestStatus": RequestStatus},
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `vllm` be this package."""
    scheduler_class.cache_clear()
    for name, content in MODULES.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def build(**settings: Any) -> Any:
    """A scheduler with the adapter, whose settings these are."""
    return build_rank(settings, data_parallel_size=1, data_parallel_index=0)


def build_rank(settings: Mapping[str, Any], **parallel: Any) -> Any:
    """As `build`, in one of several data-parallel ranks: `parallel` has vLLM's settings of them."""
    config = SimpleNamespace(
        additional_config={"plait": dict(settings)},
        model_config=SimpleNamespace(served_model_name="tiny"),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        parallel_config=SimpleNamespace(**parallel),
    )
    return create_scheduler(vllm_config=config)


def send(scheduler: Any, name: str, tokens: int, **annotations: Any) -> Any:
    """A request arrives with a prompt of its own. Returns its call."""
    first = 1000 * len(scheduler.requests)
    prompt = list(range(first, first + tokens))
    one = SimpleNamespace(
        **vars(request(prompt, BLOCK_TOKENS)) | {"request_id": name},
        num_prompt_tokens=tokens,
        num_tokens=tokens,
        num_computed_tokens=0,
        num_output_placeholders=0,
        max_tokens=50,
        status=RequestStatus.WAITING,
        arrival_time=0.0,
        sampling_params=SimpleNamespace(extra_args=annotations),
        skip_reading_prefix_cache=False,
    )
    scheduler.add_request(one)
    return one.plait_call
