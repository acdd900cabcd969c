"""Conversations of released clients with engines that say no, through a gateway that translates: two turns each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from e2e.clients.conversations import RECORDED, TALKERS, Cell, Talker, cells, converse, enter, faults
from e2e.clients.program_run import KEY, ProgramError
from e2e.clients.recording import recorded_conversation
from e2e.clients.thinking_model import CONTEXT_32768, CONTEXT_40960, KINDS, MISTRAL, SGLANG, Mishap, ThinkingModel
from e2e.server_process import Server, eventually
from e2e.servers import Launcher

EACH_TIME: Final = {
    ("codex-cli-responses", Cell(SGLANG, Mishap.CUT_CALL)),
    ("codex-cli-responses", Cell(MISTRAL, Mishap.NONE)),
    ("codex-cli-responses", Cell(SGLANG, Mishap.SHORTENED)),
    ("claude-code-messages", Cell(CONTEXT_40960, Mishap.NONE)),
    ("claude-code-messages", Cell(CONTEXT_32768, Mishap.NONE)),
    ("claude-code-messages", Cell(SGLANG, Mishap.PICTURE)),
    ("ai-sdk-responses", Cell(SGLANG, Mishap.NONE)),
    ("anthropic-python-messages-streamed", Cell(SGLANG, Mishap.NONE)),
}
"""What every change has to keep; the rest is a nightly part."""


def conversations() -> Iterator[object]:
    """Each conversation, as a parameter."""
    for talker in TALKERS:
        for cell in cells(talker):
            marks = () if (talker.file_name, cell) in EACH_TIME else (pytest.mark.nightly,)
            yield pytest.param(talker, cell, id=f"{talker.file_name}-{cell.name}", marks=marks)


@pytest.fixture(scope="module")
def engines() -> Iterator[Mapping[str, ThinkingModel]]:
    """An engine of each kind."""
    made = {kind.name: ThinkingModel(kind) for kind in KINDS}
    for engine in made.values():
        engine.__enter__()
    yield made
    for engine in made.values():
        engine.__exit__(None, None, None)


@pytest.fixture(scope="module")
def gateway(engines: Mapping[str, ThinkingModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A gateway over all of them, each with a model of its own."""
    with Launcher(tmp_path_factory.mktemp("conversations")) as launch:
        gateway = launch.gateway(
            [{"name": engine.model, "url": engine.url} for engine in engines.values()],
            models=[engine.model for engine in engines.values()],
            server={"api_keys": [KEY]},
        )
        gateway.start()
        gateway.wait_until_ready()
        eventually(lambda: gateway.metric("plait_engine_up") == gateway.processes * len(engines))
        yield gateway


@pytest.mark.parametrize(("talker", "cell"), [*conversations()])
def test_a_conversation_goes_on(
    talker: Talker, cell: Cell, gateway: Server, engines: Mapping[str, ThinkingModel], tmp_path: Path
) -> None:
    if talker.why_not is not None:
        pytest.skip(talker.why_not)
    engine = engines[cell.kind.name]
    is_recorded = cell.kind is SGLANG and cell.mishap in RECORDED and talker.speaks != "chat"
    name = f"{talker.file_name}-{cell.mishap}".replace(" ", "-") if is_recorded else None
    try:
        with recorded_conversation(name, gateway, tmp_path) as url:
            said = converse(talker, cell, url, engine, tmp_path)
        found = list(faults(talker, cell, engine, said))
    except ProgramError as error:
        found = [str(error), *engine.refusals]
    enter(talker, cell, found)
    assert not found, "\n".join(found)
