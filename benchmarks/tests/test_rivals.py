"""Placement of other gateways, case by case. A letter is a block of a prompt, with 10 tokens."""

from __future__ import annotations

from benchmarks.placing.rivals import kv_aware
from tests.policy.placement.test_policies import Engine, build, call_of


def test_kv_aware_takes_the_longest_prefix_whatever_the_load() -> None:
    call = call_of("xyz", 1)
    engines = {"a": Engine(resident=("xy",), outstanding=90), "b": Engine(resident=("x",)), "c": Engine()}
    placement = kv_aware(call, build(engines, call))
    assert placement.engine_id == "a"


def test_kv_aware_takes_the_least_loaded_if_none_has_a_block() -> None:
    call = call_of("xyz", 1)
    engines = {"a": Engine(outstanding=3), "b": Engine(outstanding=2), "c": Engine(outstanding=3)}
    assert kv_aware(call, build(engines, call)).engine_id == "b"
