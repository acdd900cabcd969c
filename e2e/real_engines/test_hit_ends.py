"""What a gateway predicts of an engine with windows that tells where hits can end: real vLLM with the adapter, Gemma 3.

The first call on a prefix leaves no end within the prefix, the second shows the engine where prompts part, and from
then on the engine keeps what a hit needs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from e2e.real_engines.engine import EngineKind
from e2e.real_engines.findings import Findings
from e2e.real_engines.fleet import EngineFleet, new_gateway
from e2e.real_engines.test_estimates import AT_ONCE, OUTPUT_TOKENS, noted, prompts
from e2e.real_engines.token_calls import cached_share, near_share, placed, predicted_share
from e2e.tiny_model import tiny_gemma, tiny_model

CALLS: Final = 60
BLOCK_TOKENS: Final = 32
NEAR: Final = {512: 0.95, 4_096: 0.98}
"""The least share of calls predicted to a tree block, by the engine's blocks."""
ERROR: Final = {512: 0.05, 4_096: 0.02}
"""The most error of the cached share. While a call waits for 512 blocks, the prompt before it may evict its hit."""


@pytest.fixture(scope="module", params=NEAR)
def fleet(request: pytest.FixtureRequest, kind: EngineKind, python: Path, folder: Path) -> Iterator[EngineFleet]:
    """One engine with so many blocks."""
    if kind.name != "vllm":
        pytest.skip("serves no model with windows on a CPU")
    engine = kind.plait(f"gemma-{request.param}", python, tiny_gemma(), folder)
    engine.add_flags(("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(request.param)))
    by_name = {engine.name: engine}
    with ExitStack() as stack:
        fleet = EngineFleet(new_gateway(f"before-{engine.name}", by_name, tiny_model(), folder), by_name)
        fleet.start(stack)
        yield fleet


@pytest.mark.parametrize("prefixes", [8, *(pytest.param(n, marks=pytest.mark.nightly) for n in (4, 12, 16))])
def test_hits_are_predicted_where_they_can_end(fleet: EngineFleet, prefixes: int, findings: Findings) -> None:
    (engine,) = fleet.engines.values()
    state = engine.cache_state()
    assert state.ends is not None
    assert (state.ends.align_tokens, state.ends.interval_tokens, state.untold) == (BLOCK_TOKENS, 0, "")
    calls = placed(fleet.gateway, prompts(prefixes, CALLS), AT_ONCE, OUTPUT_TOKENS)
    noted(findings, f"{engine.name} tells, {prefixes} prefixes", calls)
    blocks, error = state.kv.total_blocks + 1, abs(predicted_share(calls) - cached_share(calls))
    near = findings.at_least(f"{engine.name}: share predicted", near_share(calls), NEAR[blocks])
    assert findings.at_most(f"{engine.name}: error of the cached share", error, ERROR[blocks])
    assert near
