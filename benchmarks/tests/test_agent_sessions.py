"""Agents beside chat: a cap lets in as many sessions as fit, and the report has a row for each system."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.agent_sessions import Task, new_runner, report
from benchmarks.holding.closed_loop import Chat, ClosedLoop, Condition
from benchmarks.holding.conditions import DEMANDS, FULL, GROUPS, Wanted, chat_beside
from benchmarks.placing.workloads import AGENTS_FILE, AgentShape

CONTEXT_TOKENS = 6_400
SMALL = Condition(
    engines=1,
    kv_tokens=20_000,
    sessions=6,
    at_a_time=6,
    shape=AgentShape(scale=1, context_tokens=10_000, turns=3, think_s=100.0),
    profile="a6000-mistral-7b",
    chat=Chat(per_s=0.2, prompt_tokens=200, answer_tokens=10),
)
"""Three sessions fit into the KV."""


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """One session of three turns, with the same context in each."""
    turn = {"type": "n", "in": CONTEXT_TOKENS, "out": 20, "think_s": 100.0, "blocks": [[1, 100]]}
    (tmp_path / AGENTS_FILE).write_text(json.dumps({"block_tokens": 64, "requests": [turn] * 3}) + "\n")
    return tmp_path


def took_s(traces: Path, condition: Condition, *, cap: bool) -> list[float]:
    """Each session's time in a run, over that of the first."""
    sessions_s = ClosedLoop(traces, condition, 1, gate=False, cap=cap).run().sessions_s
    return [round(one / sessions_s[0], 1) for one in sessions_s]


def test_a_cap_lets_in_as_many_sessions_as_fit_and_waiting_counts_in_a_session(traces: Path) -> None:
    assert max(took_s(traces, SMALL, cap=False)) < 1.2
    first, last = took_s(traces, SMALL, cap=True)[:3], took_s(traces, SMALL, cap=True)[3:]
    assert max(first) < 1.2
    assert min(last) > 1.7
    alone = took_s(traces, replace(SMALL, kv_tokens=6_600), cap=True)
    assert all(after > before + 0.8 for before, after in pairwise(alone))


def test_each_system_has_a_row(traces: Path) -> None:
    roomy = replace(SMALL, kv_tokens=60_000)
    row = new_runner(traces)(Task("small", roomy, 1, "plait", with_cap=True))
    made = report([row], {"small": Wanted(chat=2.0, chat_over_cap=0.01)})
    assert [found["system"] for found in made.results] == ["without", "capped", "held"]
    assert all(found["chat_ttft_s"] > 0 for found in made.results)
    assert [claim.name for claim in made.claims] == ["chat, small", "chat_over_cap, small"]
    assert [claim.fails for claim in made.claims] == [False, False]
    assert "finds" in made.claims[1].excused
    assert new_runner(traces)(Task("small", replace(roomy, chat=None), 1, "plait", with_cap=True)).capped is None


def test_the_row_of_the_mission_is_among_the_demands() -> None:
    name = chat_beside(FULL)
    assert list(GROUPS["demand"]) == [chat_beside(share) for share in DEMANDS]
    assert GROUPS["demand"][name] == GROUPS["full"][name]
