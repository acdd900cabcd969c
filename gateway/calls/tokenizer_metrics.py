"""Prometheus metrics of tokenizers: whether texts are encoded natively, and what comparing the ids has shown."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from plait.backends.tokenization.file_tokenizer import FileTokenizer
from plait.gateway.calls.model_tokenizers import ModelTokenizers


class TokenizerCollector(Collector):
    """The tokenizers that are loaded from files, by model, read when scraped."""

    def __init__(self, tokenizers: ModelTokenizers) -> None:
        self._tokenizers = tokenizers

    def collect(self) -> Iterator[Metric]:
        native = GaugeMetricFamily(
            "plait_tokenizer_native", "1 while texts are encoded by fastokens, 0 by tokenizers", labels=["model"]
        )
        equal = CounterMetricFamily(
            "plait_tokenizer_equal_prompts", "Prompts that had the same ids in both ways", labels=["model"]
        )
        different = CounterMetricFamily(
            "plait_tokenizer_differences",
            "Texts that the native encoder failed or gave other ids, which ends it",
            labels=["model"],
        )
        for model, encoder in list(self._tokenizers.encoders.items()):
            if isinstance(encoder.tokenizer, FileTokenizer):
                checked = encoder.tokenizer.encoder
                native.add_metric([model], checked.is_native)
                equal.add_metric([model], checked.equal)
                different.add_metric([model], checked.differences)
        yield from (native, equal, different)
