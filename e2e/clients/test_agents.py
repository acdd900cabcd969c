"""Coding agents as they are released: two turns of one thread, each with thoughts, two calls of a shell, and an answer.

A `native` engine has Responses and Messages; for the other one the gateway translates them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.clients.agent import AGENT_PROGRAMS, CODEX_KEY, MODEL, SAID, Agent, ShellModel, prepared
from e2e.clients.client import CLIENTS
from e2e.clients.matrix import Matrix
from e2e.clients.program_run import KEY, run_program, run_tool
from e2e.server_process import Server, eventually
from e2e.servers import Launcher
from plait.backends.translation.translation import TRANSLATIONS

ROUTES = {"translated": (), "native": ("/v1/chat/completions", "/v1/messages/count_tokens", *TRANSLATIONS)}


@pytest.fixture(scope="module", params=list(ROUTES))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, ShellModel, Server]]:
    """A gateway over the model, and whether that is native or translated."""
    folder = tmp_path_factory.mktemp(f"agents-{request.param}")
    with ShellModel(MODEL, ROUTES[request.param]) as engine, Launcher(folder) as launch:
        gateway = launch.gateway([{"name": "shell", "url": engine.url}], server={"api_keys": [KEY]})
        gateway.start()
        gateway.wait_until_ready()
        eventually(lambda: gateway.metric("plait_engine_up") == gateway.processes)
        yield request.param, engine, gateway


def title(agent: Agent) -> str:
    return agent.name.lower().replace(" ", "-")


@pytest.mark.parametrize("agent", AGENT_PROGRAMS, ids=title)
def test_an_agent_works_and_goes_on(
    agent: Agent, served: tuple[str, ShellModel, Server], matrix: Matrix, tmp_path: Path
) -> None:
    kind, engine, gateway = served
    row = f"{agent.name} {agent.version}, {kind}"
    if not agent.runs:
        matrix.skip(row, "it has no program for this machine")
        pytest.skip(f"{agent.name} is not installed")
    environment = prepared(agent, gateway.url, tmp_path)
    engine.received.clear()
    for arguments in (agent.first, agent.next):
        command = [*agent.runs, *(argument.replace("{url}", gateway.url) for argument in arguments)]
        done = run_tool(command, tmp_path, environment)
        assert f"It said: {' '.join(SAID)}" in done.stdout, done.stdout + done.stderr
    bodies = [json.loads(received.body) for received in engine.received if b'"tools"' in received.body]
    last = json.dumps(bodies[-1])
    assert "Work." in last, "the second turn has the first one before it"
    assert "Go on." in last
    assert {received.path for received in engine.received} <= (
        set(TRANSLATIONS) if kind == "native" else {"/v1/chat/completions"}
    )
    matrix.note(f"{row}: two turns of one thread, each with thoughts, parallel calls of its shell and an answer.")


@pytest.mark.parametrize("agent", [agent for agent in AGENT_PROGRAMS if agent.structured], ids=title)
def test_an_agent_answers_with_an_object(
    agent: Agent, served: tuple[str, ShellModel, Server], matrix: Matrix, tmp_path: Path
) -> None:
    kind, engine, gateway = served
    if not agent.runs:
        pytest.skip(f"{agent.name} is not installed")
    environment = prepared(agent, gateway.url, tmp_path)
    engine.received.clear()
    command = [*agent.runs, *(argument.replace("{url}", gateway.url) for argument in agent.structured)]
    done = run_tool(command, tmp_path, environment)
    [told] = [line for line in done.stdout.splitlines() if "It said" in line] or [done.stdout + done.stderr]
    answer = json.loads(told)
    assert answer.get("structured_output", answer) == {"said": f"It said: {' '.join(SAID)}"}
    assert any(b'"additionalProperties":false' in received.body for received in engine.received)
    matrix.note(f"{agent.name} {agent.version}, {kind}: an answer of two calls that is an object of a schema.")


def test_codex_reads_the_models(served: tuple[str, ShellModel, Server], tmp_path: Path) -> None:
    """Codex asks for them if its key comes from a command, and keeps its own instructions."""
    _, engine, gateway = served
    codex = AGENT_PROGRAMS[0]
    if not codex.runs:
        pytest.skip(f"{codex.name} is not installed")
    environment = prepared(codex, gateway.url, tmp_path)
    engine.received.clear()
    command = [*codex.runs, *(argument.replace("{url}", gateway.url) for argument in codex.first)]
    command[command.index(CODEX_KEY)] = 'model_providers.plait.auth={command="printenv",args=["AGENT_KEY"]}'
    done = run_tool(command, tmp_path, environment)
    assert f"It said: {' '.join(SAID)}" in done.stdout, done.stdout + done.stderr
    assert "models" not in "".join(line for line in done.stderr.splitlines() if "ERROR" in line)
    assert b"You are a coding agent running in the Codex CLI" in engine.received[-1].body


def test_a_loop_over_responses(served: tuple[str, ShellModel, Server], matrix: Matrix, tmp_path: Path) -> None:
    kind, _, gateway = served
    sdk = replace(next(client for client in CLIENTS if client.package == "ai"), program="loop_with_ai_sdk.mjs")
    if sdk.why_not is not None:
        pytest.skip(sdk.why_not)
    failed = [one.detail for one in run_program(sdk.command, gateway.url, tmp_path) if not one.ok]
    assert not failed, "\n".join(failed)
    matrix.note(f"{sdk.title}, {kind}: a loop of thoughts, parallel calls and an answer, streamed and not.")
