"""Streams that have waited, translated for clients of another API: what is told meanwhile, and every event after it."""

from __future__ import annotations

from typing import Any

import pytest

from plait.backends.translation.translation import TRANSLATIONS
from plait.gateway.answers.completions import COMPLETION
from plait.gateway.api.call_api import TranslatedAnswer
from plait.gateway.asgi import AsgiSink
from plait.gateway.calls.gate import HeldStream

STREAM = [(b"content-type", b"text/event-stream")]
CHUNK = b'data: {"model": "m", "choices": [{"index": 0, "delta": {"content": "first"}}]}\n\n'


@pytest.mark.parametrize(
    ("path", "signs", "first"),
    [
        ("/v1/responses", ["response.created", "response.in_progress", "keepalive"], "response.output_item.added"),
        ("/v1/messages", ["ping", "ping"], "message_start"),
    ],
)
async def test_signs_of_life_come_in_the_clients_way_before_the_first_event(
    path: str, signs: list[str], first: str
) -> None:
    sent = list[bytes]()

    async def to_client(message: Any) -> None:
        sent.append(message.get("body", b""))

    translation = TRANSLATIONS[path]
    translated = TranslatedAnswer(to_client, translation, translation.answer({}))
    held = HeldStream(AsgiSink(translated.send), COMPLETION, "r1")
    held.tell("waiting position=1 expected_s=4")
    held.start(200, [*STREAM, (b"plait-engine", b"a")])
    held.write(CHUNK)
    await held.flush()
    lines = b"".join(sent).decode().splitlines()
    assert [line for line in lines if line.startswith(":")] == [": waiting position=1 expected_s=4", ": plait-engine=a"]
    events = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert events[: len(signs) + 1] == [*signs, first]
