"""Engines whose KV blocks are smaller than the tree's, larger, or no multiple of it, two sizes behind one gateway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from e2e.real_engines.calls import send_at_once, send_singly, workload
from e2e.real_engines.engine import KV_TOKENS, EngineKind
from e2e.real_engines.findings import Findings
from e2e.real_engines.fleet import EngineFleet, new_gateway
from e2e.real_engines.reference import Reference
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS

CALLS: Final = 60
SET_TOKENS: Final = 3 * KV_TOKENS // 2
"""1.5 times what one engine holds. Both hold it."""
SIZES: Final = {"vllm": ((32, 544), (64, 128)), "sglang": ((16, 528), (64, 128))}
"""By kind: one pair of sizes for each run, the first for every one. vLLM on a CPU takes multiples of 32."""


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.nightly)])
def sized(  # noqa: PLR0917 - pytest's fixtures
    request: pytest.FixtureRequest, kind: EngineKind, reference: Reference, python: Path, model: Path, folder: Path
) -> Iterator[EngineFleet]:
    """Two engines, each named by its block size; only once the engines of `reference` have stopped."""
    assert reference.stock
    sizes = SIZES[kind.name][request.param]
    engines = {f"blocks-of-{size}": kind.plait(f"blocks-of-{size}", python, model, folder) for size in sizes}
    for size, engine in zip(sizes, engines.values(), strict=True):
        engine.add_flags(kind.block_flags(size))
    fleet = EngineFleet(new_gateway(f"gateway-{'-'.join(engines)}", engines, model, folder), engines)
    with ExitStack() as stack:
        fleet.start(stack)
        for size, engine in zip(sizes, engines.values(), strict=True):
            assert engine.cache_state().block_tokens == size
        yield fleet


@pytest.mark.parametrize("at_once", [1, 2])
def test_calls_find_what_was_predicted(sized: EngineFleet, kind: EngineKind, findings: Findings, at_once: int) -> None:
    calls = workload(None, SET_TOKENS, CALLS, seed=8 + at_once, sizes=kind.documents)
    if at_once == 1:
        answers = send_singly(sized.gateway, calls, before_each=sized.settle)
    else:
        answers = send_at_once(sized.gateway, calls, at_once)
    assert "degraded" not in sized.gateway.get("/ready").json()
    assert {answer.engine for answer in answers} == set(sized.engines)
    assert sum(answer.cached_tokens > answer.prompt_tokens / 2 for answer in answers) > 0.2 * CALLS
    within = {name: max(TREE_BLOCK_TOKENS, one.cache_state().block_tokens) for name, one in sized.engines.items()}
    share = sum(answer.was_predicted_to(within[answer.engine]) for answer in answers) / len(answers)
    subject = f"share predicted, {' and '.join(sized.engines)}, {at_once} at a time"
    assert findings.at_least(subject, share, 0.98)
