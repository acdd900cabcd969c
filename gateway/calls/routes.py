"""The routes whose requests are calls: POSTs that an engine answers. Any other path is no route of a call.

The gateway interprets chat and text completions: it tokenizes their prompts and takes all of Plait's annotations. A
request on any other route is forwarded to an engine that has the route, and placed by load alone, because the gateway
does not know its prompt. Responses and messages may be translated to chats instead (`gateway/api/translated_api.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from plait.backends.errors import CallerError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest, Request
from plait.gateway.answers.completions import COMPLETION, AnswerForm
from plait.gateway.answers.other_answers import MEDIA, MESSAGE, MESSAGE_TOKENS, OBJECT, RESPONSE, RESPONSE_TOKENS
from plait.gateway.calls.annotations import Annotations

CHAT_PATH: Final = "/v1/chat/completions"
TEXT_PATH: Final = "/v1/completions"
RESPONSES_PATH: Final = "/v1/responses"
MESSAGES_PATH: Final = "/v1/messages"
COUNT_PATH: Final = "/v1/messages/count_tokens"
INPUT_TOKENS_PATH: Final = "/v1/responses/input_tokens"

KINDS: Final[Mapping[str, type[ChatRequest | CompletionRequest]]] = {
    CHAT_PATH: ChatRequest,
    TEXT_PATH: CompletionRequest,
}
"""The type as which the gateway parses the body of a completion."""


@dataclass(frozen=True, slots=True)
class CallRoute:
    path: str

    form: AnswerForm
    """How the engine's answers are read."""

    summary: str
    computes: bool = True
    """Whether the model runs. A call for which no model runs counts as no work in placement."""

    has_files: bool = False
    """Whether the body is multipart/form-data."""

    def check(self, annotations: Annotations) -> None:
        """Raises `CallerError` for annotations that need the answer's text, which is not read on this route."""
        if not annotations.is_label:
            raise CallerError(
                f"{self.path} takes no inputs, output, condition or objective of a session: its answer is no text.",
                param="plait",
                code="invalid_annotation",
            )


ROUTES: Final[Mapping[str, CallRoute]] = {
    route.path: route
    for route in (
        CallRoute(CHAT_PATH, COMPLETION, "Complete a chat"),
        CallRoute(TEXT_PATH, COMPLETION, "Complete a text"),
        CallRoute(RESPONSES_PATH, RESPONSE, "Answer in OpenAI's Responses API"),
        CallRoute(INPUT_TOKENS_PATH, RESPONSE_TOKENS, "Count the tokens of a response's input", computes=False),
        CallRoute(MESSAGES_PATH, MESSAGE, "Answer in Anthropic's Messages API"),
        CallRoute(COUNT_PATH, MESSAGE_TOKENS, "Count the tokens of a message", computes=False),
        CallRoute("/v1/embeddings", OBJECT, "Embed texts"),
        CallRoute("/v1/rerank", OBJECT, "Rank documents for a query"),
        CallRoute("/v2/rerank", OBJECT, "Rank documents for a query"),
        CallRoute("/rerank", OBJECT, "Rank documents for a query"),
        CallRoute("/v1/score", OBJECT, "Score pairs of texts"),
        CallRoute("/score", OBJECT, "Score pairs of texts"),
        CallRoute("/v1/classify", OBJECT, "Classify texts"),
        CallRoute("/classify", OBJECT, "Classify texts"),
        CallRoute("/pooling", OBJECT, "What a pooling model makes of texts"),
        CallRoute("/v1/moderations", OBJECT, "Judge whether texts or images are harmful"),
        CallRoute("/v1/images/generations", MEDIA, "Make images"),
        CallRoute("/v1/images/edits", MEDIA, "Change an image", has_files=True),
        CallRoute("/v1/audio/speech", MEDIA, "Speak a text"),
        CallRoute("/v1/audio/transcriptions", MEDIA, "Write down what is said", has_files=True),
        CallRoute("/v1/audio/translations", MEDIA, "Write down in English what is said", has_files=True),
        CallRoute("/tokenize", OBJECT, "The tokens of a prompt or a chat", computes=False),
        CallRoute("/detokenize", OBJECT, "The text of tokens", computes=False),
    )
}  # fmt: skip


class ForwardedRequest(Request, frozen=True, kw_only=True):
    """The fields of a forwarded body that the gateway reads."""
