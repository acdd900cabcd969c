"""What translates an API to chat completions and back. `TRANSLATIONS` has one for each path.

`to_chat` makes a chat-completions body of a request. The engine answers it, and `answer` makes this API's answer of the
engine's. Nothing here does I/O. An answer's id and its time are taken once, by `new_identity`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

from plait.backends.errors import PlaitError
from plait.backends.translation.chat_answer import Usage
from plait.backends.translation.messages import MessagesTranslation
from plait.backends.translation.responses import ResponsesTranslation


class AnswerTranslator(Protocol):
    """The answer to one request. Use either `whole`, once, or `feed`, for one stream from its first event on."""

    def expect(self, usage: Usage) -> None:
        """Take these counts until the engine tells its own. A stream's first event may have them."""
        ...

    def whole(self, answer: bytes) -> bytes:
        """The API's object for a `chat.completion`. Raises EngineGarbledError if it is none."""
        ...

    def feed(self, events: bytes) -> bytes:
        """The API's events for whole events of a chat stream. The bytes do not depend on how the stream is cut.

        Comments stay comments, and a comment alone becomes the API's own sign of life, too. An error event becomes the
        API's error event; what comes after it is dropped. `[DONE]` becomes the stream's ending. No bytes if the events
        mean nothing in the API.
        """
        ...


class Translation(Protocol):
    """One API. It has no state; one object serves all requests."""

    @property
    def path(self) -> str:
        """The path of the API's route, such as `/v1/responses`."""
        ...

    def to_chat(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a chat-completions body for a decoded body. `fields` stay unchanged.

        Fields that the API does not know stay as they are, such as `top_k`. A stream asks for its usage. Raises
        CallerError, with `param`, for malformed fields and for what chat completions cannot express.
        """
        ...

    def to_count(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a chat-completions body whose prompt's tokens are counted. Raises CallerError as `to_chat`."""
        ...

    def counted(self, input_tokens: int) -> bytes: ...

    def ignored(self, fields: Mapping[str, Any]) -> list[str]:
        """What of a request that `to_chat` took is left out, each with its place, as in `tools[8]:web_search`."""
        ...

    def answer(self, fields: Mapping[str, Any]) -> AnswerTranslator: ...

    def error(self, error: PlaitError) -> bytes: ...

    def error_event(self, error: PlaitError) -> bytes:
        """An error as the event of a stream. Where a translator has fed the stream, feed it OpenAI's error event."""
        ...


TRANSLATIONS: Final[Mapping[str, Translation]] = MappingProxyType(
    {translation.path: translation for translation in (ResponsesTranslation(), MessagesTranslation())}
)
