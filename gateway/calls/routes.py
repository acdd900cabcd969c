"""The routes whose requests are calls: POSTs that an engine answers. What is not in this table is no route.

Chat and text completions are what the gateway speaks itself: their prompts are tokenized, and Plait's annotations mean
all that they can mean. A request on a route with a `translation` is either translated to chat, which makes it the same,
or forwarded as it came, if nothing has to be done to it and its engines have the route. Every other route is forwarded
to an engine that has it, and placed by load: its prompt has no part in a prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from plait.backends.errors import CallerError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest, Request
from plait.backends.translation.translation import TRANSLATIONS, Translation
from plait.gateway.answers.completions import COMPLETION, AnswerForm
from plait.gateway.answers.other_answers import MEDIA, MESSAGE, OBJECT, RESPONSE
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
"""What the gateway reads of the body of a completion."""


@dataclass(frozen=True, slots=True)
class CallRoute:
    """One route. `form` is the form of its answers, as the engine sends them.

    If a call `computes`, the model runs for it; if not, it counts as no work. A request that `has_files` is a form.
    """

    path: str
    form: AnswerForm
    summary: str
    translation: Translation | None = None
    computes: bool = True
    has_files: bool = False

    def check(self, annotations: Annotations) -> None:
        """Raises `CallerError` for what has no meaning where an answer is no text, or is not read here."""
        if not annotations.is_label:
            raise CallerError(
                f"{self.path} takes no inputs, output, condition or objective of a session: its answer is no text.",
                param="plait",
            )


ROUTES: Final[Mapping[str, CallRoute]] = {
    route.path: route
    for route in (
        CallRoute(CHAT_PATH, COMPLETION, "Complete a chat"),
        CallRoute(TEXT_PATH, COMPLETION, "Complete a text"),
        CallRoute(RESPONSES_PATH, RESPONSE, "Answer in OpenAI's Responses API", TRANSLATIONS[RESPONSES_PATH]),
        CallRoute(
            INPUT_TOKENS_PATH, OBJECT, "Count the tokens of a response's input", TRANSLATIONS[RESPONSES_PATH],
            computes=False,
        ),
        CallRoute(MESSAGES_PATH, MESSAGE, "Answer in Anthropic's Messages API", TRANSLATIONS[MESSAGES_PATH]),
        CallRoute(COUNT_PATH, OBJECT, "Count the tokens of a message", TRANSLATIONS[MESSAGES_PATH], computes=False),
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
