"""A real vLLM scheduler without a model: built on the CPU, its outputs made up, so that steps can be looked at."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import gcd, lcm
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from e2e.real_schedulers.built_engine import KV_TOKENS, MAX_RUNNING_CALLS, MODEL, PAGE_TOKENS, Clock, token_after
from e2e.real_schedulers.on_vllm.transfers import Worker, offloading_manager, tensors, transfer_config
from plait.backends.protocol.cache_state import CacheState
from plait.backends.vllm.driver import VllmDriver
from plait.backends.vllm.planner import VllmPlanner
from plait.backends.vllm.scheduler import create_scheduler
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, chain, root_hash
from plait.policy.scheduling.plan import LocalScheduler


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How an engine is built. `plait` is the plugin's part of --additional-config, None for stock vLLM.

    `host_chunks` fit into host memory, of `chunk_blocks` each; without any, vLLM offloads nothing. `offloading` has
    further options of that. With `several_connectors`, offloading is one of them.
    """

    folder: Path
    asynchronous: bool = False
    blocks: int = KV_TOKENS // PAGE_TOKENS
    block_tokens: int = PAGE_TOKENS
    max_batch_tokens: int = 512
    max_running: int = MAX_RUNNING_CALLS
    groups: Sequence[Any] = ()
    """Specs of KV cache groups beside the one with full attention."""
    interval: int | None = 0
    """How often windows and states keep what a hit needs; 0: where prompts end, None: everywhere."""
    host_chunks: int = 0
    chunk_blocks: int = 1
    offloading: Mapping[str, Any] = field(default_factory=dict)
    several_connectors: bool = False
    plait: Mapping[str, Any] | None = field(default_factory=dict)


class Engine:
    """Adds requests, steps, and answers each step with tokens as a model would."""

    def __init__(self, setup: Setup, policy: LocalScheduler | None = None) -> None:
        init_none_hash(sha256)
        config = _config(setup)
        spec = FullAttentionSpec(block_size=setup.block_tokens, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
        specs = [spec, *setup.groups]
        groups = [KVCacheGroupSpec([f"layer-{number}"], one) for number, one in enumerate(specs)]
        sizes = [one.block_size for one in specs]
        if any(isinstance(one, MambaSpec) for one in specs):
            config.cache_config.mamba_cache_mode = "align"
        make: Callable[..., Any] = AsyncScheduler if setup.asynchronous else Scheduler
        if setup.plait is not None:
            make = create_scheduler
        self.scheduler = make(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=setup.blocks,
                kv_cache_tensors=tensors(setup.blocks * setup.block_tokens),
                kv_cache_groups=groups,
                **_retention(setup),
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=lcm(*sizes),
            hash_block_size=gcd(*sizes),
            log_stats=True,
        )
        if policy is not None:
            self.planner.policy = policy
        self.setup = setup
        self.tokens: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.worker = Worker()
        self.before_result: Callable[[], None] = lambda: None
        self._hasher = get_request_block_hasher(gcd(*sizes), sha256)
        self._in_flight: list[Any] = []
        self._names = itertools.count()

    @property
    def driver(self) -> VllmDriver:
        driver: VllmDriver = self.scheduler.plait
        return driver

    @property
    def planner(self) -> VllmPlanner:
        assert self.driver.planner is not None, "vLLM lacks names for plans"
        return self.driver.planner

    @property
    def policy(self) -> LocalScheduler:
        return self.planner.policy

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def batch_tokens(self) -> int:
        return int(self.scheduler.max_num_scheduled_tokens)

    @property
    def prompts(self) -> dict[str, int]:
        return {name: request.num_prompt_tokens for name, request in self.requests.items()}

    @property
    def waiting(self) -> list[str]:
        return [request.request_id for request in self.scheduler.waiting]

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_unfinished_requests())

    def follow_clock(self, clock: Clock) -> None:
        """Calls are received when they are added."""
        self.driver._clock = clock
        self.driver._wall_clock = lambda: 0.0

    def add(
        self,
        prompt: Sequence[int],
        output_tokens: int = 4,
        *,
        name: str | None = None,
        salt: str | None = None,
        arrival_time: float | None = None,
        **annotations: Any,
    ) -> str:
        request = self.request(prompt, output_tokens, name, salt, arrival_time, annotations)
        name = request.request_id
        self.scheduler.add_request(request)
        self.tokens[name], self.requests[name] = [], request
        return name

    def request(  # noqa: PLR0917 - the fields of a request
        self,
        prompt: Sequence[int],
        output_tokens: int = 1,
        name: str | None = None,
        salt: str | None = None,
        arrival_time: float | None = None,
        annotations: Mapping[str, Any] | None = None,
    ) -> Request:
        """A request that the engine has not got yet."""
        return Request(
            request_id=name or f"call-{next(self._names)}",
            prompt_token_ids=list(prompt),
            arrival_time=arrival_time,
            sampling_params=SamplingParams(max_tokens=output_tokens, ignore_eos=True, extra_args=annotations or None),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> dict[str, int]:
        """Tokens scheduled by request. An asynchronous engine runs one step ahead of its outputs."""
        output = self.scheduler.schedule()
        self.finish_step(output)
        return dict(output.num_scheduled_tokens)

    def finish_step(self, output: Any) -> None:
        """Answer what is due, now that this step was scheduled."""
        self._in_flight.append(output)
        if len(self._in_flight) > (1 if self.setup.asynchronous else 0):
            self._finish(self._in_flight.pop(0))

    def run(self, limit: int = 3000) -> list[dict[str, int]]:
        """Step until nothing is left to do."""
        steps = []
        while self.busy or self._in_flight:
            steps.append(self.step())
            if not self.scheduler.has_unfinished_requests() and not steps[-1]:
                while self._in_flight:
                    self._finish(self._in_flight.pop(0))
            assert len(steps) < limit, "the engine makes no progress"
        return steps

    def report(self, since: int | None, epoch: str | None, gateway: str | None = None) -> CacheState:
        return self.driver.report(since, epoch, gateway)

    def held(self) -> dict[int, int | None]:
        """By vLLM's own hashes, in vLLM's own map."""
        return {
            tree_block: parent
            for request in self.requests.values()
            for tree_block, parent, parts in self._tree_blocks(request)
            if all(self.pool.get_cached_block(part, [0]) for part in parts)
        }

    def _tree_blocks(self, request: Request) -> Iterable[tuple[int, int | None, list[bytes]]]:
        """A request's tree blocks, each with its parent and the whole engine blocks that it overlaps."""
        tree_blocks = chain(list(request.all_token_ids), TREE_BLOCK_TOKENS, root_hash("tiny", request.cache_salt or ""))
        size, hashes = self.setup.block_tokens, request.block_hashes
        for index, (tree_block, parent) in enumerate(zip(tree_blocks, [None, *tree_blocks], strict=False)):
            start, end = (at * TREE_BLOCK_TOKENS for at in (index, index + 1))
            if -(-end // size) <= len(hashes):
                yield tree_block, parent, hashes[start // size : -(-end // size)]

    def held_below(self) -> dict[str, dict[int, int | None]]:
        """By the chunks of vLLM's own manager, and the blocks of its own map."""
        if not self.setup.host_chunks:
            return {}
        chunks, device = self._offloaded(), self.held()
        found = {
            tree_block: parent
            for request in self.requests.values()
            for tree_block, parent, parts in self._tree_blocks(request)
            if all(part in chunks or self.pool.get_cached_block(part, [0]) for part in parts)
        }
        return {"host": {block: parent for block, parent in found.items() if block not in device}}

    def _offloaded(self) -> set[bytes]:
        """The blocks in host memory."""
        policy, width = offloading_manager(self.scheduler.connector)._policy, self.setup.chunk_blocks
        found: set[bytes] = set()
        for request in self.requests.values():
            hashes = request.block_hashes
            for end in range(width, len(hashes) + 1, width):
                chunk = policy.get(make_offload_key(hashes[end - 1], 0))
                if chunk is not None and chunk.is_ready:
                    found.update(hashes[end - width : end])
        return found

    def pages(self) -> tuple[int, int, int]:
        """Without vLLM's null block."""
        free = [block for block in self.pool.blocks if block.ref_cnt == 0 and not block.is_null]
        cached = sum(block.block_hash is not None for block in free)
        return self.pool.num_gpu_blocks - 1, len(free) - cached, cached

    def empty_cache(self) -> bool:
        return bool(self.scheduler.reset_prefix_cache())

    def _finish(self, output: Any) -> None:
        self.before_result()
        names, metadata = list(output.num_scheduled_tokens), output.kv_connector_metadata
        sampled = [self._sample(name, output) for name in names]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=None if metadata is None else self.worker.step(metadata),
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                self.tokens[one.request_id] += one.new_token_ids

    def _sample(self, name: str, output: Any) -> list[int]:
        """A token that depends on its position only, once the step reached the end of what is known."""
        request = self.scheduler.requests.get(name)
        if request is None or self._ends_before(request, output, name):
            return []
        return [token_after(request.num_prompt_tokens + len(self.tokens[name]))]

    def _ends_before(self, request: Any, output: Any, name: str) -> bool:
        computed = _computed_before(output, name) + output.num_scheduled_tokens[name]
        return bool(computed < request.num_prompt_tokens + len(self.tokens[name]))


def _computed_before(output: Any, name: str) -> int:
    for new in output.scheduled_new_reqs:
        if new.req_id == name:
            return int(new.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    return int(cached.num_computed_tokens[cached.req_ids.index(name)])


def _retention(setup: Setup) -> dict[str, int | None]:
    """Before 0.30, an environment variable has the interval, which is refused if no group goes by it."""
    if "prefix_cache_retention_interval" in {one.name for one in fields(KVCacheConfig)}:
        return {"prefix_cache_retention_interval": setup.interval}
    os.environ.pop("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", None)
    if setup.groups and setup.interval is not None:
        os.environ["VLLM_PREFIX_CACHE_RETENTION_INTERVAL"] = str(setup.interval)
    return {}


def _config(setup: Setup) -> VllmConfig:
    (setup.folder / "config.json").write_text(json.dumps({**MODEL, "torch_dtype": "bfloat16"}))
    model = ModelConfig(
        model=str(setup.folder), skip_tokenizer_init=True, dtype="bfloat16", served_model_name="tiny", seed=0
    )
    scheduling = SchedulerConfig(
        max_num_seqs=setup.max_running,
        max_num_batched_tokens=setup.max_batch_tokens,
        max_model_len=model.max_model_len,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=setup.asynchronous,
    )
    cache = CacheConfig(block_size=setup.block_tokens, enable_prefix_caching=True)
    transfers = None
    if setup.host_chunks:
        sizes = setup.host_chunks, setup.chunk_blocks, setup.block_tokens
        transfers = transfer_config(*sizes, several=setup.several_connectors, **setup.offloading)
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=scheduling,
        kv_transfer_config=transfers,
        additional_config={} if setup.plait is None else {"plait": dict(setup.plait)},
    )
    config.cache_config.num_gpu_blocks = setup.blocks
    config.scheduler_config.async_scheduling = setup.asynchronous  # which the CPU platform turns off
    return config
