"""Agents on two real engines: a turn finds what the turns before it computed and generated, and that is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from e2e.real_engines.agents import TRACE, ask, load_trajectories, possible_tokens, repeated_tokens, run_agents
from e2e.real_engines.engine import EngineKind
from e2e.real_engines.findings import Findings
from e2e.real_engines.fleet import EngineFleet, new_gateway
from e2e.sdk import sync_client
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS

CONCURRENCY: Final = 8


@pytest.mark.parametrize("prompts", ["token ids", "texts"])
def test_agents_find_what_one_infinite_cache_would_have(
    fleet: EngineFleet, kind: EngineKind, traces: Path, findings: Findings, prompts: str
) -> None:
    """Agents that keep token ids continue exactly what was generated. Those that keep a text have it encoded again."""
    if not (traces / TRACE).is_file():
        pytest.skip(f"there is no {TRACE} in {traces}")
    fleet.evict_all()
    fleet.settle()
    before = {name: engine.cache_state() for name, engine in fleet.engines.items()}
    agents = run_agents(
        fleet.gateway,
        load_trajectories(traces)[: kind.agent_examples + kind.agents],
        kind.agent_examples,
        CONCURRENCY,
        with_ids=prompts == "token ids",
    )
    for name, engine in fleet.engines.items():
        assert engine.cache_state(since=before[name].cursor, epoch=before[name].epoch).removed, (
            f"{name} evicted nothing"
        )

    turns = [turn for agent in agents for turn in agent]
    found = sum(turn.answer.cached_tokens for turn in turns)
    repeated, generated = map(sum, zip(*map(repeated_tokens, agents), strict=True))
    predicted = sum(turn.answer.was_predicted for turn in turns) / len(turns)
    findings.figures[f"agents with {prompts}, {CONCURRENCY} at a time"] = {
        "calls": len(turns),
        "prompt tokens": sum(turn.answer.prompt_tokens for turn in turns),
        "found cached": found / sum(turn.answer.prompt_tokens for turn in turns),
        "generated tokens in the next prompt": repeated / generated,
        "share predicted": predicted,
    }
    possible = found / possible_tokens(turns, kind.block_tokens)
    assert findings.at_least(f"agents with {prompts}: hits / hits of one infinite cache", possible, 0.9)
    assert findings.at_least(f"share predicted of agents with {prompts}", predicted, 0.97)


@pytest.fixture
def one_engine(fleet: EngineFleet, model: Path, folder: Path) -> Iterator[EngineFleet]:
    """One of the engines behind a gateway of its own."""
    name, engine = next(iter(fleet.engines.items()))
    alone = EngineFleet(new_gateway("one-engine", {name: engine}, model, folder), {name: engine})
    with ExitStack() as stack:
        alone.start_gateway(stack)
        yield alone


def test_a_turn_that_comes_at_once_finds_what_was_generated(one_engine: EngineFleet, kind: EngineKind) -> None:
    """The engine reports blocks as they fill or as a call ends. The gateway knows them without reading the answer.

    A report may come a moment after the answer that it is about, so not every turn that comes at once is predicted.
    With two engines, the one that has the blocks may be the slower one, and a prompt of few blocks goes to the other.
    """
    prompt, block_tokens = [5, *range(10, 200)], max(TREE_BLOCK_TOKENS, kind.block_tokens)
    predicted = []
    one_engine.settle()
    with sync_client(one_engine.gateway) as client:
        for _ in range(12):
            turn, _ = ask(client, "agent", prompt, 3 * TREE_BLOCK_TOKENS)
            prompt = [*turn.prompt_ids, *turn.output_ids, 7, 8, 9]
            at_once, _ = ask(client, "agent", prompt, 1)
            one_engine.settle()
            reported, _ = ask(client, "agent", prompt, 1)
            stored = len(turn.prompt_ids) + len(turn.output_ids) - 1
            predicted.append(at_once.answer.was_predicted)
            assert reported.answer.was_predicted
            for following in (at_once, reported):
                assert following.answer.cached_tokens > stored - block_tokens, "generated tokens too"
            assert reported.answer.predicted_tokens >= stored - 2 * block_tokens
    assert sum(predicted) > len(predicted) / 2, "reports come with the end of a call, not a poll later"
