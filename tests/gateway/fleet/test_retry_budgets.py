from __future__ import annotations

from collections import Counter

from plait.gateway.fleet.router import RetryBudgets
from tests.invariants import check_retries


def granted(budgets: RetryBudgets, model: str) -> int:
    """How many retries are granted until one is not."""
    count = 0
    while budgets.take(model):
        count += 1
    return count


def test_a_fifth_of_the_active_calls_may_be_retried_and_always_three() -> None:
    active = Counter[str]()
    budgets = RetryBudgets(active)
    assert granted(budgets, "m") == 3
    for _ in range(3):
        budgets.give_back("m")
    active["m"] = 99
    assert granted(budgets, "m") == 20, "the call that asks has left its engine, and counts"
    assert granted(budgets, "other") == 3, "each model has a budget of its own"
    budgets.give_back("m")
    assert granted(budgets, "m") == 1
    check_retries(budgets, 99)
