"""Where calls go and what the gateway says of it: response headers, cached prefixes, models, metrics."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from e2e.conftest import two_models
from e2e.sdk import asking
from e2e.server_process import eventually
from e2e.servers import Fleet, Launcher

_numbers = itertools.count()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet of this module's own: where a call goes depends on all that were placed before it."""
    with Launcher(tmp_path_factory.mktemp("placement")) as launch:
        yield two_models(launch)


def fresh_prefix(words: int = 600) -> str:
    """A long text that no other test has sent."""
    number = next(_numbers)
    return " ".join(f"chapter {number} line {line}" for line in range(words // 4))


def headers_of(client: OpenAI, headers: dict[str, str] | None = None, **request: Any) -> tuple[Any, Any]:
    """The response headers and the answer (for a stream, its chunks)."""
    raw = client.chat.completions.with_raw_response.create(**request, extra_headers=headers)
    answer: Any = raw.parse()
    return raw.headers, list(answer) if request.get("stream") else answer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_response_tells_where_it_ran(client: OpenAI, stream: bool) -> None:
    headers, _ = headers_of(client, **asking(fresh_prefix(), stream=stream))
    assert headers["plait-engine"] in {"demo-1", "demo-2"}
    assert headers["plait-placement"] == "explore"
    assert headers["plait-cached-tokens"] == "0"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_id_is_echoed_or_given(client: OpenAI, fleet: Fleet, stream: bool) -> None:
    given, answer = headers_of(client, {"x-request-id": "my-request-17"}, **asking("Hello.", stream=stream))
    assert given["x-request-id"] == "my-request-17"
    assert (answer[0] if stream else answer).id == "chatcmpl-my-request-17"  # the engine got it too
    ids = [headers_of(client, **asking("Hello.", stream=stream))[0]["x-request-id"] for _ in range(2)]
    assert len({*ids, ""}) == 3

    refused = fleet.gateway.post("/v1/chat/completions", content=b"{", headers={"x-request-id": "my-request-18"})
    assert refused.headers["x-request-id"] == "my-request-18"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_promise_is_answered(client: OpenAI, fleet: Fleet, stream: bool) -> None:
    def told(what: str, ms: float) -> str | None:
        asked = asking(fresh_prefix(), stream=stream, extra_body={"plait": {f"slo_{what}_ms": ms}})
        found: str | None = headers_of(client, **asked)[0].get("plait-slo")
        return found

    assert told("jct", 60_000) == "expected"
    judged = [told("tpot", 60_000), told("ttft", 60_000), told("ttft", 0.01)]
    assert judged == ([None, "expected", "missed"] if stream else ["not-judged"] * 3)
    if stream:
        assert fleet.gateway.metric("plait_slo_calls_total", slo="ttft", met="no") >= 1


def test_a_second_call_goes_to_the_engine_that_holds_its_prefix(client: OpenAI) -> None:
    prefix = fresh_prefix()
    first, answer = headers_of(client, **asking(f"{prefix} First question?"))
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    for question in ("Second question?", "A third one?"):
        headers, answer = headers_of(client, **asking(f"{prefix} {question}"))
        assert (headers["plait-placement"], headers["plait-engine"]) == ("exploit", first["plait-engine"])
        cached_tokens = answer.usage.prompt_tokens_details.cached_tokens
        assert cached_tokens > answer.usage.prompt_tokens / 2
        assert 0 < int(headers["plait-cached-tokens"]) <= cached_tokens


def test_the_next_turn_of_a_conversation_finds_the_last_one(client: OpenAI) -> None:
    messages = [{"role": "user", "content": fresh_prefix()}]
    first, answer = headers_of(client, model="demo", messages=messages, max_tokens=100)
    text = answer.choices[0].message.content
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    headers, second = headers_of(client, model="demo", messages=messages, max_tokens=8)
    assert (headers["plait-placement"], headers["plait-engine"]) == ("exploit", first["plait-engine"])
    assert second.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens  # the answer's tokens as well


def test_a_streams_usage_tells_what_was_cached(client: OpenAI) -> None:
    prefix = fresh_prefix()
    request = asking(prefix, stream=True, stream_options={"include_usage": True})
    cached_tokens = [headers_of(client, **request)[1][-1].usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert cached_tokens[0] == 0 < cached_tokens[1]


def test_unlike_prompts_spread_over_the_fleet(client: OpenAI) -> None:
    engines = {headers_of(client, **asking(fresh_prefix()))[0]["plait-engine"] for _ in range(8)}
    assert engines == {"demo-1", "demo-2"}


def test_each_model_is_served_by_its_engines(client: OpenAI) -> None:
    for model, engines in (("small", {"small-1"}), ("demo", {"demo-1", "demo-2"})):
        headers, answer = headers_of(client, **(asking("Which one are you?") | {"model": model}))
        assert headers["plait-engine"] in engines
        assert answer.model == model


def test_a_prefix_cached_for_one_model_is_not_taken_for_anothers(client: OpenAI) -> None:
    text = fresh_prefix(words=160)
    headers_of(client, **(asking(text) | {"model": "small"}))
    headers, answer = headers_of(client, **asking(text))
    assert (headers["plait-cached-tokens"], answer.usage.prompt_tokens_details.cached_tokens) == ("0", 0)


def test_metrics_count_what_happened(client: OpenAI, fleet: Fleet) -> None:
    gateway = fleet.gateway

    def counts(engine: str) -> list[float]:
        return [
            gateway.metric("plait_calls_total", engine=engine, model="demo", outcome="ok"),
            gateway.metric("plait_placements_total", engine=engine, model="demo", reason="exploit"),
            gateway.metric("plait_prompt_tokens_total", engine=engine),
            gateway.metric("plait_output_tokens_total", engine=engine),
            gateway.metric("plait_cached_tokens_reported_total", engine=engine),
            gateway.metric("plait_ttft_seconds_count", engine=engine),
            gateway.metric("plait_e2e_seconds_count", engine=engine),
        ]

    prefix = fresh_prefix()
    engine = headers_of(client, **asking(f"{prefix} One?"))[0]["plait-engine"]
    before = counts(engine)
    request = asking(f"{prefix} Two?", stream=True, stream_options={"include_usage": True})
    usage = headers_of(client, **request)[1][-1].usage
    cached_tokens = usage.prompt_tokens_details.cached_tokens
    # The client stops at [DONE]; the call is counted when its engine's answer has ended behind it.
    eventually(lambda: counts(engine)[0] > before[0])
    changes = [after - earlier for after, earlier in zip(counts(engine), before, strict=True)]
    assert changes == [1, 1, usage.prompt_tokens, 8, cached_tokens, 1, 1]


def test_metrics_show_the_fleet(client: OpenAI, fleet: Fleet) -> None:
    headers_of(client, **asking(fresh_prefix()))
    gateway = fleet.gateway
    assert all(gateway.metric("plait_engine_up", engine=engine) == 1 for engine in fleet.engines)
    assert gateway.metric("plait_engine_outstanding_calls") == 0
    assert gateway.metric("plait_engine_window_seconds") > 0
    assert gateway.metric("plait_engine_resident_tokens") > 0
    assert gateway.metric("plait_prefix_tree_blocks") > 0
