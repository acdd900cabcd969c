"""Plait changes when a call is computed, never what."""

from __future__ import annotations

from e2e.real_engines.fleet import EngineFleet
from e2e.real_engines.greedy import REQUESTS, greedy_outputs
from e2e.real_engines.reference import Reference


def test_a_stock_engine_repeats_itself(reference: Reference) -> None:
    assert reference.stock[: len(REQUESTS)] == reference.stock[len(REQUESTS) :]
    assert len(set(reference.stock)) == len(REQUESTS), "else equal outputs would mean little"


def test_an_engine_with_plait_says_what_a_stock_one_says(reference: Reference, fleet: EngineFleet) -> None:
    assert greedy_outputs(fleet.engines["engine-1"]) == reference.stock


def test_annotated_calls_through_the_gateway_say_the_same(reference: Reference, fleet: EngineFleet) -> None:
    headers = {"plait-slo-ttft-ms": "1000", "plait-slo-tpot-ms": "100", "plait-objective": "latency"}
    assert greedy_outputs(fleet.engines["engine-1"], fleet.gateway, headers) == reference.stock


def test_neither_preemption_nor_other_chunks_change_a_token(reference: Reference) -> None:
    assert reference.preemptions >= len(REQUESTS), "every call runs for several times the iterations between two"
    assert reference.forced == reference.stock
