"""What a call leaves in the log."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from plait.backends.errors import EngineStatusError, EngineTimeoutError, NoEngineError
from tests.gateway.calls.scripted_engines import JSON, Client, Exchange, FakeHttp, gateway

WHOLE = (
    b'{"choices":[{"index":0,"finish_reason":"length","text":"x"}],"usage":{"prompt_tokens":257,"completion_tokens":3}}'
)


async def test_the_line_says_how_it_was_answered() -> None:
    with capture_logs() as logs:
        async with gateway(FakeHttp(Exchange(200, JSON, [WHOLE]))) as made:
            await made.deliver_whole(Client())
    (line,) = (entry for entry in logs if entry["event"] == "call")
    assert (line["path"], line["status"], line["stream"]) == ("/v1/completions", 200, False)
    assert (line["finish_reason"], line["outcome"], line["output_tokens"]) == ("length", "ok", 3)


async def test_a_refusal_has_its_status() -> None:
    with capture_logs() as logs:
        async with gateway(FakeHttp(Exchange(422, JSON, [b'{"error":{"message":"no"}}']))) as made:
            await made.deliver_whole(Client())
    (line,) = (entry for entry in logs if entry["event"] == "call")
    assert (line["status"], line["finish_reason"], line["outcome"]) == (422, None, "refused")


async def test_a_call_without_an_engine_has_its_status() -> None:
    with capture_logs() as logs:
        async with gateway(FakeHttp()) as made:
            made.router.health.unreachable("a")
            with pytest.raises(NoEngineError):
                await made.deliver_whole(Client())
    (line,) = (entry for entry in logs if entry["event"] == "call")
    assert (line["status"], line["engine"]) == (503, None)


async def test_an_engines_words_which_may_quote_the_prompt_are_not_in_the_log() -> None:
    quoting = Exchange(503, JSON, [b'{"error":{"message":"no room: my secret prompt"}}'])
    with capture_logs() as logs:
        async with gateway(FakeHttp(quoting)) as made:
            with pytest.raises(EngineStatusError, match="my secret prompt"):
                await made.deliver_whole(Client())
    assert "my secret prompt" not in repr(logs)
    failed = [
        (line["cause"], line["error"], line["detail"]) for line in logs if line["event"] == "engine failed a call"
    ]
    assert ("status_503", None, None) in failed


async def test_the_gateways_own_words_about_an_engine_are_in_the_log() -> None:
    with capture_logs() as logs:
        async with gateway(FakeHttp(EngineTimeoutError("engine a went silent"))) as made:
            with pytest.raises(EngineTimeoutError):
                await made.deliver_whole(Client())
    assert [line["error"] for line in logs if line["event"] == "engine failed a call"] == ["engine a went silent"]
