"""Calls that an engine refuses for what it lacks: another takes them, each is asked once, and none has failed."""

from __future__ import annotations

import msgspec
import pytest

import plait.gateway.calls.attempts
from plait.backends.errors import EngineError, ModelNotFoundError
from plait.gateway.fleet.health import HealthState
from plait.policy.types import Call
from tests.gateway.calls.scripted_engines import (
    DONE,
    FINISH,
    HASHES,
    JSON,
    LOST,
    WHOLE,
    Client,
    Exchange,
    FakeHttp,
    Gateway,
    gateway,
)
from tests.gateway.exposed import samples
from tests.invariants import check_retries

TOO_LONG = {
    "vLLM": "This model's maximum context length is 200 tokens. However, your prompt contains at least 201 input "
    "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
    "vLLM, of the output": "'max_tokens' or 'max_completion_tokens' is too large: 100. This model's maximum context "
    "length is 200 tokens and your request has 150 input tokens (100 > 200 - 150).",
    "vLLM, of max_tokens": "max_tokens=300 cannot be greater than max_model_len=200. Please request fewer.",
    "vLLM, in its core": "The decoder prompt (length 257) is longer than the maximum model length of 200.",
    "vLLM, of responses": "The engine prompt length 257 exceeds the max_model_len 200. Please reduce prompt.",
    "SGLang": "The input (257 tokens) is longer than the model's context length (200 tokens).",
    "SGLang, of the output": "Requested token count exceeds the model's maximum context length of 200 tokens. You "
    "requested a total of 250 tokens.",
    "SGLang, of its cache": "Input length (257 tokens) exceeds the maximum allowed length (200 tokens). Use a shorter "
    "input or enable --allow-auto-truncate.",
    "SGLang, of max_tokens": "max_tokens is too large: 300.This model supports at most 200 completion tokens.",
}


def openai(message: str, code: object = 400) -> bytes:
    error = {"message": message, "type": "BadRequestError", "param": "input_tokens", "code": code}
    return msgspec.json.encode({"error": error})


def sglang(message: str) -> bytes:
    return msgspec.json.encode({"object": "error", "message": message, "type": "BadRequestError", "code": 400})


REFUSALS = {
    **{name: (sglang if "SGLang" in name else openai)(message) for name, message in TOO_LONG.items()},
    "by its code": openai("Too much.", "context_length_exceeded"),
}


NO_MODEL = {
    "vLLM": (404, openai("The model `m` does not exist. Valid aliases: base.", 404), "m"),
    "a gateway": (404, openai("The model 'm' does not exist. Models served here: n.", "model_not_found"), "m"),
    "Ollama": (404, openai('model "m" not found, try pulling it first', None), "m"),
    "SGLang": (404, openai("The model 'm' does not exist", "model_not_found"), "m"),
    "SGLang, of an adapter": (
        400,
        sglang("The following requested LoRA adapters are not loaded: a\nLoaded adapters: dict_keys([])."),
        "m:a",
    ),
}
OTHERS = {
    "another model": (404, openai("The model `n` does not exist.", 404)),
    "another path": (404, b'{"detail":"Not Found"}'),
    "another thing": (404, openai("Response with id 'The model `m` does not exist' not found.", 404)),
    "another adapter": (400, sglang("The following requested LoRA adapters are not loaded: m\nLoaded adapters: .")),
    "a page": (404, b"<html>The model `m` does not exist</html>"),
}


def refusal(body: bytes = REFUSALS["vLLM"], status: int = 400) -> Exchange:
    return Exchange(status, JSON, [body])


def answer() -> Exchange:
    return Exchange(headers=JSON, pieces=[WHOLE])


def offer(made: Gateway, **contexts: int | None) -> None:
    for engine, tokens in contexts.items():
        made.router.health.answered(engine, {"m": tokens})


def asked(made: Gateway) -> list[int]:
    return [len(engine.requests) for engine in made.engines.values()]


def nothing_has_failed(made: Gateway) -> bool:
    counted = samples(made.registry)
    check_retries(made.router.retries, 0)
    failures = [name for name in counted if name.startswith("plait_call_failures_total{")]
    return not failures and {engine.health.state for engine in made.router.engines.values()} == {HealthState.UP}


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_call_that_is_longer_than_was_counted_goes_to_a_longer_context(name: str) -> None:
    client = Client()
    async with gateway(FakeHttp(refusal(REFUSALS[name])), FakeHttp(answer())) as made:
        offer(made, a=300, b=32_768)
        await made.deliver(client)
        assert (client.status, client.body, client.headers[b"plait-engine"]) == (200, WHOLE, b"b")
        assert made.outcomes() == {("a", "refused"): 1, ("b", "ok"): 1}
        retried = 'plait_retries_total{cause="context_length",engine="a",model="m"}'
        assert (samples(made.registry)[retried], made.seconds_booked("a")) == (1, 0.0)
        assert nothing_has_failed(made)


async def test_a_stream_that_is_refused_by_its_first_event_goes_to_a_longer_context() -> None:
    client = Client()
    refused = Exchange(pieces=[b"data: " + openai(TOO_LONG["SGLang"]) + b"\n\n", DONE])
    async with gateway(FakeHttp(refused), FakeHttp(Exchange(pieces=[FINISH, DONE]))) as made:
        offer(made, a=300, b=32_768)
        await made.deliver(client)
        assert (client.body, client.headers[b"plait-engine"]) == (FINISH + DONE, b"b")
        assert nothing_has_failed(made)


@pytest.mark.parametrize(
    ("contexts", "engines"),
    [
        ((None, None, None), "acb"),
        ((300, 300, 300), "a"),
        ((300, None, 300), "ab"),
        ((300, 500, 400), "acb"),
        ((300, 400, 500), "ac"),
        ((None, 200, 400), "ac"),
    ],
    ids=str,
)
async def test_each_engine_that_may_have_room_is_asked_once_and_the_last_refusal_is_the_clients(
    contexts: tuple[int | None, ...], engines: str
) -> None:
    bodies = [openai(f"{engine}: maximum context length is 200 tokens") for engine in "abc"]
    client = Client()
    async with gateway(*(FakeHttp(refusal(body), refusal(body)) for body in bodies)) as made:
        offer(made, **dict(zip("abc", contexts, strict=True)))
        await made.deliver(client)
        assert asked(made) == [engines.count(engine) for engine in "abc"]
        assert (client.status, client.body, client.ended) == (400, bodies["abc".index(engines[-1])], True)
        assert client.headers[b"plait-engine"] == engines[-1].encode()
        assert nothing_has_failed(made)


@pytest.mark.parametrize(
    ("status", "body"),
    [(400, openai("'temperature' must be at least 0")), (422, REFUSALS["vLLM"])],
)
async def test_another_refusal_is_the_clients_at_once(status: int, body: bytes) -> None:
    client = Client()
    async with gateway(FakeHttp(refusal(body, status)), FakeHttp()) as made:
        offer(made, a=300, b=32_768)
        await made.deliver(client)
        assert (client.status, client.body, asked(made)) == (status, body, [1, 0])


async def test_a_moved_call_does_not_come_back_when_the_longer_engine_fails() -> None:
    client = Client()
    async with gateway(FakeHttp(refusal()), FakeHttp(LOST, answer())) as made:
        offer(made, a=300, b=32_768)
        await made.deliver(client)
        assert (client.status, asked(made)) == (200, [1, 2])


async def test_the_failure_of_the_longer_engine_is_the_clients_who_may_come_back() -> None:
    full = Exchange(503, [*JSON, (b"retry-after", b"7")], [b'{"error":{"message":"full"}}'])
    async with gateway(FakeHttp(refusal()), FakeHttp(full)) as made:
        offer(made, a=300, b=32_768)
        with pytest.raises(EngineError) as caught:
            await made.deliver(Client())
        assert (caught.value.status, caught.value.retry_after_s, asked(made)) == (503, 7.0, [1, 1])


async def test_a_refusal_is_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plait.gateway.calls.attempts, "REPEAT_S", 0.0)
    client = Client()
    async with gateway(FakeHttp(refusal()), FakeHttp(LOST, LOST, answer()), FakeHttp(LOST, answer())) as made:
        offer(made, a=300, b=32_768, c=32_768)
        await made.deliver(client)
        assert (client.status, sum(asked(made))) == (200, 4)


async def test_a_refusal_takes_no_retry_from_the_budget() -> None:
    client = Client()
    async with gateway(FakeHttp(refusal()), FakeHttp(answer())) as made:
        offer(made, a=300, b=32_768)
        while made.router.retries.take("m"):
            pass
        await made.deliver(client)
        assert client.status == 200


# Models.


def serve(made: Gateway, model: str) -> None:
    for engine in made.engines:
        made.router.health.answered(engine, {"base": None, model: None})


@pytest.mark.parametrize("name", NO_MODEL)
async def test_a_call_for_a_model_that_is_gone_goes_to_an_engine_that_has_it_and_so_do_all_later_ones(
    name: str,
) -> None:
    status, body, model = NO_MODEL[name]
    told: list[str] = []
    async with gateway(FakeHttp(refusal(body, status)), FakeHttp(*[answer() for _ in range(4)])) as made:
        serve(made, model)
        made.router.health.on_wrong_offer = told.append
        for _ in range(4):
            client = Client()
            await made.deliver_call(client, Call("r1", model, 257, 64, HASHES))
            assert (client.status, client.headers[b"plait-engine"]) == (200, b"b")
        assert (asked(made), told) == ([1, 4], ["a"])
        assert dict(made.router.engines["a"].offer.models) == {"base": None}
        assert nothing_has_failed(made)


async def test_the_last_engine_that_lacks_a_model_tells_the_client() -> None:
    status, body, _ = NO_MODEL["vLLM"]
    client = Client()
    async with gateway(*(FakeHttp(refusal(body, status)) for _ in range(2))) as made:
        serve(made, "m")
        await made.deliver(client)
        assert (client.status, client.body, asked(made)) == (404, body, [1, 1])
        with pytest.raises(ModelNotFoundError) as caught:
            await made.deliver(Client())
        assert (caught.value.status, caught.value.code, asked(made)) == (404, "model_not_found", [1, 1])
        assert nothing_has_failed(made)


@pytest.mark.parametrize("name", OTHERS)
async def test_what_only_looks_like_a_missing_model_is_the_clients(name: str) -> None:
    status, body = OTHERS[name]
    client = Client()
    async with gateway(FakeHttp(refusal(body, status)), FakeHttp()) as made:
        serve(made, "m")
        await made.deliver(client)
        assert (client.status, asked(made)) == (status, [1, 0])
        assert "m" in made.router.engines["a"].offer.models


# Many.


@pytest.mark.parametrize("contexts", [(2_000, 32_768), (None, 32_768), (None, None)], ids=str)
@pytest.mark.parametrize("counted_tokens", [5_000, 1_900], ids=["counted rightly", "estimated too low"])
async def test_of_a_hundred_long_prompts_none_is_refused(
    contexts: tuple[int | None, int | None], counted_tokens: int
) -> None:
    short, long = FakeHttp(), FakeHttp()
    short.answers, long.answers = [refusal() for _ in range(100)], [answer() for _ in range(100)]
    async with gateway(short, long) as made:
        offer(made, a=contexts[0], b=contexts[1])
        for number in range(100):
            client, call = Client(), Call(f"r{number}", "m", counted_tokens, 64, HASHES, output_limit=16)
            await made.deliver_call(client, call)
            assert (client.status, client.headers[b"plait-engine"]) == (200, b"b")
        knows = contexts[0] is not None and counted_tokens > contexts[0]
        assert len(short.requests) == 0 if knows else len(short.requests) > 0
        assert nothing_has_failed(made)
