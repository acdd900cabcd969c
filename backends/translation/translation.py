"""The translation of other APIs to chat completions and back. `TRANSLATIONS` has one for each path.

`to_chat` makes a chat-completions body of a request. The engine answers that body, and a `TurnTranslator` turns the
engine's answer into the API's, whole or event by event. The room has no I/O. Only `new_identity` is not pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import msgspec

from plait.backends.translation import messages_request, messages_tools, responses_request, responses_tools
from plait.backends.translation.answer_translator import Identity, Turn, TurnTranslator, new_identity
from plait.backends.translation.fields import Json, Seal
from plait.backends.translation.messages import MessageTurn
from plait.backends.translation.responses import ResponseTurn

COUNT_PATH: Final = "/v1/messages/count_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """One API, for all requests. Its functions get the fields of a decoded body, which stay unchanged."""

    path: str
    """The path of the API's route, such as `/v1/responses`."""

    to_chat: Callable[[Mapping[str, Any]], Json]
    """Makes the fields of a chat-completions body.

    Fields that the API does not know, such as `top_k`, are passed on. A stream requests its usage. Raises CallerError,
    with `param`, for malformed fields and for fields that chat completions cannot express.
    """

    to_count: Callable[[Mapping[str, Any]], Json]
    """As `to_chat`, for a request to count the prompt's tokens."""

    count: Mapping[str, object]
    """The fields of the answer to such a request, besides `input_tokens`."""

    ignored: Callable[[Mapping[str, Any]], list[str]]
    """The parts of a request that `to_chat` leaves out, each with its place, as in `tools[8]:web_search`."""

    turn: Callable[[Mapping[str, Any], Identity, Seal | None], Turn]

    def counted(self, input_tokens: int) -> bytes:
        return msgspec.json.encode({**self.count, "input_tokens": input_tokens})

    def answer(self, fields: Mapping[str, Any], seal: Seal | None = None) -> TurnTranslator:
        """The translator of the answer to a request. `seal` seals thoughts for clients that keep them only so."""
        return TurnTranslator(self.turn(fields, new_identity(), seal))


_RESPONSES: Final = Translation(
    path="/v1/responses",
    to_chat=responses_request.chat_request,
    to_count=responses_request.chat_request,
    count={"object": "response.input_tokens"},
    ignored=responses_tools.ignored_tools,
    turn=ResponseTurn,
)
_MESSAGES: Final = Translation(
    path="/v1/messages",
    to_chat=messages_request.chat_request,
    to_count=messages_request.prompt_request,
    count={},
    ignored=messages_tools.ignored_tools,
    turn=MessageTurn,
)
TRANSLATIONS: Final[Mapping[str, Translation]] = MappingProxyType({one.path: one for one in (_RESPONSES, _MESSAGES)})
