"""Streams that have waited, translated for clients of another API: what is told meanwhile, and every event after it."""

from __future__ import annotations

from typing import Any, cast

from plait.backends.translation.translation import AnswerTranslator, Translation
from plait.gateway.answers.completions import COMPLETION
from plait.gateway.api.call_api import TranslatedAnswer
from plait.gateway.asgi import AsgiSink
from plait.gateway.calls.gate import HeldStream

STREAM = [(b"content-type", b"text/event-stream")]


class Loud:
    """Translates into capitals."""

    def feed(self, events: bytes) -> bytes:
        return events.upper()


async def test_the_first_events_after_a_wait_are_translated_and_notes_are_not() -> None:
    sent = list[bytes]()

    async def to_client(message: Any) -> None:
        sent.append(message.get("body", b""))

    translated = TranslatedAnswer(to_client, cast("Translation", None), cast("AnswerTranslator", Loud()))
    held = HeldStream(AsgiSink(translated.send), COMPLETION, "r1")
    held.waits(1, 4.0)
    headers = [*STREAM, (b"plait-engine", b"a")]
    held.start(200, headers)
    held.write(b"data: first\n\n")
    await held.flush()
    assert b"".join(sent) == b": waiting position=1 expected_s=4\n\n: plait-engine=a\n\nDATA: FIRST\n\n"
