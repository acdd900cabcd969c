"""Responses in the background, as OpenAI's SDK uses them, before one gateway and before several that look as one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from e2e.sdk import sync_client
from e2e.server_process import eventually
from e2e.servers import GATEWAYS, Fleet, Launcher
from e2e.tenants import KEYS

ENDED = {"completed", "incomplete", "failed", "cancelled"}


@pytest.fixture(scope="module", params=[1, 2] if GATEWAYS == 1 else [1], ids=lambda workers: f"{workers} workers")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A gateway over two embedded engines."""
    with Launcher(tmp_path_factory.mktemp("background")) as launch:
        engines = [launch.engine("demo-1"), launch.engine("demo-2")]
        gateway = launch.gateway(engines, server={"workers": request.param, "api_keys": KEYS})
        for server in (*engines, gateway):
            server.start()
        gateway.wait_until_ready()
        eventually(lambda: gateway.metric("plait_engine_up") >= gateway.processes * len(engines))
        yield Fleet(gateway, {engine.name: engine for engine in engines})


@pytest.fixture
def sdk(served: Fleet) -> Iterator[OpenAI]:
    with sync_client(served.gateway, api_key=KEYS[0]) as client:
        yield client


def begin(sdk: OpenAI, text: str = "Say hello.", tokens: int = 30, **fields: Any) -> Any:
    return sdk.responses.create(model="demo", input=text, background=True, max_output_tokens=tokens, **fields)


def ended(sdk: OpenAI, response_id: str) -> Any:
    """The response once it has ended, asked for as OpenAI's guide says."""
    found: Any = None

    def has_ended() -> bool:
        nonlocal found
        found = sdk.responses.retrieve(response_id)
        return found.status in ENDED

    eventually(has_ended)
    return found


def total(served: Fleet, metric: str) -> float:
    """Over all engines."""
    return sum(engine.metric(f"plait_engine_{metric}") for engine in served.engines.values())


def test_it_is_queued_and_ends_as_one_that_is_waited_for(sdk: OpenAI) -> None:
    for number in range(4):  # some are forwarded
        response = begin(sdk, f"Say {number}.")
        assert (response.status, response.background, response.output) == ("queued", True, [])
        waited = sdk.responses.create(model="demo", input=f"Say {number}.", max_output_tokens=30)
        found = ended(sdk, response.id)
        assert (found.status, found.output_text) == (waited.status, waited.output_text)
        assert (found.id, found.created_at, found.usage) == (response.id, response.created_at, waited.usage)


def test_it_is_continued_listed_and_deleted(sdk: OpenAI) -> None:
    first = ended(sdk, begin(sdk, "Say hello.").id)
    second = ended(sdk, begin(sdk, "And again.", previous_response_id=first.id).id)
    assert second.previous_response_id == first.id
    (item,) = sdk.responses.input_items.list(second.id).data
    assert "And again." in str(item)
    sdk.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(second.id)


def test_it_is_cancelled_and_its_engine_aborts_it(served: Fleet, sdk: OpenAI) -> None:
    aborted = total(served, "aborted_calls_total")
    responses = [begin(sdk, f"Go on, {number}.", 50_000, extra_body={"ignore_eos": True}) for number in range(4)]
    eventually(lambda: all(sdk.responses.retrieve(one.id).status == "in_progress" for one in responses))
    for one in responses:
        assert sdk.responses.cancel(one.id).status == "cancelled"
    eventually(lambda: total(served, "calls_running") == 0)
    assert total(served, "aborted_calls_total") == aborted + len(responses)
    assert all(sdk.responses.cancel(one.id).status == "cancelled" for one in responses), "again"
    assert all(sdk.responses.retrieve(one.id).status == "cancelled" for one in responses)


def test_a_stream_is_taken_up_again_where_it_was_left(sdk: OpenAI) -> None:
    for number in range(4):
        with begin(sdk, f"Tell {number}.", 200, stream=True) as stream:
            seen = [next(stream) for _ in range(6)]
        assert [event.type for event in seen[:3]] == [
            f"response.{what}" for what in ("created", "queued", "in_progress")
        ]
        response_id, last = seen[0].response.id, seen[-1].sequence_number
        rest = list(sdk.responses.retrieve(response_id, stream=True, starting_after=last))
        events = [*seen, *rest]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        found = ended(sdk, response_id)
        assert (found.output_text, events[-1].response) == (text, found)
        assert list(sdk.responses.retrieve(response_id, stream=True, starting_after=last)) == rest, "it has ended"


def test_what_cannot_be_is_refused_as_openai_does(served: Fleet, sdk: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="store"):
        begin(sdk, store=False)
    plain = sdk.responses.create(model="demo", input="Say hello.", max_output_tokens=8)
    with pytest.raises(openai.BadRequestError, match="background"):
        sdk.responses.cancel(plain.id)
    response = begin(sdk)
    with sync_client(served.gateway, api_key=KEYS[1]) as other:
        for ask in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(response.id)
    assert ended(sdk, response.id).status != "cancelled"
