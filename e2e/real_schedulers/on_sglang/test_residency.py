"""What a waiting call is known to find, where it depends on SGLang's radix cache."""

from __future__ import annotations

from e2e.real_schedulers.built_engine import PAGE_TOKENS
from e2e.real_schedulers.on_sglang.engine import TREE_BLOCK_TOKENS
from e2e.real_schedulers.on_sglang.fixtures import Build


def test_a_waiting_call_finds_cached_what_is_reported(build: Build) -> None:
    engine = build()
    same = [position % 997 for position in range(300)]
    engine.add(same, 2)
    engine.run()
    name = engine.add([*same, 5], 1)
    assert engine.step() == {name: 301 - 300 // PAGE_TOKENS * PAGE_TOKENS}, "all whole pages are found"
    call = engine.requests[name].plait_call
    known = engine.planner.facts.stored_tokens(call)
    assert known == 300 // TREE_BLOCK_TOKENS * TREE_BLOCK_TOKENS, "of which the whole tree blocks are known"
