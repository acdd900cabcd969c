"""The embedded engine's Prometheus metrics. They are read from the engine at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from plait.backends.embedded.engine import Engine

COUNTERS = {
    "calls": "Calls received",
    "prompt_tokens": "Prompt tokens of admitted calls",
    "cached_prompt_tokens": "Prompt tokens found in the KV cache",
    "computed_prompt_tokens": "Prompt tokens computed, including recomputation after a preemption",
    "output_tokens": "Tokens generated",
    "iterations": "Iterations run",
    "busy_s": "Emulated seconds of computation",
    "preemptions": "Preemptions of running calls",
    "aborted_calls": "Calls whose client went away",
}


class EngineCollector(Collector):
    """`plait_engine_*`, labelled with the engine and its model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """One sample of each metric."""
        settings = self._engine.settings
        labels, values = ["engine", "model"], [settings.name, settings.model]
        for name, value in asdict(self._engine.counters).items():
            counter = CounterMetricFamily(
                f"plait_engine_{name.replace('_s', '_seconds')}", COUNTERS[name], labels=labels
            )
            counter.add_metric(values, value)
            yield counter
        state = self._engine.cache_state(self._engine.journal.cursor)
        gauges = {
            "calls_waiting": ("Calls in the queue", state.queue.waiting),
            "calls_running": ("Calls in the batch", state.queue.running),
            "kv_blocks": ("KV blocks", state.kv.total_blocks),
            "kv_blocks_free": ("KV blocks that hold nothing", state.kv.free_blocks),
            "kv_blocks_cached": ("KV blocks that hold a prefix and that no running call uses", state.kv.cached_blocks),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"plait_engine_{name}", text, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
        for name, (text, value) in {
            "running": ("Calls in the batch", state.queue.running),
            "waiting": ("Calls in the queue", state.queue.waiting),
        }.items():
            same = GaugeMetricFamily(f"vllm:num_requests_{name}", f"{text}, under vLLM's name", labels=["model_name"])
            same.add_metric([settings.model], value)
            yield same
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache, under vLLM's names", labels=["block_size", "num_gpu_blocks"]
        )
        cache.add_metric([str(settings.block_tokens), str(state.kv.total_blocks)], 1)
        yield cache
