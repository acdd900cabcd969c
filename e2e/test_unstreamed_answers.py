"""Calls with an output whose clients ask for no stream get the answer of a plain call."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from e2e.sdk import asking, async_client
from e2e.servers import Fleet, Launcher


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """An engine behind a gateway."""
    with Launcher(tmp_path_factory.mktemp("unstreamed")) as launch:
        engine = launch.engine("demo-1", time_scale=4)
        fleet = Fleet(launch.gateway([engine]), {engine.name: engine})
        fleet.start()
        yield fleet


@pytest.fixture
async def client(team: Fleet) -> AsyncIterator[AsyncOpenAI]:
    async with async_client(team.gateway) as client:
        yield client


UNSTREAMED: list[dict[str, Any]] = [
    {"max_tokens": 30, "seed": 3},
    {"max_tokens": 20, "logprobs": True, "n": 1, "stop": "text"},
    {"tools": [{"type": "function", "function": {"name": "look"}}], "tool_choice": "required"},
    {"max_tokens": 9, "response_format": {"type": "json_object"}},
]


@pytest.mark.parametrize("number", range(len(UNSTREAMED)))
async def test_an_outputs_answer_is_that_of_a_plain_call(client: AsyncOpenAI, number: int) -> None:
    fields = asking(f"Answer {number}.", **UNSTREAMED[number])
    plain = await client.chat.completions.create(**fields)
    output = {"plait-session": "equal", "plait-output": f"a{number}"}
    answer = await client.chat.completions.create(**fields, extra_headers=output)
    assert _shown(answer) == _shown(plain)


async def test_an_outputs_text_completion_is_that_of_a_plain_call(client: AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": "demo", "prompt": "Once", "max_tokens": 12, "echo": True, "logprobs": 1}
    plain = await client.completions.create(**fields)
    answer = await client.completions.create(**fields, extra_headers={"plait-session": "equal", "plait-output": "b"})
    assert _shown(answer) == _shown(plain)


def _shown(answer: Any) -> Any:
    """All of an answer that is the same for each call of one request: not what the cache had, nor the ids."""
    shown = json.loads(re.sub(r"call_[0-9a-f]+_", "call_", answer.model_dump_json()))
    del shown["id"], shown["created"], shown["usage"]["prompt_tokens_details"]
    return shown
