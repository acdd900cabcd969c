"""Whose call it is, as agents, SDKs and other routers say it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.protocol.openai import ChatRequest
from plait.gateway.asgi import Headers
from plait.gateway.intake.agents import NOBODY, SESSION_HEADERS, SOFTWARE, Agent, agent_of

RUN = "0b4e1a4e-run"
CONTEXT = {"task_id": RUN, "session_id": "s", "program_id": "p", "parent_program_id": "q", "expected_resume": True}

SAID: dict[str, tuple[dict[str, str], Agent]] = {
    "Claude Code": ({"x-claude-code-session-id": RUN}, Agent(RUN, RUN)),
    "Claude Code's subagent": (
        {"x-claude-code-session-id": RUN, "x-claude-code-agent-id": "a"},
        Agent(f"{RUN}/a", RUN, RUN),
    ),
    "Claude Code's subagent of a subagent": (
        {"x-claude-code-session-id": RUN, "x-claude-code-agent-id": "b", "x-claude-code-parent-agent-id": "a"},
        Agent(f"{RUN}/b", RUN, f"{RUN}/a"),
    ),
    "Codex": ({"session-id": RUN, "thread-id": RUN}, Agent(RUN, RUN)),
    "Codex's subagent": (
        {"session-id": RUN, "thread-id": "t", "x-codex-parent-thread-id": RUN},
        Agent(f"{RUN}/t", RUN, RUN),
    ),
    "Codex's subagent of a subagent": (
        {"session-id": RUN, "thread-id": "u", "x-codex-parent-thread-id": "t"},
        Agent(f"{RUN}/u", RUN, f"{RUN}/t"),
    ),
    "Codex without a session": ({"thread-id": "t", "x-codex-parent-thread-id": RUN}, Agent("t", RUN, RUN)),
    "an older Codex": ({"session_id": RUN}, Agent(RUN, RUN)),
    "a still older Codex": ({"conversation_id": RUN, "session_id": RUN}, Agent(RUN, RUN)),
    "OpenCode": (
        {"x-opencode-session-id": RUN, "x-session-id": RUN, "x-session-affinity": RUN},
        Agent(RUN, RUN),
    ),
    "OpenCode's subagent": (
        {"x-session-affinity": "c", "x-session-id": "c", "x-parent-session-id": RUN},
        Agent("c", RUN, RUN),
    ),
    "OpenCode 2's subagent": (
        {
            "x-session-affinity": RUN, "x-session-id": RUN, "x-opencode-session": RUN, "x-parent-session-id": RUN,
            "x-opencode-session-id": "c", "x-opencode-parent-session-id": RUN,
        },
        Agent("c", RUN, RUN),
    ),
    "an older OpenCode": ({"x-opencode-session": RUN}, Agent(RUN, RUN)),
    "Dynamo": ({"x-dynamo-session-id": RUN}, Agent(RUN, RUN)),
    "Dynamo's child": (
        {"x-dynamo-session-id": "d", "x-dynamo-parent-session-id": RUN},
        Agent("d", RUN, RUN),
    ),
    "the end of one of Dynamo's": (
        {"x-dynamo-session-id": RUN, "x-dynamo-session-final": "True"},
        Agent(RUN, RUN, is_final=True),
    ),
    "no end": ({"x-dynamo-session-id": RUN, "x-dynamo-session-final": "false"}, Agent(RUN, RUN)),
    "the end of an agent's own session": (
        {"x-claude-code-session-id": RUN, "x-claude-code-agent-id": "a", "x-dynamo-session-final": "true"},
        Agent(f"{RUN}/a", RUN, RUN, is_final=True),
    ),
    "Claude Code to Dynamo": (
        {"x-claude-code-session-id": "other", "x-dynamo-session-id": RUN},
        Agent(RUN, RUN),
    ),
    "llm-d": ({"x-llm-d-inference-fairness-id": RUN}, Agent(run=RUN)),
    "llm-d's old and new name": (
        {"x-gateway-inference-fairness-id": "old", "x-llm-d-inference-fairness-id": RUN, "x-session-id": "c"},
        Agent("c", RUN),
    ),
    "a parent without a child": ({"x-codex-parent-thread-id": RUN}, NOBODY),
}  # fmt: skip


def headers(given: dict[str, str]) -> Headers:
    return [(b"accept", b"*/*"), *((name.encode(), value.encode()) for name, value in given.items())]


def said(given: Headers = (), **fields: Any) -> tuple[str, Agent]:
    return agent_of(given, ChatRequest(messages=[], **fields))


@pytest.mark.parametrize("who", SAID)
def test_an_agent_its_run_and_its_parent(who: str) -> None:
    given, agent = SAID[who]
    assert said(headers(given)) == said(headers(given)[::-1]) == (agent.name, agent)
    assert said(headers(given), user="someone") == (agent.name or "someone", agent)


def test_all_names_of_the_table_are_tried() -> None:
    tried = {name for given, _ in SAID.values() for name in given}
    assert {name.encode() for name in tried} == {name for name in SESSION_HEADERS if b"." not in name}


@pytest.mark.parametrize("form", [dict, json.dumps])
@pytest.mark.parametrize(
    ("fields", "agent"),
    [
        (CONTEXT, Agent(f"{RUN}/p", RUN, f"{RUN}/q")),
        ({"session_id": RUN, "agent_id": "a", "parent_agent_id": "b"}, Agent(f"{RUN}/a", RUN, f"{RUN}/b")),
        ({"session_id": RUN, "agent_id": 7}, Agent(f"{RUN}/7", RUN, RUN)),
        ({"program_id": "p", "parent_program_id": RUN}, Agent("p", RUN, RUN)),
        ({"program_id": RUN}, Agent(RUN, RUN)),
    ],
)
def test_the_context_of_a_router_goes_before_headers(form: Any, fields: dict[str, Any], agent: Agent) -> None:
    xargs = {"agentic_context": form(fields), "another": 1.0}
    assert said(headers({"x-session-id": "x"}), vllm_xargs=xargs) == (agent.name, agent)


@pytest.mark.parametrize(
    "context", [None, "", "{", "[" * 10_000, "\ud800", "7", 7, [], {}, {"task_id": ["a"]}, {"x": 1}]
)
def test_a_context_that_is_none_is_ignored(context: Any) -> None:
    xargs = {"agentic_context": context}
    assert said(vllm_xargs=xargs) == ("", NOBODY)
    assert said(headers({"x-session-id": "x"}), vllm_xargs=xargs) == ("x", Agent("x", "x"))


def test_sdks_send_a_field() -> None:
    assert said(user="u", prompt_cache_key="k", safety_identifier="s") == ("k", NOBODY)
    assert said(user="u", safety_identifier="s") == ("s", NOBODY)
    assert said(user="u") == ("u", NOBODY)


@pytest.mark.parametrize(
    "fields",
    [
        *({}, {"user": 5}, {"user": ""}, {"user": "x" * 300}, {"prompt_cache_key": ["k"]}),
        *({"user": "x\0"}, {"prompt_cache_key": "k\n"}, {"safety_identifier": "\ud800"}),
    ],
)
def test_what_is_no_name_is_none(fields: dict[str, Any]) -> None:
    wrong = [(b"session-id", b""), (b"x-session-id", b"x" * 300), (b"session_id", b"a\tb"), (b"thread-id", b"\0")]
    assert said(wrong, **fields) == ("", NOBODY)
    assert said([*wrong, (b"x-session-id", b"y"), (b"x-session-id", b"z")], **fields) == ("y", Agent("y", "y"))


@given(
    st.sampled_from([software for software in SOFTWARE if "." not in software.agent]),
    st.lists(st.text(st.characters(codec="latin-1", exclude_categories=["C"]), min_size=1), max_size=8, unique=True),
)
def test_agents_of_a_run_have_one_run_and_contexts_of_their_own(software: Any, names: list[str]) -> None:
    """Two runs of a tenant never share a context, whatever a run calls its agents."""
    agents: dict[str, list[Agent]] = {}
    for run in ("r", "s"):
        for name in names:
            given = {
                software.agent.split()[0]: name if software.run else f"{run}-{name}",
                software.parent.split()[0]: run,
            }
            given |= {software.run.split()[0]: run} if software.run else {}
            raw = [(key.encode(), value.encode("latin-1")) for key, value in given.items()]
            agents.setdefault(run, []).append(said(raw)[1])
    for run, found in agents.items():
        assert {agent.run for agent in found} <= {run}
        assert len({agent.name for agent in found}) == len(found)
    assert not {agent.name for agent in agents.get("r", [])} & {agent.name for agent in agents.get("s", [])}
