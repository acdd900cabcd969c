"""Where the turns of sessions go whose prompts cannot be tokenized."""

from __future__ import annotations

import pytest

from plait.gateway.asgi import AsgiSink
from plait.gateway.calls.session_engines import SessionEngines
from plait.policy.types import Call
from tests.gateway.calls.scripted_engines import DONE, FINISH, Client, Exchange, FakeHttp, gateway


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
