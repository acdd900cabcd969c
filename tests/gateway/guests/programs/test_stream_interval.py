"""How many tokens an engine may send at a time: one if somebody reads the text as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.gateway.calls.outgoing import STREAM_INTERVAL, OutgoingBody
from tests.gateway.guests.programs.chained_gateway import Served, served_calls


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with served_calls() as served:
        yield served


def sent(served: Served) -> ChatRequest | CompletionRequest:
    """The request of the only running call."""
    ((asked, _, _),) = served.engine.running.values()
    assert isinstance(asked.body, OutgoingBody)
    return asked.body.request


@pytest.mark.parametrize("watched", [False, True])
async def test_tokens_come_one_by_one_if_a_get_streams_them(served: Served, watched: bool) -> None:
    await served.get("code", stream=watched)
    await served.submit("Write {{code}}", "code")
    assert sent(served).stream
    assert sent(served).stream_interval == (None if watched else STREAM_INTERVAL)


async def test_a_client_that_streams_gets_each_token(served: Served) -> None:
    await served.chat("Write", output="code", stream=True)
    assert sent(served).stream_interval is None
