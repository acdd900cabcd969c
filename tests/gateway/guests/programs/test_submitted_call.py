"""A submitted call on its way: what its outputs are, and what the log says of its steps."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from tests.gateway.guests.programs.chained_gateway import CHAT, Served, events, served_calls


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with served_calls() as served:
        yield served


async def test_the_space_that_the_model_writes_first_is_no_part_of_its_output(served: Served) -> None:
    await served.submit("Code: {{code}} Test: {{test}} Note: {{note}}", "code", "test", "note")
    watching = await served.get("test", stream=True)
    await served.engine.answer("Code: ", " x = 1")
    await served.engine.answer("Code: | x = 1 Test:", "  fine")
    assert (await served.get("code")).json["value"] == " x = 1", "the space before it is the user's"
    assert (await served.get("test")).json["value"] == " fine"
    assert "".join(piece.get("delta", "") for piece in events(watching)[:-1]) == " fine"
    assert list(served.engine.running) == ["Code: | x = 1 Test:  fine Note:"], "all as the engine has it"
    await served.engine.answer("Code: | x = 1 Test:  fine Note:", "none")
    assert (await served.get("note")).json["value"] == "none"


async def test_the_steps_have_the_session_and_the_path(served: Served) -> None:
    await served.submit("Do {{code}}", "code")
    asked, *_ = served.engine.running["Do "]
    assert (asked.session, asked.path) == ("s", CHAT)
    await served.engine.answer("Do ", "x")


async def test_a_failure_has_the_session_and_the_path() -> None:
    with capture_logs() as logs:
        async with served_calls() as served:
            await served.submit("Do {{code}}", "code", chat=False)
            await served.chat("Test {{code}}", inputs="code")
            await served.engine.refuse("Do")
    lines = [entry for entry in logs if entry["event"] == "chained call"]
    assert [(line["session"], line["path"]) for line in lines] == [("s", CHAT), ("s", "/v1/completions")]
