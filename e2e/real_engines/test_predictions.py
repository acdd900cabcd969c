"""The gateway's predictions of cached tokens (`plait-cached-tokens`), against what the engines find (`usage`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from openai import OpenAI

from e2e.real_engines.cache_changes import CacheChanges, following
from e2e.real_engines.calls import Answer, prompt_of, send_at_once, send_singly, workload
from e2e.real_engines.engine import KV_TOKENS, MODEL, EngineKind, RealEngine, stored_blocks
from e2e.real_engines.findings import Findings
from e2e.real_engines.fleet import EngineFleet
from e2e.server_process import eventually
from plait.backends.tokenization.loading import load_tokenizer
from plait.lab.simulation.workload import WorkloadCall
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, chain, root_hash

CALLS: Final = 300
EVICTING_SET_TOKENS: Final = 3 * KV_TOKENS
"""1.5 times what both engines hold: they keep evicting."""
FITTING_SET_TOKENS: Final = 3 * KV_TOKENS // 2
"""1.5 times what one engine holds."""
CONFIRMED_S: Final = 0.5
"""Longer than two reports take. All whole blocks of the tree that an ended call has count as cached until a report that
was requested after its end, also those in an engine's block that is not whole.
"""


@pytest.fixture(scope="module")
def calls(kind: EngineKind) -> list[WorkloadCall]:
    """Calls on built-in texts that keep the engines evicting."""
    return workload(None, EVICTING_SET_TOKENS, 7 * CALLS, seed=3, sizes=kind.documents)


def share_predicted(answers: Sequence[Answer]) -> float:
    """The share of calls whose cached tokens were predicted to a tree block."""
    return sum(answer.was_predicted for answer in answers) / len(answers)


def note(findings: Findings, subject: str, answers: Sequence[Answer]) -> None:
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    findings.figures[subject] = {
        "calls": len(answers),
        "prompt tokens": prompt_tokens,
        "found cached": sum(answer.cached_tokens for answer in answers) / prompt_tokens,
        "share predicted": share_predicted(answers),
        "predicted cached": sum(answer.predicted_tokens for answer in answers) / prompt_tokens,
    }


def removed_since(engine: RealEngine, cursor: int, epoch: str) -> int:
    """Blocks that an engine has evicted since, net."""
    return len(engine.cache_state(since=cursor, epoch=epoch).removed)


def test_calls_sent_singly(fleet: EngineFleet, calls: list[WorkloadCall], findings: Findings) -> None:
    """Each after the cache state has settled, while the engines have to evict."""
    fleet.settle()
    before = {name: engine.cache_state() for name, engine in fleet.engines.items()}
    answers = send_singly(fleet.gateway, calls[:CALLS], before_each=fleet.settle)
    note(findings, "calls sent singly", answers)
    for name, engine in fleet.engines.items():
        assert removed_since(engine, before[name].cursor, before[name].epoch) > 0
    hits = sum(answer.cached_tokens > answer.prompt_tokens / 2 for answer in answers)
    assert 0.3 * CALLS < hits < 0.97 * CALLS, "else there was little to predict"
    assert findings.at_least("share predicted of calls sent singly", share_predicted(answers), 0.99)


def test_calls_at_concurrency_8_after_eviction(fleet: EngineFleet, kind: EngineKind, findings: Findings) -> None:
    """From caches that have just lost all they had, which the gateway has to have noticed."""
    fleet.evict_all()
    fleet.settle()
    calls = workload(None, FITTING_SET_TOKENS, CALLS, seed=4, sizes=kind.documents)
    answers = send_at_once(fleet.gateway, calls, 8)
    note(findings, "calls at concurrency 8 after eviction", answers)
    assert findings.at_least("share predicted of calls at concurrency 8", share_predicted(answers), 0.95)


def has_changed(answer: Answer, prompt: Sequence[int], changes: CacheChanges) -> bool:
    """Whether the engine has stored or evicted a block of the prompt by which prediction and finding differ.

    It did so after the newest report that the gateway surely had, and before the call's first token.
    """
    blocks = list(chain(prompt, TREE_BLOCK_TOKENS, root_hash(MODEL)))
    first, end = sorted(tokens // TREE_BLOCK_TOKENS for tokens in (answer.predicted_tokens, answer.cached_tokens))
    since_s, until_s = answer.sent_s - CONFIRMED_S, answer.sent_s + answer.ttft_s
    return any(changes.has(block, since_s, until_s) for block in blocks[first:end])


def test_calls_at_concurrency_8_while_engines_evict(
    fleet: EngineFleet, kind: EngineKind, model: Path, calls: list[WorkloadCall], findings: Findings
) -> None:
    """What a call finds depends on what others store and evict between its placement and its start.

    How much that is depends on how long calls wait, so on the machine: the share predicted of 1,800 calls was .978 on
    an idle one, .969 on the same one with other tests beside. So wrong predictions count of blocks that stayed as they
    were. The share without them was .994.
    """
    fleet.settle()
    before = {name: engine.cache_state() for name, engine in fleet.engines.items()}
    with following(fleet.engines) as changes:
        answers = send_at_once(fleet.gateway, calls[CALLS:], 8)
    note(findings, "calls at concurrency 8 while engines evict", answers)
    for name, engine in fleet.engines.items():
        assert removed_since(engine, before[name].cursor, before[name].epoch) > 0
    tokenizer = load_tokenizer(str(model))
    wrong = [
        answer
        for call, answer in zip(calls[CALLS:], answers, strict=True)
        if not answer.was_predicted
        and not has_changed(answer, prompt_of(call, tokenizer, kind), changes[answer.engine])
    ]
    share = 1 - len(wrong) / len(answers)
    assert findings.at_least("share predicted, of blocks that stayed, while engines evict", share, 0.98), wrong


def test_after_a_restart(fleet: EngineFleet, calls: list[WorkloadCall], findings: Findings) -> None:
    """An engine that dies and comes back empty: a new epoch, its residency dropped, and predictions hold again."""
    gateway, engine = fleet.gateway, fleet.engines["engine-1"]
    fleet.settle()
    old = engine.cache_state()
    assert gateway.metric("plait_engine_resident_tokens", engine="engine-1") > 0
    engine.kill()
    eventually(lambda: gateway.metric("plait_engine_up", engine="engine-1") == 0)
    (answer,) = send_singly(gateway, calls[:1], before_each=lambda: None)
    assert answer.engine == "engine-2"

    engine.start()
    engine.wait_until_ready()
    eventually(lambda: gateway.metric("plait_engine_up", engine="engine-1") == 1)
    new = engine.cache_state(since=old.cursor, epoch=old.epoch)
    assert new.epoch != old.epoch
    assert new.snapshot
    assert stored_blocks(new) == []
    eventually(lambda: gateway.metric("plait_engine_resident_tokens", engine="engine-1") == 0)

    answers = send_singly(gateway, calls[: CALLS // 3], before_each=fleet.settle)
    note(findings, "calls after a restart", answers)
    assert {answer.engine for answer in answers} == set(fleet.engines)
    assert findings.at_least("share predicted of calls after a restart", share_predicted(answers), 0.99)


def test_cache_salts_keep_prompts_apart(fleet: EngineFleet, client: OpenAI) -> None:
    prompt = [7, *range(10, 600)]

    def ask(salt: str) -> tuple[int, int]:
        fleet.settle()
        time.sleep(CONFIRMED_S)
        raw = client.completions.with_raw_response.create(
            model=MODEL, prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt}
        )
        usage = raw.parse().usage
        assert usage is not None
        details = usage.prompt_tokens_details
        return int(raw.headers["plait-cached-tokens"]), (details and details.cached_tokens) or 0

    assert ask("one") == (0, 0)
    assert ask("another") == (0, 0)
    predicted, found = ask("one")
    assert 0 < predicted <= found < predicted + TREE_BLOCK_TOKENS
