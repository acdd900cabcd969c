"""SDKs with their default settings, whose calls wait for as long as proxies and people have patience."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from e2e.clients.client import ANTHROPIC_PYTHON, OPENAI_NODE, OPENAI_PYTHON, Client
from e2e.clients.program_run import KEY, Outcome, run_program
from e2e.sdk import asking, sync_client
from e2e.servers import Fleet, Launcher

HOLD_S: Final = 90.0 if "PLAIT_NIGHTLY" in os.environ else 15.0
WHOLE_HELD_S: Final = HOLD_S * 2 / 3
"""A call that is not streamed is held for so long; in 90 s that is the default."""
TOKEN_S: Final = 0.025
"""The least time between two tokens of an embedded engine."""

HOLDS: Final = (
    replace(OPENAI_PYTHON, program="hold_with_openai.py"),
    replace(ANTHROPIC_PYTHON, program="hold_with_anthropic.py"),
    replace(OPENAI_NODE, program="hold_with_openai.mjs"),
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[list[Outcome]]]]:
    """What came of each client's calls. All wait at the same time for an engine with one slot."""
    folder = tmp_path_factory.mktemp("holds")
    with Launcher(folder) as launch, ThreadPoolExecutor(len(HOLDS) + 1) as threads:
        engine = launch.engine("demo-1", time_scale=1, options=["--max-running-calls", "1"])
        gateway = launch.gateway([engine], server={"api_keys": [KEY]}, admission={"hold_s": WHOLE_HELD_S})
        Fleet(gateway, {engine.name: engine}).start()
        runnable = [client for client in HOLDS if client.why_not is None]

        def all_waited() -> bool:
            return gateway.metric("plait_refusals_total", code="waiting") >= len(runnable)

        with sync_client(gateway, api_key=KEY) as busy:
            asked = asking("busy", max_tokens=round(3 * HOLD_S / TOKEN_S), extra_body={"ignore_eos": True})
            answer, end_s = busy.chat.completions.create(**asked, stream=True), time.monotonic() + HOLD_S
            next(answer)

            def hold() -> None:
                """Holds the slot until each client was told to wait: some start late on a busy machine."""
                with answer:
                    next(chunk for chunk in answer if time.monotonic() >= end_s and all_waited())

            held = threads.submit(hold)
            yield {client.name: threads.submit(run_program, client.command, gateway.url, folder) for client in runnable}
            held.result()


@pytest.mark.parametrize("client", HOLDS, ids=lambda client: client.file_name)
def test_an_sdk_gets_its_answers(client: Client, outcomes: Mapping[str, Future[list[Outcome]]], tmp_path: Path) -> None:
    if client.why_not is not None:
        pytest.skip(client.why_not)
    failed = [f"{outcome.feature}: {outcome.detail}" for outcome in outcomes[client.name].result() if not outcome.ok]
    assert not failed, "\n".join(failed)
