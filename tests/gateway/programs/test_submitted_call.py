"""A submitted call on its way: what the log says of its steps."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from tests.gateway.programs.chained_gateway import CHAT, Served, served_calls


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with served_calls() as served:
        yield served


async def test_the_steps_have_the_session_and_the_path(served: Served) -> None:
    await served.submit("Do {{code}}", "code")
    delivery, *_ = served.engine.running["Do "]
    assert (delivery.session, delivery.path) == ("s", CHAT)
    await served.engine.answer("Do ", "x")


async def test_a_failure_has_the_session_and_the_path() -> None:
    with capture_logs() as logs:
        async with served_calls() as served:
            await served.submit("Do {{code}}", "code", chat=False)
            await served.chat("Test {{code}}", inputs="code")
            await served.engine.refuse("Do ")
    lines = [entry for entry in logs if entry["event"] == "chained call"]
    assert [(line["session"], line["path"]) for line in lines] == [("s", CHAT), ("s", "/v1/completions")]
