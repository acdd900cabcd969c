"""Rewrites engines' answers on their way to the client: continued responses, and answers to translated requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Protocol

from starlette.types import Message, Send

from plait.backends.errors import ContextLengthError
from plait.backends.http.content_types import is_event_stream
from plait.backends.translation.chat_answer import Usage
from plait.backends.translation.translation import AnswerTranslator, Translation
from plait.gateway.answers.error_texts import error_of
from plait.gateway.asgi import Headers

_OF_THE_BODY: Final = frozenset((b"content-length", b"content-type"))


class Rewriter(Protocol):
    """Turns the engine's bytes into the client's: a `whole` body of status 200, or whole events of a stream."""

    def whole(self, answer: bytes) -> bytes: ...

    def feed(self, events: bytes) -> bytes: ...


class RewrittenAnswer:
    """Rewrites one answer: `send` takes its ASGI messages.

    The events of a stream are rewritten as they come. Any other body is buffered until it is complete.
    """

    def __init__(self, to_client: Send, rewriter: Rewriter) -> None:
        self._to_client = to_client
        self._rewriter = rewriter
        self._head: Message | None = None  # sent with the body, unless the answer is a stream
        self._is_stream = False
        self._parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_stream = message["status"] == 200 and is_event_stream(message["headers"])
            self._head = message = {**message, "headers": self.headers(message["headers"])}
            if self._is_stream:
                await self._to_client(message)
        elif self._is_stream:
            await self._to_client({**message, "body": self.events(message.get("body", b""))})
        else:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._send_whole(b"".join(self._parts))

    def headers(self, headers: Headers) -> Headers:
        return headers

    def events(self, events: bytes) -> bytes:
        """The client's events for whole events of the engine."""
        return self._rewriter.feed(events)

    def error(self, status: int, answer: bytes) -> bytes:  # noqa: ARG002
        """The client's error body. `answer` is the engine's body, which came with this `status`."""
        return answer

    async def _send_whole(self, answer: bytes) -> None:
        head = self._head
        assert head is not None
        body = self._rewriter.whole(answer) if head["status"] == 200 else self.error(head["status"], answer)
        kept: Headers = [item for item in head["headers"] if item[0] not in _OF_THE_BODY]
        headers = [
            *kept,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._to_client({**head, "headers": headers})
        await self._to_client({"type": "http.response.body", "body": body})


IGNORED: Final = b"plait-ignored"
IGNORED_CHARACTERS: Final = 1_000
_UNSAFE: Final = re.compile(r"[^\w.:\[\]-]", re.ASCII)
_CACHED: Final = b"plait-cached-tokens"
_CACHED_COMMENT: Final = re.compile(rb"^: .*\bplait-cached-tokens=(\d+)", re.MULTILINE)
"""The header as a comment in a stream: a keep-alive comment may have sent the head before the headers were known."""


def ignored_headers(ignored: Sequence[str]) -> Headers:
    """The header that lists the fields that a translation left out of the request; empty if it left out none."""
    said = ", ".join(_UNSAFE.sub("?", one) for one in ignored)[:IGNORED_CHARACTERS].encode()
    return [(IGNORED, said)] if said else []


class TranslatedAnswer(RewrittenAnswer):
    """Translates the answer to a request that was translated to a chat, without the request's fields in `ignored`."""

    def __init__(
        self, to_client: Send, translator: AnswerTranslator, translation: Translation, ignored: Sequence[str] = ()
    ) -> None:
        super().__init__(to_client, translator)
        self._translator = translator
        self._translation = translation
        self._ignored = ignored_headers(ignored)
        self._prompt_tokens = 0
        self._has_begun = False

    def expect_prompt(self, tokens: int) -> None:
        """Use this count until the engine reports its own: a stream's first event may need one."""
        self._prompt_tokens = tokens
        self._translator.expect(Usage(tokens))

    def headers(self, headers: Headers) -> Headers:
        """The engine's headers, and the header that lists the fields that were left out of the request."""
        cached = dict(headers).get(_CACHED)
        if cached is not None:
            self._expect_cached(int(cached))
        return [*headers, *self._ignored]

    def events(self, events: bytes) -> bytes:
        if not self._has_begun:
            cached = _CACHED_COMMENT.search(events)
            if cached is not None:
                self._expect_cached(int(cached[1]))
            self._has_begun = events.find(b"data:") >= 0
        return super().events(events)

    def error(self, status: int, answer: bytes) -> bytes:
        """The engine's error in the form of the client's API, with the gateway's count if the engine has none."""
        error = error_of(status, answer)
        if isinstance(error, ContextLengthError) and error.is_bound and error.prompt_fits:
            counted = min(self._prompt_tokens, (error.context_tokens or 1) - 1)
            error.prompt_tokens = max(error.prompt_tokens or 0, counted)
        return self._translation.error(error)

    def _expect_cached(self, tokens: int) -> None:
        self._translator.expect(Usage(self._prompt_tokens, cached_tokens=min(tokens, self._prompt_tokens)))
