"""What a call has used, and what that costs."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.config.sections import ModelConfig, PriceConfig
from plait.gateway.guests.account.prices import Price, Used, prices_of, used_by

CHAT = "/v1/chat/completions"


def test_a_price_is_of_a_million_tokens() -> None:
    price = Price.of(PriceConfig(input=0.5, cached=0.05, output=1.5))
    assert price.cost(1_000_000, 0, 0) == 500_000_000
    assert price.cost(1_000_000, 1_000_000, 0) == 50_000_000
    assert price.cost(0, 0, 1_000_000) == 1_500_000_000


def test_cached_tokens_cost_as_others_if_nothing_is_said() -> None:
    price = Price.of(PriceConfig(input=0.0375, output=1.0))
    assert price.cost(3, 2, 0) == price.cost(3, 0, 0) == 113  # 112.5


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 1e6))
def test_a_cost_is_off_by_half_a_unit_at_most(prompt: int, cached: int, output: int, price: float) -> None:
    made, cached = Price.of(PriceConfig(input=price, output=price)), min(cached, prompt)
    exact = Fraction(prompt + output) * made.input / 10**6
    assert abs(made.cost(prompt, cached, output) - exact) <= Fraction(1, 2)


def test_only_models_with_a_price_have_one() -> None:
    models = [ModelConfig(name="free"), ModelConfig(name="paid", price=PriceConfig(input=1.0, output=2.0))]
    assert prices_of(models) == {"paid": Price(10**9, 10**9, 2 * 10**9)}


@pytest.mark.parametrize(
    ("path", "outcome", "passed", "usage", "used"),
    [
        (CHAT, "ok", 0, (7, 9, 4), Used(7, 4, 9)),
        (CHAT, "ok", 0, (7, 9, None), Used(7, 0, 9)),
        (CHAT, "client_gone", 0, None, None),
        (CHAT, "failed", 0, (7, 9, 4), None),
        (CHAT, "client_gone", 4, None, Used(12, 0, 3, is_estimated=True)),
        ("/v1/completions", "failed", 4, None, Used(12, 0, 4, is_estimated=True)),
        (CHAT, "refused", 4, (7, 3, None), Used(7, 0, 3)),
        ("/v1/embeddings", "ok", 0, None, Used(12, 0, 0, is_estimated=True)),
    ],
)
def test_what_was_passed_on_was_used(
    path: str, outcome: str, passed: int, usage: tuple[int, int, int | None] | None, used: Used | None
) -> None:
    assert used_by(path, outcome, 12, passed, usage) == used
