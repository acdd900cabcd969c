"""Streams that are cut, and what they are counted as: the whole prompt, and of the answer what was passed on.

One engine puts a usage into each event when it is asked to. The other one does not understand that, so that an event is
a token.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any, Final, NamedTuple

import openai
import pytest

from e2e.accounts import ADMIN, DAY_S, Made, Used, bearer, issue, used_by
from e2e.delaying_proxy import DelayingProxy
from e2e.faults.raw_client import CHAT, request
from e2e.sdk import asking, content, sync_client
from e2e.server_process import Server, eventually
from e2e.servers import Fleet, Launcher
from tests.waiting import SLOWNESS

MODELS: Final = ("counting", "plain")
"""Each has an engine of its own."""

TIME_SCALE: Final = 0.4 / SLOWNESS
"""A token takes some 70 ms, so a client that reads is never behind by more than an event."""

LONG: Final = 2_000
AN_EVENT: Final = 1
"""Tokens of an event of these engines."""

BUDGET: Final = 70
"""More than a stream reserves at first."""

READ: Final = {"first": 1, "few": 4, "late": 20}
TEXT: Final = "Tell a story about a lighthouse, and do not stop."
FREE: Final = "a-key-without-a-budget"
PRICE: Final = {"input": 1.0, "output": 2.0}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("cut")
    with Launcher(folder) as launch, ExitStack() as stack:
        engines = {name: launch.engine(name, model=name, time_scale=TIME_SCALE) for name in MODELS}
        deaf = stack.enter_context(DelayingProxy(engines["plain"].port, 0.0, spoils=b"continuous_usage_stats"))
        urls = {"counting": engines["counting"].url, "plain": deaf.url}
        (folder / "store").mkdir(mode=0o700)
        models: list[Mapping[str, Any]] = [{"name": name, "tokenizer": "embedded", "price": PRICE} for name in MODELS]
        gateway = launch.gateway(
            [{"name": name, "url": url} for name, url in urls.items()],
            models=models,
            server={"admin_key": ADMIN},
            store={"path": str(folder / "store" / "sessions.db")},
            tenants=[{"name": "blue", "api_keys": [FREE]}],
            upstream={"max_attempts": 1},
        )
        fleet = Fleet(gateway, engines)
        fleet.start()
        yield fleet


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=[False, True], ids=["without usage", "with usage"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the client asks for of usage."""
    return {"stream_options": {"include_usage": True}} if request.param else {}


class Called(NamedTuple):
    """Who calls: a new key, and the tokens of the prompt of all calls here, as the engine counts them."""

    gateway: Server
    made: Made
    prompt_tokens: int


@pytest.fixture
def called(fleet: Fleet, model: str) -> Called:
    return caller(fleet, model)


def caller(fleet: Fleet, model: str, output_tokens: int | None = None) -> Called:
    """A key whose budget is for so many tokens of output."""
    body = asking(TEXT, model=model, max_tokens=1)
    answer = fleet.gateway.post(CHAT, json=body, headers=bearer(FREE))
    prompt_tokens = answer.json()["usage"]["prompt_tokens"]
    budget = None if output_tokens is None else {"tokens_per_day": prompt_tokens + output_tokens}
    return Called(fleet.gateway, issue(fleet.gateway, "blue", budget=budget), prompt_tokens)


def asked(model: str, **fields: Any) -> dict[str, Any]:
    return asking(TEXT, model=model, stream=True, max_tokens=LONG, extra_body={"ignore_eos": True}, **fields)


def check(called: Called, model: str, read: int) -> None:
    """One call is counted: its prompt to the token, and what was read or one event more."""
    eventually(lambda: used_by(called.gateway, called.made).requests == 1)
    counted = used_by(called.gateway, called.made)
    assert counted == Used(1, called.prompt_tokens, counted.output, int(model == "plain"))
    assert read <= counted.output <= read + AN_EVENT


def pieces(chunks: list[Any]) -> int:
    """How many of these events have a piece of text, each of which is a token here."""
    return sum(bool(one.choices and one.choices[0].delta.content) for one in chunks)


def read_to_its_end(stream: Iterable[Any], chunks: list[Any], at: Callable[[], None] | None = None) -> None:
    """Append all events, which an error may end; `at` is called after a few."""
    for chunk in stream:
        chunks.append(chunk)
        if at is not None and len(chunks) == READ["few"]:
            at()


def check_no_unasked_usage(chunks: list[Any], options: dict[str, Any]) -> None:
    """Nobody sees a usage who has not asked, and who has asked sees none beside the text."""
    assert not [chunk for chunk in chunks if chunk.usage is not None and (chunk.choices or not options)]


@pytest.mark.parametrize("moment", READ)
def test_a_client_that_is_gone(called: Called, model: str, options: dict[str, Any], moment: str) -> None:
    chunks: list[Any] = []
    with (
        sync_client(called.gateway, api_key=called.made.key) as client,
        closing(client.chat.completions.create(**asked(model, **options))) as stream,
    ):
        while pieces(chunks) < READ[moment]:
            chunks.append(next(stream))
    check_no_unasked_usage(chunks, options)
    check(called, model, READ[moment])


def test_a_client_that_is_gone_before_the_first_event_costs_nothing(called: Called, model: str) -> None:
    def count(outcome: str) -> float:
        return called.gateway.metric("plait_calls_total", outcome=outcome)

    gone = count("client_gone")
    long = asking("word " * 2_000, model=model, stream=True, max_tokens=LONG)
    with socket.create_connection(("127.0.0.1", called.gateway.port)) as client:
        client.sendall(request("POST", CHAT, long, bearer(called.made.key)))
        eventually(lambda: called.gateway.metric("plait_engine_outstanding_calls") == 1)
    eventually(lambda: count("client_gone") == gone + 1)
    follows = asking(TEXT, model=model, max_tokens=1)
    assert called.gateway.post(CHAT, json=follows, headers=bearer(called.made.key)).status_code == 200
    eventually(lambda: used_by(called.gateway, called.made).requests > 0)
    assert used_by(called.gateway, called.made) == Used(1, called.prompt_tokens, 1), "the call that came later"


def test_a_budget_that_ends(fleet: Fleet, model: str, options: dict[str, Any]) -> None:
    """The stream ends with an error event within an event of the budget, and the engine's call is aborted."""
    called = caller(fleet, model, BUDGET)
    aborted = fleet.engines[model].metric("plait_engine_aborted_calls_total")
    chunks: list[Any] = []
    with sync_client(fleet.gateway, api_key=called.made.key) as client:
        with pytest.raises(openai.APIError) as caught:
            read_to_its_end(client.chat.completions.create(**asked(model, **options)), chunks)
        assert caught.value.code == "budget_exceeded"
        check_no_unasked_usage(chunks, options)
        assert abs(pieces(chunks) - BUDGET) <= AN_EVENT
        check(called, model, pieces(chunks))
        eventually(lambda: fleet.engines[model].metric("plait_engine_aborted_calls_total") == aborted + 1)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**asking(TEXT, model=model))
    assert refused.value.code == "budget_exceeded"
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert 0 < int(refused.value.response.headers["retry-after"]) <= DAY_S
    ratio = called.gateway.metric("plait_budget_used_ratio", of=f"key {called.made.id}", budget="tokens_per_day")
    assert 1 - 2 * AN_EVENT / BUDGET <= ratio <= 1 + 2 * AN_EVENT / BUDGET
    assert f'"budget":"key {called.made.id} tokens_per_day"' in called.gateway.log(), "it is nearly used up"


def test_an_answer_that_is_not_streamed_is_cut_to_what_is_left(fleet: Fleet, model: str) -> None:
    called = caller(fleet, model, 10)
    body = asking(TEXT, model=model, max_tokens=LONG, ignore_eos=True)
    answer = fleet.gateway.post(CHAT, json=body, headers=bearer(called.made.key))
    assert (answer.status_code, answer.headers["plait-budget"]) == (200, "capped")
    assert answer.json()["usage"]["completion_tokens"] == 10
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_an_engine_that_dies(fleet: Fleet, called: Called, model: str, options: dict[str, Any]) -> None:
    engine = fleet.engines[model]
    chunks: list[Any] = []
    with sync_client(fleet.gateway, api_key=called.made.key) as client:
        stream = client.chat.completions.create(**asked(model, **options))
        with pytest.raises(openai.APIError):
            read_to_its_end(stream, chunks, engine.kill)
    check_no_unasked_usage(chunks, options)
    assert pieces(chunks) >= READ["few"] - 1
    check(called, model, pieces(chunks))
    engine.start()
    engine.wait_until_ready()
    eventually(lambda: fleet.gateway.metric("plait_engine_up") == len(fleet.engines))


def test_a_whole_stream_shows_its_usage_to_those_who_asked(called: Called, model: str, options: dict[str, Any]) -> None:
    with sync_client(called.gateway, api_key=called.made.key) as client:
        chunks = list(client.chat.completions.create(**asked(model, **options) | {"max_tokens": 5}))
    check_no_unasked_usage(chunks, options)
    assert bool(chunks[-1].usage) == bool(options)
    assert content(chunks)
    eventually(lambda: used_by(called.gateway, called.made) == Used(1, called.prompt_tokens, 5))
