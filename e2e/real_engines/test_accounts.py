"""What streams that are cut count as: the prompt to the token, of the answer what was read or one event more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from e2e.accounts import Used, used
from e2e.real_engines.engine import MODEL
from e2e.real_engines.fleet import EngineFleet, new_gateway
from e2e.sdk import sync_client
from e2e.server_process import Server, eventually
from tests.waiting import WITHIN_S

PROMPT: Final = [11, *range(10, 109)]
READ: Final = 20
BUDGET: Final = 90
"""More than a stream reserves at first."""

OPTIONS: Final[dict[str, Any]] = {
    "without-usage": {},
    "with-usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
"""What a client asks for. The gateway asks the engine for a usage in each event in any case."""


@pytest.fixture(scope="module")
def gateway(fleet: EngineFleet, model: Path, folder: Path) -> Iterator[Server]:
    """A second gateway over the fleet's engines. All tenants have a budget: without one, an event is a token."""
    budgets = {"gone": 10**6, "poor": len(PROMPT) + BUDGET}
    tenants = [
        {"name": f"{who}-{name}", "api_keys": [f"{who}-{name}"], "budget": {"tokens_per_day": tokens}}
        for who, tokens in budgets.items()
        for name in OPTIONS
    ]
    gateway = new_gateway("accounts", fleet.engines, model, folder, tenants=tenants)
    with ExitStack() as stack:
        EngineFleet(gateway, fleet.engines).start_gateway(stack)
        yield gateway


@pytest.fixture(params=OPTIONS)
def asked(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def stream(client: openai.OpenAI, asked: str) -> Any:
    """Its events have log probabilities: they tell how many tokens an event has."""
    fields = {"stream": True, "max_tokens": 2_000, "logprobs": 1, "extra_body": {"ignore_eos": True}, **OPTIONS[asked]}
    return client.completions.create(model=MODEL, prompt=PROMPT, **fields)


def read_to_its_end(stream: Any, chunks: list[Any]) -> None:
    for chunk in stream:
        chunks.append(chunk)  # noqa: PERF402 - an error may come behind some


def tokens(chunks: list[Any], asked: str) -> int:
    """What was read."""
    read = sum(len(chunk.choices[0].logprobs.tokens) for chunk in chunks)
    told = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert told[-1:] == ([] if asked == "without-usage" else [read])
    return read


def check(gateway: Server, key: str, read: int) -> None:
    """One call is counted. More than what was read was on its way, and after a pause an event has many tokens."""
    eventually(lambda: used(gateway, key=key).requests == 1)
    counted = used(gateway, key=key)
    assert counted == Used(1, len(PROMPT), counted.output)
    assert read <= counted.output <= 3 * read


def test_a_client_that_is_gone(gateway: Server, asked: str) -> None:
    chunks: list[Any] = []
    with (
        sync_client(gateway, api_key=f"gone-{asked}", timeout=WITHIN_S) as client,
        closing(stream(client, asked)) as events,
    ):
        while len(chunks) < READ:
            chunks.append(next(events))
    check(gateway, f"gone-{asked}", tokens(chunks, asked))


def test_a_budget_that_ends(gateway: Server, asked: str) -> None:
    chunks: list[Any] = []
    with sync_client(gateway, api_key=f"poor-{asked}", timeout=WITHIN_S) as client:
        with pytest.raises(openai.APIError) as caught:
            read_to_its_end(stream(client, asked), chunks)
        assert caught.value.code == "budget_exceeded"
    read = tokens(chunks, asked)
    assert tokens(chunks[:-1], asked) < BUDGET <= read
    check(gateway, f"poor-{asked}", read)
