"""Sessions that clients name in their own ways, and where their turns go."""

from __future__ import annotations

from typing import Any

import pytest

from plait.backends.protocol.openai import ChatRequest
from plait.gateway.asgi import AsgiSink, Headers
from plait.gateway.calls.annotations import known_session
from plait.gateway.calls.session_engines import SessionEngines
from plait.policy.types import Call
from tests.gateway.calls.scripted_engines import DONE, FINISH, Client, Exchange, FakeHttp, gateway


def session(headers: Headers = (), **fields: Any) -> str:
    return known_session(headers, ChatRequest(messages=[], **fields))


@pytest.mark.parametrize("name", [b"x-claude-code-session-id", b"session_id", b"session-id", b"x-opencode-session"])
def test_agents_send_a_header(name: bytes) -> None:
    assert session([(b"accept", b"*/*"), (name, b"abc")], user="someone") == "abc"


def test_sdks_send_a_field() -> None:
    assert session(user="u", prompt_cache_key="k", safety_identifier="s") == "k"
    assert session(user="u", safety_identifier="s") == "s"
    assert session(user="u") == "u"


@pytest.mark.parametrize(
    "fields",
    [
        *({}, {"user": 5}, {"user": ""}, {"user": "x" * 300}, {"prompt_cache_key": ["k"]}),
        *({"user": "x\0"}, {"prompt_cache_key": "k\n"}, {"safety_identifier": "\ud800"}),
    ],
)
def test_what_is_no_name_is_none(fields: dict[str, Any]) -> None:
    assert session([(b"session-id", b""), (b"x-session-id", b"x" * 300), (b"session_id", b"a\tb")], **fields) == ""


def test_the_least_recently_used_sessions_are_forgotten() -> None:
    engines = SessionEngines(most=2)
    for name in ("one", "two", "one", "three"):
        engines.placed("t", name, "m", f"of {name}")
    assert [engines.engine_of("t", name, "m") for name in ("one", "two", "three")] == ["of one", None, "of three"]
    assert engines.engine_of("other", "one", "m") is None


@pytest.mark.parametrize(("tokens", "stays"), [(0, True), (257, False)])
async def test_turns_without_known_tokens_stay_on_their_engine(tokens: int, stays: bool) -> None:
    """Round robin would alternate. A prompt whose tokens are known is placed by its prefix instead."""
    answers = [Exchange(pieces=[FINISH, DONE]) for _ in range(8)]
    async with gateway(FakeHttp(*answers[:4]), FakeHttp(*answers[4:])) as fleet:
        for number in range(4):
            client = Client()
            call = Call(f"r{number}", "m", tokens, 64, ())
            await fleet.relay.deliver(fleet.asked(turn_of="s", call=call), AsgiSink(client.send))
        counts = sorted(len(engine.requests) for engine in fleet.engines.values())
        assert counts == ([0, 4] if stays else [2, 2])
