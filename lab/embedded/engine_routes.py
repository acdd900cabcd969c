"""The routes that describe the engine: its model, cache, load, health, metrics and routes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plait.backends.adapter.named_ranks import named_rank
from plait.backends.adapter.routes import report_query
from plait.backends.errors import NotFoundError
from plait.backends.protocol.call_objectives import PATH as CALL_OBJECTIVES
from plait.backends.protocol.call_objectives import ChangesAnswer, read_changes
from plait.backends.protocol.tokenizer_files import PATH as TOKENIZER
from plait.backends.protocol.tokenizer_files import encoded
from plait.lab.embedded.completion import in_emulated_time
from plait.lab.embedded.engine import Engine
from plait.lab.embedded.serving import Serving, json_response

Sample = tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str, str, Mapping[str, str], float]
"""A sample of one rank: its family's kind, name and description, its labels and its value."""

COUNTERS = {
    "calls": "Calls received",
    "prompt_tokens": "Prompt tokens of admitted calls",
    "cached_prompt_tokens": "Prompt tokens found in the KV cache",
    "loaded_tokens": "Tokens brought back to the KV cache from lower tiers",
    "computed_prompt_tokens": "Prompt tokens computed, including recomputation after a preemption",
    "output_tokens": "Tokens generated",
    "iterations": "Iterations run",
    "busy_s": "Emulated seconds of computation",
    "preemptions": "Preemptions of running calls",
    "aborted_calls": "Calls whose client went away",
}


class EngineCollector(Collector):
    """The metrics `plait_engine_*`, labelled with engine and model, read from the engines at each scrape.

    With several ranks, vLLM's metrics have the rank as `engine`. As in vLLM, `num_gpu_blocks` is then all ranks' sum.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        for samples in zip(*map(self._samples, range(len(self._engines))), strict=True):
            kind, name, text, labels, _ = samples[0]
            family = kind(name, text, labels=list(labels))
            for _, _, _, labels, value in samples:
                family.add_metric(list(labels.values()), value)
            yield family

    def _samples(self, rank: int) -> Iterator[Sample]:
        engine, ranks = self._engines[rank], len(self._engines)
        settings = engine.settings
        own = {"engine": settings.name, "model": settings.model}
        for name, value in asdict(engine.counters).items():
            name_s = f"plait_engine_{name.replace('_s', '_seconds')}"
            yield CounterMetricFamily, name_s, COUNTERS[name], own, value
        state = engine.cache_state(engine.journal.cursor)
        of_rank = {"engine": str(rank)} if ranks > 1 else {}
        waiting, running, kv = state.queue.waiting, state.queue.running, state.kv
        vllm = {"model_name": settings.model, **of_rank}
        cache = {"block_size": str(settings.block_tokens), "num_gpu_blocks": str(kv.total_blocks * ranks), **of_rank}
        for name, text, labels, value in (
            ("plait_engine_calls_waiting", "Calls in the queue", own, waiting),
            ("plait_engine_calls_running", "Calls in the batch", own, running),
            ("plait_engine_kv_blocks", "KV blocks", own, kv.total_blocks),
            ("plait_engine_kv_blocks_free", "KV blocks that hold nothing", own, kv.free_blocks),
            ("plait_engine_kv_blocks_cached", "KV blocks with a prefix that no call uses", own, kv.cached_blocks),
            ("vllm:num_requests_waiting", "Calls in the queue, under vLLM's name", vllm, waiting),
            ("vllm:num_requests_running", "Calls in the batch, under vLLM's name", vllm, running),
            ("vllm:cache_config_info", "The KV cache, under vLLM's names", cache, 1),
        ):
            yield GaugeMetricFamily, name, text, labels, value


class EngineRoutes:
    """The routes, over the ranks. `/health`, `/ping` and `/metrics` need no API key."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(serving.ranks.engines))
        self.routes = [
            serving.route("/v1/models", self._models, "GET"),
            serving.route("/cache_state", self._cache_state, "GET"),
            serving.route(CALL_OBJECTIVES, self._call_objectives),
            serving.route(TOKENIZER, self._tokenizer, "GET"),
            serving.route("/version", self._version, "GET"),
            serving.route("/load", self._load, "GET"),
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/metrics", self._metrics),
        ]

    async def _models(self, _request: Request) -> Response:
        model = {
            "id": self._serving.model.name,
            "object": "model",
            "created": 0,
            "owned_by": "plait",
            "max_model_len": self._serving.model.max_context_tokens,
        }
        return json_response({"object": "list", "data": [model]})

    async def _cache_state(self, request: Request) -> Response:
        ranks = self._serving.ranks.engines
        asked = report_query(request.query_params, len(ranks))
        clock, engine = self._serving.clocks[asked.rank], ranks[asked.rank]
        state = await clock.cache_state(engine, asked.since, asked.epoch, asked.wait_s, asked.gateway)
        if len(ranks) > 1:
            state = msgspec.structs.replace(state, rank=asked.rank, ranks=len(ranks))
        if "msgpack" in request.headers.get("accept", ""):
            return Response(msgspec.msgpack.encode(state), media_type="application/msgpack")
        return json_response(state)

    async def _call_objectives(self, request: Request) -> Response:
        changes = read_changes(await request.body(), self._serving.annotations)
        scaled = (in_emulated_time(one, self._serving.time_scale) for one in changes)
        engine = self._serving.ranks.engines[named_rank() or 0]
        return json_response(ChangesAnswer(engine.refinable.refine(scaled)))

    async def _tokenizer(self, _request: Request) -> Response:
        tokenizer, fingerprint = self._serving.model.tokenizer, self._serving.ranks.engines[0].tokenizer
        files = await asyncio.to_thread(tokenizer.files)
        if not files or fingerprint is None:
            raise NotFoundError(f"The tokenizer '{tokenizer.name}' of this engine has no files to offer.")
        return Response(encoded(fingerprint, files, {}), media_type="application/msgpack")

    async def _version(self, _request: Request) -> Response:
        return json_response({"version": version("plait")})

    async def _load(self, _request: Request) -> Response:
        load = sum(len(engine.running) + len(engine.waiting) for engine in self._serving.ranks.engines)
        return json_response({"server_load": load})

    async def _health(self, _request: Request) -> Response:
        return Response(status_code=200)

    async def _metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})


def description_of(routes: Sequence[Route]) -> dict[str, Any]:
    """What `/openapi.json` says of the routes: their paths and methods."""
    done = {"responses": {"200": {"description": "The answer."}}}
    paths = {
        route.path: {method.lower(): done for method in sorted(route.methods or ()) if method != "HEAD"}
        for route in routes
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Plait's embedded engine", "version": version("plait")},
        "paths": paths,
    }
