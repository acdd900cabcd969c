"""The translation of other APIs to chat completions and back. `TRANSLATIONS` has one for each path.

`to_chat` makes a chat-completions body of a request. The engine answers that body, and an `AnswerTranslator` turns the
engine's answer into the API's, whole or event by event. The room has no I/O. Only `new_identity` is not pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

from plait.backends.translation.chat_answer import Usage
from plait.backends.translation.fields import Seal
from plait.backends.translation.messages import MessagesTranslation
from plait.backends.translation.responses import ResponsesTranslation


class AnswerTranslator(Protocol):
    """Translates the answer to one request: `whole` once, or `feed` for a stream from its first event on."""

    def expect(self, usage: Usage) -> None:
        """Use these counts until the engine reports its own: a stream's first event may need some."""
        ...

    def whole(self, answer: bytes) -> bytes:
        """The API's object for a `chat.completion`. Raises EngineGarbledError for anything else."""
        ...

    def feed(self, events: bytes) -> bytes:
        """The API's events for whole events of a chat stream, however the stream is cut into calls of `feed`.

        Comments stay comments; one alone also becomes the API's own keep-alive event. An error event becomes the API's
        error event and ends the stream. `[DONE]` becomes the stream's last events. Empty if the API has no counterpart.
        """
        ...


class Translation(Protocol):
    """One API. An object has no state and serves all requests."""

    @property
    def path(self) -> str:
        """The path of the API's route, such as `/v1/responses`."""
        ...

    def to_chat(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a chat-completions body for those of a decoded body, which stay unchanged.

        Fields that the API does not know, such as `top_k`, are passed on. A stream requests its usage. Raises
        CallerError, with `param`, for malformed fields and for fields that chat completions cannot express.
        """
        ...

    def to_count(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As `to_chat`, for a request to count the prompt's tokens."""
        ...

    def counted(self, input_tokens: int) -> bytes: ...

    def ignored(self, fields: Mapping[str, Any]) -> list[str]:
        """The parts of a request that `to_chat` leaves out, each with its place, as in `tools[8]:web_search`."""
        ...

    def answer(self, fields: Mapping[str, Any], seal: Seal | None = None) -> AnswerTranslator:
        """The translator of the answer to a request. `seal` seals thoughts for clients that keep them only so."""
        ...


TRANSLATIONS: Final[Mapping[str, Translation]] = MappingProxyType(
    {translation.path: translation for translation in (ResponsesTranslation(), MessagesTranslation())}
)
