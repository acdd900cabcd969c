"""Bodies that cannot be decoded as they are: read as they are meant, and sent on so that an engine can read them."""

from __future__ import annotations

import json

import pytest

from plait.backends.translation.translation import COUNT_PATH
from plait.gateway.fleet.served_models import ModelNames
from plait.gateway.guests.responses.background_call import RESPONSES_PATH
from plait.gateway.guests.translation.translated_api import MESSAGES_PATH
from tests.call_routes import ROUTES
from tests.gateway.api.fake_relay import CHAT, CHAT_ANSWER, HI, Api, body_for
from tests.gateway.guests.programs.chained_gateway import served_calls

ANY_ROUTE = {"messages": HI, "max_tokens": 5, "input": "hi", "query": "hi", "documents": ["hi"]}
TRANSLATED = {MESSAGES_PATH, RESPONSES_PATH}


@pytest.mark.parametrize(
    ("path", "lacking"),
    [
        *((path, set[str]()) for path, route in ROUTES.items() if path != COUNT_PATH and not route.file),
        *((path, TRANSLATED) for path in sorted(TRANSLATED)),
    ],
)
async def test_half_a_pair_and_no_model(api: Api, path: str, lacking: set[str]) -> None:
    api.router.models.given = ModelNames()
    api.router.health.answered("a", {"m": 1_000}, routes=frozenset(ROUTES.keys() - lacking))
    api.relay.answer = json.dumps(CHAT_ANSWER).encode()
    response = await api.post(path, json.dumps({"model": None, **ANY_ROUTE, "x": "a \ud83d \\ud83d"}).encode())
    assert response.status_code == 200, response.text
    asked = api.relay.deliveries[-1]
    got = json.loads(body_for(asked))
    assert (got["model"], got["x"]) == ("m", "a \ufffd \\ud83d")


async def test_half_a_pair_in_a_prompt_is_counted_as_the_engine_gets_it(api: Api) -> None:
    half, whole = (
        json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
        for text in ("x \udc00", "x \ufffd")
    )
    deliveries = [await api.asked(CHAT, body) for body in (half, whole)]
    assert deliveries[0].body.original == deliveries[1].body.original == whole
    assert deliveries[0].call.prompt_hash == deliveries[1].call.prompt_hash


async def test_half_a_pair_in_values_submitted_prompts_and_programs() -> None:
    async with served_calls() as served:
        await served.value("x", "1 \ud83d")
        assert (await served.submit("\udc00 {{x}} {{y}}", "y", inputs=("x",))).status == 200
        call = {"model": "m", "prompt": "\ud83d {{z}}", "placeholders": [{"name": "z", "in_out": True}]}
        program = await served.send("/v1/programs", {"session": "p", "calls": [call], "gets": {"z": None}})
        assert [text.strip() for text in served.engine.running] == ["\ufffd 1 \ufffd", "\ufffd"]
        for text in [*served.engine.running]:
            await served.engine.answer(text, "done")
        assert (program.status, (await served.get("y")).json["value"]) == (200, "done")
