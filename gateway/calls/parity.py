"""Parity: do engines find in their caches what the gateway predicts? If not, placement is blind, and says so.

The gateway predicts from its own token ids. If those are not the engine's, blocks never match.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from plait.gateway.fleet.booking import CallUsage

MEMORY_S = 300.0
"""Calls are forgotten over about five minutes."""

LEAST_TOKENS = 50_000.0
"""Nothing is said of fewer prompt tokens: a call that met an eviction is no drift."""

DRIFT = 0.2
"""The share of prompt tokens from which a wrong prediction is a drift. Engines that agree are below 0.03."""

TELL_INTERVAL_S = 300.0

CAUSES = (
    "the usual causes: the gateway's chat template or tokenizer differs from the engine's ([[models]] tokenizer, "
    "chat_template), a cache salt that only one of them applies, a LoRA adapter behind the same name, an engine "
    "without prefix caching"
)

log = structlog.get_logger(__name__)


class _Drift:
    """Decayed sums of one engine's calls for one model."""

    __slots__ = ("_at_s", "_prompt_tokens", "_wrong_tokens", "told_s")

    def __init__(self) -> None:
        self._prompt_tokens = 0.0
        self._wrong_tokens = 0.0
        self._at_s = 0.0
        self.told_s: float | None = None

    def add(self, prompt_tokens: int, wrong_tokens: int, now_s: float) -> None:
        """A call ended."""
        kept = exp((self._at_s - now_s) / MEMORY_S) if self._prompt_tokens else 0.0
        self._prompt_tokens = self._prompt_tokens * kept + prompt_tokens
        self._wrong_tokens = self._wrong_tokens * kept + wrong_tokens
        self._at_s = now_s

    @property
    def share(self) -> float:
        """The wrongly predicted share of the prompt tokens."""
        return self._wrong_tokens / self._prompt_tokens if self._prompt_tokens else 0.0

    @property
    def is_drift(self) -> bool:
        """Whether that is too much, of enough tokens."""
        return self._prompt_tokens >= LEAST_TOKENS and self.share >= DRIFT


class Parity(Collector):
    """Compares predicted with reported cached tokens, by model and engine."""

    def __init__(self) -> None:
        self._drifts: dict[tuple[str, str], _Drift] = {}

    def observe(self, model: str, engine_id: str, predicted_tokens: int, usage: CallUsage, now_s: float) -> None:
        """A call ended whose engine says how much of the prompt was cached. Logs a drift, every five minutes."""
        assert usage.cached_tokens is not None
        drift = self._drifts.get((model, engine_id))
        if drift is None:
            drift = self._drifts[model, engine_id] = _Drift()
        drift.add(usage.prompt_tokens, abs(predicted_tokens - usage.cached_tokens), now_s)
        if drift.is_drift and (drift.told_s is None or now_s - drift.told_s >= TELL_INTERVAL_S):
            drift.told_s = now_s
            log.warning(
                "cached tokens are not as predicted",
                model=model,
                engine=engine_id,
                wrong_share=round(drift.share, 3),
                predicted_tokens=predicted_tokens,
                reported_tokens=usage.cached_tokens,
                hint=CAUSES,
            )

    def collect(self) -> Iterator[Metric]:
        """The share of prompt tokens whose caching was predicted wrongly over the last minutes."""
        gauge = GaugeMetricFamily(
            "plait_cache_drift",
            "Share of prompt tokens whose caching was predicted wrongly",
            labels=["model", "engine"],
        )
        for (model, engine_id), drift in self._drifts.items():
            gauge.add_metric([model, engine_id], drift.share)
        yield gauge
