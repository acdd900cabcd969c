"""A real SGLang scheduler with its own event loops, step by step. The model's forward pass is made up.

Building a scheduler takes seconds and sets up the process. So there is only one, and each `Engine` takes it over: as it
comes, or with our hooks and a driver of its own.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, prepare_server_args, set_global_server_args_for_scheduler

from e2e.real_schedulers.built_engine import KV_TOKENS, MAX_RUNNING_CALLS, MODEL, PAGE_TOKENS, Clock, token_after
from e2e.real_schedulers.on_sglang import page_kernels
from plait.backends.adapter.required_names import load
from plait.backends.adapter.scheduler_settings import VARIABLE, read_settings
from plait.backends.protocol.cache_state import CacheState
from plait.backends.sglang import plugin
from plait.backends.sglang.driver import SglangDriver
from plait.backends.sglang.planner import SglangPlanner
from plait.backends.sglang.scheduler import scheduler_class
from plait.backends.sglang.step_clock import StepClock
from plait.policy.prefix.block_hash import chain, root_hash
from plait.policy.scheduling.plan import LocalScheduler
from tests.waiting import WITHIN_S

CHUNK_TOKENS = 256
TREE_BLOCK_TOKENS = 64
_FLAGS = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--served-model-name", "tiny"),
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--grammar-backend", "none"),
    *("--context-length", "2048", "--mem-fraction-static", "0.3"),
    *("--max-running-requests", str(MAX_RUNNING_CALLS)),
    *("--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(KV_TOKENS)),
    *("--chunked-prefill-size", str(CHUNK_TOKENS), "--enable-mixed-chunk"),
)


WINDOW: Final = "PLAIT_TEST_WINDOW"
"""The environment variable with the size of a sliding window. With it, half of the model's layers have one."""

_RANKS = ("gpu_id", "tp_rank", "moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank")
_SALT: Final = "cache_salt" if "cache_salt" in inspect.signature(Req).parameters else "extra_key"
"""Where a request has its cache salt: before 0.5.18, the key that separates caches has it."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How an engine runs. `plait` is what PLAIT_SGLANG says, None for stock SGLang."""

    overlaps: bool = False
    plait: Mapping[str, Any] | None = field(default_factory=dict)


def build_scheduler(folder: Path, *flags: str) -> Any:
    """SGLang's scheduler with a model of random weights, whose configuration is written to `folder`."""
    (folder / "config.json").write_text(json.dumps({**MODEL, **_windows(), "dtype": "float32"}))
    arguments = prepare_server_args(["--model-path", str(folder), *_FLAGS, *flags])
    ports = PortArgs.init_new(arguments)
    page_kernels.install()
    if page_hash := load("sglang.srt.mem_cache.cpp_utils.native_hash.get_native_hash"):
        page_hash(array("q", [0]), None)  # the first call compiles it, which takes longer than a step may
    ranks: dict[str, Any] = {}
    if hasattr(sglang_scheduler, "SpawnRanks"):
        spawned = sglang_scheduler.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        sglang_scheduler.publish(arguments, role="scheduler", ranks=spawned)
    else:  # before 0.5.21
        if hasattr(sglang_scheduler, "publish"):
            sglang_scheduler.publish(arguments, role="scheduler")
        else:  # before 0.5.17
            set_global_server_args_for_scheduler(arguments)
        ranks = {**dict.fromkeys(_RANKS, 0), "dp_rank": None}
    builder = sglang_scheduler.kv_cache_builder
    builder.build_kv_cache = partial(plugin.with_events, builder.build_kv_cache)
    scheduler = sglang_scheduler.Scheduler(arguments, ports, **ranks)
    for channel in (scheduler.ipc_channels.send_to_tokenizer, scheduler.ipc_channels.send_to_detokenizer):
        channel.socket = None  # nobody receives
    scheduler.model_worker.forward_batch_generation = _forward
    scheduler.built_with = frozenset(vars(scheduler))
    return scheduler


def _windows() -> dict[str, Any]:
    """What a model's configuration says if it has sliding windows. SGLang takes any architecture for one that has."""
    if WINDOW not in os.environ:
        return {}
    window = int(os.environ[WINDOW])
    load("sglang.srt.models.llama.LlamaForCausalLM").get_attention_sliding_window_size = lambda _: window
    return {"num_hidden_layers": 2, "is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0], "sliding_window": window}


class _EndedError(Exception):
    """Ends an event loop where it receives requests."""


class Engine:
    """Runs SGLang's own event loop in a thread, which stops before each step. `tokens` are the outputs so far."""

    def __init__(self, scheduler: Any, setup: Setup, policy: LocalScheduler | None = None) -> None:
        self.scheduler = scheduler
        self.requests: dict[str, Any] = {}
        self.before_result: Callable[[], None] = lambda: None
        self._names = itertools.count()
        self._sent: list[Any] = []
        self._scheduled: list[dict[str, int]] = []
        self._error: BaseException | None = None
        self._ends = False
        self._arrived, self._go = threading.Semaphore(0), threading.Semaphore(0)
        SchedulerRequestReceiver._pull_raw_reqs = lambda _: self._receive()
        scheduler.enable_overlap = setup.overlaps
        _become(scheduler, setup)
        if policy is not None:
            self.planner.policy = policy
        scheduler.run_batch = self._run_batch
        scheduler.process_batch_result = self._process_batch_result
        scheduler._add_request_to_queue = self._add_request_to_queue
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        self._wait()

    @property
    def driver(self) -> SglangDriver:
        driver: SglangDriver = self.scheduler.plait
        return driver

    @property
    def planner(self) -> SglangPlanner:
        assert self.driver.planner is not None, "SGLang lacks names for plans"
        return self.driver.planner

    @property
    def policy(self) -> LocalScheduler:
        return self.planner.policy

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {name: list(request.output_ids) for name, request in self.requests.items()}

    @property
    def prompts(self) -> dict[str, int]:
        return {name: len(request.origin_input_ids) for name, request in self.requests.items()}

    @property
    def batch_tokens(self) -> int:
        return int(self.scheduler.chunked_prefill_size)

    @property
    def waiting(self) -> list[str]:
        return [request.rid for request in self.scheduler.waiting_queue]

    @property
    def busy(self) -> bool:
        return bool(self._sent) or not self.scheduler.is_fully_idle()

    def follow_clock(self, clock: Clock) -> None:
        self.driver.clock = StepClock(clock)

    def add(
        self,
        prompt: Sequence[int],
        output_tokens: int = 4,
        *,
        name: str | None = None,
        salt: str | None = None,
        **annotations: Any,
    ) -> str:
        """Send a request, which arrives with the next step."""
        name = name or f"call-{next(self._names)}"
        sampling = SamplingParams(
            max_new_tokens=output_tokens, temperature=0, ignore_eos=True, custom_params=annotations or None
        )
        sampling.normalize(None)
        sent = {
            "rid": name,
            "input_text": "",
            "input_ids": array("q", prompt),
            "input_embeds": None,
            "mm_inputs": None,
            "token_type_ids": None,
            "sampling_params": sampling,
            "return_logprob": False,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "token_ids_logprob": None,
            "stream": False,
            _SALT: salt,
        }
        taken = inspect.signature(TokenizedGenerateReqInput).parameters
        self._sent.append(TokenizedGenerateReqInput(**{key: value for key, value in sent.items() if key in taken}))
        return name

    def abort(self, name: str) -> None:
        """Abort a request with the next step."""
        self._sent.append(AbortReq(rid=name))

    def step(self) -> dict[str, int]:
        """Run one step. Returns the tokens computed for each request."""
        self._scheduled = []
        self._go.release()
        self._wait()
        return {name: tokens for step in self._scheduled for name, tokens in step.items()}

    def run(self, limit: int = 3000) -> list[dict[str, int]]:
        """Step until nothing is left to do."""
        steps = []
        while self.busy:
            steps.append(self.step())
            assert len(steps) < limit, "the engine makes no progress"
        return steps

    def report(self, since: int | None, epoch: str | None, gateway: str | None = None) -> CacheState:
        return self.driver.report(since, epoch, gateway)

    def held(self) -> dict[int, int | None]:
        return self._found(in_host=False)

    def held_below(self) -> dict[str, dict[int, int | None]]:
        if getattr(self.scheduler.tree_cache, "cache_controller", None) is None:
            return {}
        device, both = self.held(), self._found(in_host=True)
        return {"host": {block: parent for block, parent in both.items() if block not in device}}

    def _found(self, *, in_host: bool) -> dict[int, int | None]:
        found: dict[int, int | None] = {}
        for request in self.requests.values():
            tokens = [*request.origin_input_ids, *request.output_ids]
            salt = getattr(request, _SALT)
            tree_blocks = chain(tokens, TREE_BLOCK_TOKENS, root_hash("tiny", salt or ""))
            key = RadixKey(token_ids=array("q", tokens), **{_SALT: salt})
            match = self.scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key))
            hit = match.device_prefix_len if hasattr(match, "device_prefix_len") else len(match.device_indices)
            hit += match.host_hit_length if in_host else 0
            found.update(zip(tree_blocks[: hit // TREE_BLOCK_TOKENS], [None, *tree_blocks], strict=False))
        return found

    def pages(self) -> tuple[int, int, int]:
        free = self.scheduler.token_to_kv_pool_allocator.available_size()
        cached = self.scheduler.tree_cache.evictable_size()
        return KV_TOKENS // PAGE_TOKENS, free // PAGE_TOKENS, cached // PAGE_TOKENS

    def empty_cache(self) -> bool:
        return bool(self.scheduler.flush_cache(empty_cache=False))

    def end(self) -> None:
        """Abort what is left, empty the cache, and end the event loop. If the loop has failed, nothing can be ended."""
        if self._error is not None:
            return
        self._sent.append(AbortReq(rid="", abort_all=True))
        self.run()
        assert self.empty_cache()
        self._ends = True
        self._go.release()
        self._thread.join(WITHIN_S)

    def _loop(self) -> None:
        try:
            self.scheduler.run_event_loop()
        except _EndedError:
            return
        except BaseException as error:  # noqa: BLE001 - the thread that waits for the step raises it
            self._error = error
        self._arrived.release()

    def _wait(self) -> None:
        assert self._arrived.acquire(timeout=WITHIN_S), "the step does not end"
        if self._error is not None:
            raise self._error

    def _receive(self) -> list[Any]:
        self._arrived.release()
        self._go.acquire()
        if self._ends:
            raise _EndedError
        sent, self._sent = self._sent, []
        return sent

    def _run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = [1] * len(batch.reqs) if batch.forward_mode.is_decode() else batch.extend_lens
        self._scheduled.append({one.rid: tokens for one, tokens in zip(batch.reqs, lengths, strict=True)})
        return type(self.scheduler).run_batch(self.scheduler, batch, *args, **kwargs)

    def _process_batch_result(self, batch: Any, result: Any) -> None:
        self.before_result()
        type(self.scheduler).process_batch_result(self.scheduler, batch, result)

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        self.requests[req.rid] = req
        type(self.scheduler)._add_request_to_queue(self.scheduler, req, is_retracted)


def _forward(batch: Any, *_: Any, **__: Any) -> GenerationBatchResult:
    lengths = batch.seq_lens.tolist()
    return GenerationBatchResult(
        logits_output=LogitsProcessorOutput(next_token_logits=None),
        next_token_ids=torch.tensor([token_after(length) for length in lengths], dtype=torch.int64),
        can_run_cuda_graph=False,
    )


def _become(scheduler: Any, setup: Setup) -> None:
    """Make the scheduler a stock one, or one with our hooks, as if it had just been built."""
    base = sglang_scheduler.Scheduler
    for name in ("take_events", "_record_store_event", "_record_remove_event"):
        scheduler.tree_cache.__dict__.pop(name, None)
    scheduler.tree_cache.take_events()
    for name in {"plait", "result_queue"} - scheduler.built_with:
        scheduler.__dict__.pop(name, None)
    scheduler.__class__ = base
    scheduler.init_request_receiver()
    if setup.plait is not None:
        scheduler.__class__ = scheduler_class(base)
        scheduler.attach(read_settings({VARIABLE: json.dumps(dict(setup.plait))}))
    scheduler.init_request_dispatcher()  # it has the methods of the class before
