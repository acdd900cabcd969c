"""The load ledger against the plain list of its entries."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.costs.load import LedgerEntry, LoadLedger
from plait.policy.prefix.prefix_tree import PrefixTree
from tests.examples import examples
from tests.invariants import check

# 1 ms a token, and 1 us for each token of the sequence it attends to.
COSTS = CostModel(PiecewiseLinear(((0, 0.0),), 1e-3), 0.0, 1e-6, 0.0, LongAttention())
LEAF = PrefixTree().root


@dataclass(eq=False)
class Known:
    booked_s: float
    prompt: int
    missed: int
    output: int | None = None


class Ledger(RuleBasedStateMachine):
    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = LoadLedger(COSTS, window_s=10.0, prior_output_tokens=50)
        self.known: dict[LedgerEntry, Known] = {}
        self.now_s = 0.0

    @rule(target=entries, prompt=st.integers(0, 5000), share=st.floats(0, 1))
    def book(self, prompt: int, share: float) -> LedgerEntry:
        entry = self.ledger.book(LEAF, int(prompt * share), prompt, self.now_s)
        self.known[entry] = Known(self.now_s, prompt, int(prompt * share))
        return entry

    @rule(entry=consumes(entries), share=st.floats(0, 1), output=st.integers(0, 500))
    def settle(self, entry: LedgerEntry, share: float, output: int) -> None:
        missed = int(entry.prompt_tokens * share)
        self.ledger.settle(entry, missed, output)
        if entry in self.known:
            self.known[entry].missed, self.known[entry].output = missed, output

    @rule(entry=consumes(entries))
    def cancel(self, entry: LedgerEntry) -> None:
        assert self.ledger.cancel(entry) == (self.known.pop(entry, None) is not None)
        assert not self.ledger.cancel(entry)

    @rule(seconds=st.floats(0, 6))
    def age(self, seconds: float) -> None:
        self.now_s += seconds
        aged = self.ledger.age(self.now_s)
        assert aged == [entry for entry, known in self.known.items() if known.booked_s < self.now_s - 10.0]
        for entry in aged:
            del self.known[entry]

    @invariant()
    def reads_as_if_computed_afresh(self) -> None:
        check(self.ledger)
        known = self.known.values()
        outputs = [call.output for call in known if call.output is not None]
        mean = sum(outputs) / len(outputs) if outputs else 50.0
        prefill_s = sum(COSTS.prefill_time_s(call.missed, call.prompt - call.missed) for call in known)
        decode_s = sum(COSTS.decode_time_s(mean, call.prompt) for call in known)
        assert len(self.ledger) == len(self.known)
        assert self.ledger.mean_output_tokens == pytest.approx(mean)
        assert self.ledger.window_cost_s() == pytest.approx(prefill_s + decode_s, abs=1e-9)
        assert self.ledger.decode_s() == pytest.approx(decode_s, abs=1e-9)


Ledger.TestCase.settings = settings(deadline=None, max_examples=examples(60), stateful_step_count=30)
TestLedger = Ledger.TestCase


def test_an_idle_engine_costs_nothing() -> None:
    ledger = LoadLedger(COSTS)
    assert (ledger.window_cost_s(), ledger.decode_s(), ledger.mean_output_tokens) == (0.0, 0.0, 128.0)


def test_real_lengths_replace_predicted_ones() -> None:
    ledger = LoadLedger(COSTS, prior_output_tokens=0)
    first, second = (ledger.book(LEAF, 1000, 1000, 0.0) for _ in range(2))
    assert ledger.window_cost_s() == pytest.approx(2 * (1.0 + 0.001))
    ledger.settle(first, 200, 100)  # both are expected to generate 100 from now on
    decode_s = 100 * (1e-3 + 1e-6 * 1050)
    assert ledger.window_cost_s() == pytest.approx((0.2 + 0.001) + (1.0 + 0.001) + 2 * decode_s)
    assert ledger.decode_s() == pytest.approx(2 * decode_s)
    assert ledger.cancel(second)
    assert len(ledger) == 1


def test_a_call_is_in_the_window_until_it_is_older_than_h() -> None:
    ledger = LoadLedger(COSTS, window_s=180.0)
    entry = ledger.book(LEAF, 10, 10, 20.0)
    assert ledger.age(200.0) == []
    assert ledger.age(200.5) == [entry]
    ledger.settle(entry, 5, 5)
    assert not ledger.cancel(entry)
    assert ledger.window_cost_s() == 0.0


def test_settling_twice_is_a_mistake() -> None:
    ledger = LoadLedger(COSTS)
    entry = ledger.book(LEAF, 10, 10, 0.0)
    ledger.settle(entry, 5, 5)
    with pytest.raises(AssertionError, match="settled once"):
        ledger.settle(entry, 5, 5)


def test_an_engine_that_counts_more_prompt_tokens_than_were_booked_costs_what_it_computed() -> None:
    ledger = LoadLedger(COSTS, prior_output_tokens=0)
    ledger.settle(ledger.book(LEAF, 100, 100, 0.0), 150, 0)
    assert ledger.window_cost_s() == pytest.approx(0.150 + 150e-6)
