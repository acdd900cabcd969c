"""A run of several agents has as many turns as any other conversation of its tenant, whichever software runs it."""

from __future__ import annotations

from collections import Counter

import pytest

from plait.backends.protocol.openai import ChatRequest
from plait.gateway.admission.backlog import Waiting
from plait.gateway.intake.agents import Agent, agent_of
from tests.gateway.admission.waiting_fleet import WaitingFleet

AGENTS = 16

HARNESSES = {
    "Claude Code": ({"x-claude-code-session-id": "run"}, "x-claude-code-agent-id", ""),
    "Codex": ({"session-id": "run"}, "thread-id", "x-codex-parent-thread-id"),
    "OpenCode": ({}, "x-opencode-session-id", "x-opencode-parent-session-id"),
    "older OpenCode": ({}, "x-session-id", "x-parent-session-id"),
    "Dynamo": ({}, "x-dynamo-session-id", "x-dynamo-parent-session-id"),
    "llm-d": ({"x-llm-d-inference-fairness-id": "run"}, "x-session-id", ""),
    "vLLM router": ({"task_id": "run"}, "agent_id", "parent_agent_id"),
}


def agents(harness: str) -> list[Agent]:
    """The agents of a run: the first one and its subagents."""
    of_all, name, parent = HARNESSES[harness]
    found = []
    for number in range(AGENTS):
        said = {**of_all, name: f"a{number}" if number else "run", **({parent: "run"} if number and parent else {})}
        in_body = harness == "vLLM router"
        headers = [] if in_body else [(key.encode(), value.encode()) for key, value in said.items()]
        request = ChatRequest(messages=[], vllm_xargs={"agentic_context": said} if in_body else None)
        found.append(agent_of(headers, request)[1])
    return found


@pytest.mark.parametrize("harness", HARNESSES)
def test_sixteen_agents_and_another_conversation_take_turns(harness: str) -> None:
    fleet, of_run = WaitingFleet("one", is_busy=True), agents(harness)
    assert len({agent.name for agent in of_run}) == AGENTS, "each has a context of its own"
    asked: dict[Waiting, str] = {}
    for agent in of_run:
        asked[fleet.enter(session=agent.name, run=agent.run)] = "run"
    for _ in range(4):
        asked[fleet.enter(session="other")] = "other"
    sent = len(fleet.sent)
    assert {asked[call] for call in fleet.serve(sent)} == {"run"}, "nobody else was there"
    served = [asked[call] for call in fleet.serve(8)]
    assert Counter(served) == {"run": 4, "other": 4}
    assert all(served[place : place + 2].count("run") == 1 for place in range(0, 8, 2))


def test_the_run_that_crowds_others_out_loses_its_latest_call() -> None:
    """Sixteen agents are one conversation, too, where too much waits."""
    fleet = WaitingFleet("one", is_busy=True)
    fleet.enter(session="first")
    for agent in agents("Claude Code"):
        fleet.enter(session=agent.name, run=agent.run)
    for number in range(3):
        fleet.enter(session=f"other-{number}")
    assert fleet.admission.queue._conversations.largest("a") == {"run"}
