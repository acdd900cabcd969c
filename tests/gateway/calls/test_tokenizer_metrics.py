"""The metrics say which tokenizers are encoded natively, and whether a difference was found."""

from __future__ import annotations

from array import array

from prometheus_client import CollectorRegistry

from plait.backends.tokenization.checked_encoder import CheckedEncoder
from plait.backends.tokenization.file_tokenizer import EmbeddedTokenizer
from plait.gateway.calls.model_tokenizers import ModelTokenizers
from plait.gateway.calls.tokenizer_metrics import TokenizerCollector
from plait.gateway.config.sections import Config, ModelConfig
from tests.gateway.exposed import samples


def test_a_difference_is_counted_and_ends_the_native_encoder() -> None:
    models = (ModelConfig(name="m", tokenizer="embedded"), ModelConfig(name="guessed", tokenizer="estimated"))
    tokenizers = ModelTokenizers(Config(models=models), 64, str)
    tokenizer = EmbeddedTokenizer()  # the shipped one is shared
    tokenizers.learn("m", "embedded", tokenizer, None)
    ids = iter(([array("I", [1])], [array("I", [2])]))
    tokenizer.__dict__["encoder"] = encoder = CheckedEncoder("m", lambda _: [array("I", [1])], lambda _: next(ids))
    registry = CollectorRegistry()
    registry.register(TokenizerCollector(tokenizers))

    def found() -> list[float | None]:
        names = ("native", "equal_prompts_total", "differences_total")
        return [samples(registry).get(f'plait_tokenizer_{name}{{model="m"}}') for name in names]

    encoder.encode(["a"])
    assert found() == [1, 1, 0]
    encoder.encode(["b"])
    assert found() == [0, 1, 1]
    assert not any("guessed" in name for name in samples(registry))
