"""How a plan becomes the state of one prefill pass, where SGLang can have only one prompt in chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from plait.backends.sglang.calls import SglangCall
from plait.backends.sglang.levers import SglangLevers, levers_of
from plait.policy.scheduling.plan import Plan

PAGE_TOKENS = 16


def call(name: str, tokens: int, *, computed: int = 0, waits: bool = True) -> SglangCall:
    made = SglangCall(name, 0.0, tokens, order=(0.0, 0), received_s=0.0, tree_blocks=(), waits=waits)
    made.computed_tokens = computed
    return made


def levers(picks: list[tuple[SglangCall, int]], in_chunks: SglangCall) -> SglangLevers:
    facts = cast("Any", SimpleNamespace(max_batch_tokens=64, cached_tokens=lambda _: 0))
    return levers_of(Plan(preempt=(), picks=tuple(picks)), in_chunks, facts, PAGE_TOKENS)


def test_the_prompt_in_chunks_is_held_back_for_one_that_fits() -> None:
    made = levers([(call("urgent", 48), 48)], call("long", 256, computed=96, waits=False))
    assert (made.goes_on, made.limits.may_cut) == (False, False)


def test_the_prompt_in_chunks_goes_on_if_the_other_would_have_to_be_cut() -> None:
    made = levers([(call("urgent", 207), 64)], call("long", 256, computed=96, waits=False))
    assert (made.goes_on, made.limits.may_cut, made.prompt_tokens) == (True, True, 64)
