"""SDKs behind an nginx that gives up after 15 s without a byte, whose streams are silent for longer.

Streams of every kind, which are silent before their first event or amid them, run at the same time. `native` engines
have Responses and Messages themselves. For the others the gateway translates them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest

from e2e.clients.client import ANTHROPIC_PYTHON, OPENAI_NODE, OPENAI_PYTHON, OPENAI_PYTHON_BEFORE, Client
from e2e.clients.nginx import PACKAGE, READ_TIMEOUT_S, Nginx
from e2e.clients.program_run import KEY, Outcome, run_program
from e2e.faults.completions import completion_of
from e2e.faults.fleet import ScriptedEngine, ScriptedServer
from e2e.faults.raw_client import Answer
from e2e.faults.raw_client import Client as RawClient
from e2e.faults.verdicts import signs_of_life
from e2e.servers import PATIENT, Launcher
from plait.backends.translation.translation import TRANSLATIONS
from tests.waiting import WITHIN_S

SILENT_S: Final = 25.0 if "PLAIT_NIGHTLY" in os.environ else 17.0
assert SILENT_S > READ_TIMEOUT_S

SILENT_CLIENTS: Final = (
    replace(OPENAI_PYTHON, program="silent_with_openai.py"),
    replace(OPENAI_PYTHON_BEFORE, program="silent_with_openai.py"),
    replace(OPENAI_NODE, program="silent_with_openai.mjs"),
    replace(ANTHROPIC_PYTHON, program="silent_with_anthropic.py"),
)

QUESTION: Final = "Where is the Eiffel Tower?"
MESSAGES: Final = [{"role": "user", "content": QUESTION}]
ANSWER: Final = completion_of({"messages": MESSAGES}).text
BODIES: Final[Mapping[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": QUESTION},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 64},
    "/v1/responses": {"input": QUESTION},
}
LAST: Final[Mapping[str, bytes]] = {
    "/v1/chat/completions": b"data: [DONE]",
    "/v1/completions": b"data: [DONE]",
    "/v1/messages": b'{"type":"message_stop"}',
    "/v1/responses": b'"type":"response.completed"',
}
"""What is in the last event of a whole stream."""
SILENCES: Final = {"before": {"first_s": SILENT_S}, "amid": {"middle_s": SILENT_S}}
CASES: Final = [(path, apis, when) for path in BODIES for apis in ("native", "translated") for when in SILENCES]


@dataclass
class Found:
    """What came of the clients' streams, and of `CASES`, whose client notes when bytes come."""

    outcomes: Mapping[str, Future[list[Outcome]]]
    answers: Future[list[Answer]]
    native: Collection[ScriptedEngine]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """All streams, at the same time."""
    binary = PACKAGE.program("nginx")
    if binary is None:
        pytest.skip("needs nginx: `python -m e2e.clients.nginx` fetches it with apt-get")
    folder = tmp_path_factory.mktemp("silent-clients")
    native, translated = (
        # An engine for each silence: to one that serves later calls at once, a silent call would seem forgotten.
        ScriptedServer(apis, {name: [name] for when in SILENCES for name in [f"{apis}-{when}"]}, folder, *options)
        for apis, options in (("native", [f"--route={path}" for path in TRANSLATIONS]), ("translated", []))
    )
    with ExitStack() as stack:
        for server in (native, translated):
            stack.callback(server.stop)
        launch = stack.enter_context(Launcher(folder))
        entries = [engine.entry() for server in (native, translated) for engine in server.engines.values()]
        gateway = launch.gateway(entries, models=[], server={"api_keys": [KEY]}, upstream=PATIENT)
        front = Nginx(binary, folder, gateway)
        stack.callback(front.stop)
        for each in (native, translated, gateway, front):
            each.start()
            each.wait_until_ready()
        runnable = [client for client in SILENT_CLIENTS if client.why_not is None]
        threads = stack.enter_context(ThreadPoolExecutor(len(runnable) + 1))
        ask = threads.submit
        yield Found(
            {
                one.name: ask(run_program, [*one.command, f"{SILENT_S}", QUESTION, ANSWER], front.url, folder)
                for one in runnable
            },
            ask(lambda: asyncio.run(raw_answers(front.port))),
            native.engines.values(),
        )


async def raw_answers(port: int) -> list[Answer]:
    """The answers to `CASES`."""
    headers = {"authorization": f"Bearer {KEY}"}
    async with RawClient(port, timeout_s=SILENT_S + WITHIN_S) as client:

        def answer(path: str, apis: str, when: str) -> Awaitable[Answer]:
            body = {**BODIES[path], "model": f"{apis}-{when}", "stream": True, "silence": SILENCES[when]}
            return client.post(path, body, headers)

        return await asyncio.gather(*(answer(*case) for case in CASES))


@pytest.mark.parametrize("client", SILENT_CLIENTS, ids=lambda client: client.file_name)
def test_an_sdk_reads_silent_streams_to_their_ends(client: Client, found: Found) -> None:
    if client.why_not is not None:
        pytest.skip(client.why_not)
    failed = [f"{one.feature}: {one.detail}" for one in found.outcomes[client.name].result() if not one.ok]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_signs_of_life_come_through_nginx(case: tuple[str, str, str], found: Found) -> None:
    answer = found.answers.result()[CASES.index(case)]
    assert (answer.status, answer.broken) == (200, "")
    assert LAST[case[0]] in answer.body.split(b"\n\n")[-2]
    assert signs_of_life(answer) >= 1


def test_native_engines_are_asked_in_their_apis(found: Found) -> None:
    """Else all of this would be about streams that the gateway translates."""
    found.answers.result()
    for engine in found.native:
        assert asyncio.run(engine.stats())["native"] >= len(TRANSLATIONS)
