"""The stage that translates engines' answers on their way to the client."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from plait.backends.errors import ContextLengthError
from plait.backends.protocol.api_errors import ApiErrors
from plait.backends.translation.answer_translator import TurnTranslator
from plait.backends.translation.chat_answer import Usage
from plait.gateway.answers.error_texts import error_of
from plait.gateway.asgi import ClientSink, ClientStage, Headers

_OF_THE_BODY: Final = frozenset((b"content-length", b"content-type"))
_JSON: Final = (b"content-type", b"application/json")

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


class TranslatedAnswer(ClientStage):
    """Translates the answer to a request that was translated to a chat, without the request's fields in `ignored`."""

    def __init__(
        self, to: ClientSink, translator: TurnTranslator, errors: ApiErrors, ignored: Sequence[str] = ()
    ) -> None:
        super().__init__(to)
        self._translator = translator
        self._errors = errors
        self._ignored = ignored_headers(ignored)
        self._prompt_tokens = 0
        self._has_begun = False

    def expect_prompt(self, tokens: int) -> None:
        """Use this count until the engine reports its own: a stream's first event may need one."""
        self._prompt_tokens = tokens
        self._translator.expect(Usage(tokens))

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """Write the translated answer. Raises `EngineGarbledError` if the engine's is not one of a chat."""
        body = self._translator.whole(bytes(body)) if status == 200 else self.error(status, bytes(body))
        kept = [item for item in self.head(headers) if item[0] not in _OF_THE_BODY]
        self._to.whole(status, [*kept, _JSON], body)

    def write(self, body: bytes) -> None:
        """Raises the `EngineError` of an event that cannot be translated. The client has an error event for it."""
        super().write(body)
        self._check()

    def end(self, body: bytes = b"") -> None:
        """Raises the same."""
        super().end(body)
        self._check()

    def _check(self) -> None:
        problem, self._translator.problem = self._translator.problem, None
        if problem is not None:
            raise problem

    def head(self, headers: Headers) -> Headers:
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
        return self._translator.feed(events)

    def error(self, status: int, answer: bytes) -> bytes:
        """The engine's error in the form of the client's API, with the gateway's count if the engine has none."""
        error = error_of(status, answer)
        if isinstance(error, ContextLengthError) and error.is_bound and error.prompt_fits:
            counted = min(self._prompt_tokens, (error.context_tokens or 1) - 1)
            error.prompt_tokens = max(error.prompt_tokens or 0, counted)
        return self._errors.body(error)

    def _expect_cached(self, tokens: int) -> None:
        self._translator.expect(Usage(self._prompt_tokens, cached_tokens=min(tokens, self._prompt_tokens)))
