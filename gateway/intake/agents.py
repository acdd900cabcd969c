"""The agent that sends a call, and its run, as other software than Plait names them.

Contexts (the session gate, engines of pictures) go by the agent. Turns between a tenant's conversations go by the run,
on which several agents may work. A wrong name costs little, because nothing else depends on it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from plait.backends.protocol.openai import Request
from plait.gateway.asgi import NAME, Headers
from plait.gateway.ids import LABEL


class Software(NamedTuple):
    """Headers, and fields of `vllm_xargs` (with a dot). Of several in one place, the first that is given counts."""

    name: str
    seen: str
    """The version that has these names, or the month of its source."""
    run: str
    """Empty: an agent's run is its parent, or else the agent itself."""
    agent: str
    """Not given: the first agent of the run."""
    parent: str
    """Not given: the first agent of the run, if there is one."""
    end: str = ""
    """`true` in the agent's last request."""


SOFTWARE: Final = (
    Software("vLLM router", "2026-09", "agentic_context.task_id agentic_context.session_id",
             "agentic_context.program_id agentic_context.agent_id",
             "agentic_context.parent_program_id agentic_context.parent_id agentic_context.parent_agent_id"),
    Software("Dynamo", "1.6.2", "", "x-dynamo-session-id", "x-dynamo-parent-session-id", "x-dynamo-session-final"),
    Software("Claude Code", "2.1.291",
             "x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id"),
    Software("Codex", "0.171", "session-id session_id conversation_id", "thread-id", "x-codex-parent-thread-id"),
    Software("OpenCode", "1.18.34", "",  # version 2 sends the name of a whole tree in the last three
             "x-opencode-session-id x-session-id x-opencode-session x-session-affinity",
             "x-opencode-parent-session-id x-parent-session-id"),
)  # fmt: skip
"""In the order in which they count: what is said to a router goes before what agents send to everybody."""

FAIRNESS: Final = "x-llm-d-inference-fairness-id x-gateway-inference-fairness-id"
"""llm-d's new and old name for whose turn it is (2026-05). Goes before any run."""

SESSION_HEADERS: Final = frozenset(" ".join((FAIRNESS, *(" ".join(one[2:]) for one in SOFTWARE))).encode().split())

_END: Final = " ".join(one.end for one in SOFTWARE)


class Agent(NamedTuple):
    """Names that are unique in the tenant; empty: not given."""

    name: str = ""
    run: str = ""
    parent: str = ""
    is_final: bool = False


NOBODY: Final = Agent()


def agent_of(headers: Headers, request: Request) -> tuple[str, Agent]:
    """(a call's conversation, its agent): empty and `NOBODY` if nothing names them. What is no `LABEL` is ignored.

    A conversation without an agent has its name from a field that SDKs send, of which `user` counts last.
    """
    agent = NOBODY
    if request.vllm_xargs or not SESSION_HEADERS.isdisjoint(map(NAME, headers)):
        texts = [(name.decode(), value.decode("latin-1")) for name, value in headers if name in SESSION_HEADERS]
        texts += _agentic_context(request.vllm_xargs) if request.vllm_xargs else []
        agent = _agent({name: text for name, text in reversed(texts) if LABEL.fits(text)})  # the first of several
        if agent.name:
            return agent.name, agent
    for given in (request.prompt_cache_key, request.safety_identifier, request.user):
        if given is not None and LABEL.fits(given):
            return given, agent
    return "", agent


def _agent(given: dict[str, str]) -> Agent:
    def first(names: str) -> str:
        for name in names.split():
            if name in given:
                return given[name]
        return ""

    fairness, is_final = first(FAIRNESS), first(_END).lower() == "true"
    for software in SOFTWARE:
        run, name = first(software.run), first(software.agent)
        if run or name:
            parent = first(software.parent)
            if run and name not in ("", run):
                name, parent = f"{run}/{name}", run if parent in ("", run) else f"{run}/{parent}"
            elif run:
                name, parent = run, ""
            return Agent(name, fairness or run or parent or name, parent, is_final)
    return Agent(run=fairness)


def _agentic_context(xargs: dict[str, Any]) -> list[tuple[str, str]]:
    """The fields of an `agentic_context`, which is an object or its JSON."""
    given = xargs.get("agentic_context")
    try:
        fields = msgspec.json.decode(given, type=dict) if isinstance(given, str) else msgspec.convert(given, dict)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return []
    return [(f"agentic_context.{key}", str(value)) for key, value in fields.items() if isinstance(value, str | int)]
