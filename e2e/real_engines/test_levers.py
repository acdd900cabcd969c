"""The local scheduler's levers, pulled by force, move a real engine."""

from __future__ import annotations

from e2e.real_engines.reference import FORCED_LEVERS, Reference


def test_the_budget_bounds_iterations(reference: Reference) -> None:
    assert reference.iterations.budget_tokens == FORCED_LEVERS["budget_tokens"]


def test_prompts_are_cut_into_chunks(reference: Reference) -> None:
    assert 0 < reference.iterations.mean_chunk_tokens <= int(FORCED_LEVERS["chunk_tokens"])


def test_running_calls_are_preempted(reference: Reference) -> None:
    assert reference.preemptions > 0


def test_waiting_calls_are_admitted_in_the_schedulers_order(reference: Reference) -> None:
    assert reference.completed == "ADCB"


def test_iterations_are_planned_while_the_one_before_is_computed(reference: Reference) -> None:
    """As on a GPU: vLLM's asynchronous scheduling, SGLang's overlap."""
    assert reference.ahead
