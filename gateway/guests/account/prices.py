"""What a call has used, and what that costs, in whole numbers of 1e-9 of the currency."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, Self

from plait.gateway.calls.routes import CHAT_PATH
from plait.gateway.config.sections import ModelConfig, PriceConfig

UNIT: Final = 1_000_000_000
"""So many make 1 of the currency."""

A_MILLION: Final = 1_000_000


class Used(NamedTuple):
    """The tokens of one call. `cached` is the part of `prompt` that the engine had. `is_estimated`: it did not say."""

    prompt: int
    cached: int
    output: int
    is_estimated: bool = False


class Price(NamedTuple):
    """The price of a million tokens, in 1e-9 of the currency."""

    input: int
    cached: int
    output: int

    @classmethod
    def of(cls, config: PriceConfig) -> Self:
        cached = config.input if config.cached is None else config.cached
        return cls(*(round(price * UNIT) for price in (config.input, cached, config.output)))

    def cost(self, prompt: int, cached: int, output: int) -> int:
        """Rounded half up."""
        whole = (prompt - cached) * self.input + cached * self.cached + output * self.output
        return (2 * whole + A_MILLION) // (2 * A_MILLION)


def prices_of(models: Iterable[ModelConfig]) -> dict[str, Price]:
    """By the name of the model."""
    return {model.name: Price.of(model.price) for model in models if model.price is not None}


def used_by(
    path: str, outcome: str, prompt_tokens: int, passed_tokens: int, usage: tuple[int, int, int | None] | None
) -> Used | None:
    """What an ended call has used; None: its client got nothing.

    A call that was cut has used its prompt and what was passed on: by the engine's last usage, or else a token for each
    event of the stream, of which a chat's first has none. Without a usage, the prompt has `prompt_tokens`.
    """
    if outcome != "ok" and not passed_tokens:
        return None
    if usage is not None:
        return Used(usage[0], usage[2] or 0, usage[1])
    return Used(prompt_tokens, 0, max(0, passed_tokens - (path == CHAT_PATH)), is_estimated=True)
