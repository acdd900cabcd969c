"""The routes whose requests are calls: POSTs that an engine answers. Any other path is no route of a call.

The gateway interprets chat and text completions: it tokenizes their prompts and takes all of Plait's annotations. A
request on any other of these routes is forwarded to an engine that has the route, and placed by load alone, because the
gateway does not know its prompt. Guests bring further routes (`gateway/doors.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from plait.backends.errors import CallerError
from plait.backends.protocol.api_errors import COMPLETION_ERRORS, ApiErrors
from plait.backends.protocol.openai import ChatRequest, CompletionRequest, Request
from plait.gateway.answers.completions import COMPLETION, AnswerForm
from plait.gateway.answers.other_answers import MEDIA, OBJECT
from plait.gateway.asgi import ClientSink
from plait.gateway.calls.annotations import Annotations

CHAT_PATH: Final = "/v1/chat/completions"
TEXT_PATH: Final = "/v1/completions"

KINDS: Final[Mapping[str, type[ChatRequest | CompletionRequest]]] = {
    CHAT_PATH: ChatRequest,
    TEXT_PATH: CompletionRequest,
}
"""The type as which the gateway parses the body of a completion."""


@dataclass(frozen=True, slots=True, eq=False)
class CallRoute:
    path: str

    form: AnswerForm
    """How the engine's answers are read."""

    summary: str
    """For the OpenAPI document, as is `example`."""

    example: Mapping[str, Any] = field(default_factory=dict)
    """A body."""

    computes: bool = True
    """Whether the model runs. A call for which no model runs counts as no work in placement."""

    file: str = ""
    """The field with the file, where the body is multipart/form-data. Such a body is read by the route's `Preparer`."""

    names_answer: Callable[[ClientSink, str], ClientSink] | None = None
    """A stage of all of its answers, errors too, which gets the request's id."""

    has_websocket: bool = False
    """Whether the API that it belongs to has WebSockets, so that clients ask for one."""

    owns_below: bool = False
    """Whether every path below it belongs to its API, which writes errors in a form of its own."""

    def check(self, annotations: Annotations) -> None:
        """Raises `CallerError` for annotations that need the answer's text, which is not read on this route."""
        if not annotations.is_label:
            raise CallerError(
                f"{self.path} takes no inputs, output, condition or objective of a session: its answer is no text.",
                param="plait",
                code="invalid_annotation",
            )


MESSAGES: Final = [{"role": "user", "content": "Say hello."}]
"""For examples."""

_RANKED: Final = {"model": "demo", "query": "greetings", "documents": ["hello", "stone"]}
_SCORED: Final = {"model": "demo", "text_1": "hello", "text_2": ["hi", "stone"]}
_EMBEDDED: Final = {"model": "demo", "input": "Hello"}
_SPOKEN: Final = {"model": "demo", "voice": "alloy", "input": "Hello"}

ROUTES: Final[Mapping[str, CallRoute]] = {
    route.path: route
    for route in (
        CallRoute(CHAT_PATH, COMPLETION, "Complete a chat", {"model": "demo", "messages": MESSAGES, "max_tokens": 16}),
        CallRoute(TEXT_PATH, COMPLETION, "Complete a text", {"model": "demo", "prompt": "Hello", "max_tokens": 16}),
        CallRoute("/v1/embeddings", OBJECT, "Embed texts", _EMBEDDED),
        CallRoute("/v1/rerank", OBJECT, "Rank documents for a query", _RANKED),
        CallRoute("/v2/rerank", OBJECT, "Rank documents for a query", _RANKED),
        CallRoute("/rerank", OBJECT, "Rank documents for a query", _RANKED),
        CallRoute("/v1/score", OBJECT, "Score pairs of texts", _SCORED),
        CallRoute("/score", OBJECT, "Score pairs of texts", _SCORED),
        CallRoute("/v1/classify", OBJECT, "Classify texts", _EMBEDDED),
        CallRoute("/classify", OBJECT, "Classify texts", _EMBEDDED),
        CallRoute("/pooling", OBJECT, "What a pooling model makes of texts", _EMBEDDED),
        CallRoute("/v1/moderations", OBJECT, "Judge whether texts or images are harmful", _EMBEDDED),
        CallRoute("/v1/images/generations", MEDIA, "Make images", {"model": "demo", "prompt": "A cat", "n": 1}),
        CallRoute("/v1/audio/speech", MEDIA, "Speak a text", _SPOKEN),
        CallRoute(
            "/tokenize",
            OBJECT,
            "The tokens of a prompt or a chat",
            {"model": "demo", "prompt": "Hello"},
            computes=False,
        ),
        CallRoute("/detokenize", OBJECT, "The text of tokens", {"model": "demo", "tokens": [1, 2, 3]}, computes=False),
    )
}
"""Those of the kernel."""


class CallRoutes(dict[str, CallRoute]):
    """Routes of calls, by path."""

    def errors_of(self, path: str) -> ApiErrors:
        """How the path's API writes errors: as OpenAI's completions do, unless the path is another API's."""
        route = self.get(path)
        if route is None:
            route = next((one for one in self.values() if one.owns_below and path.startswith(f"{one.path}/")), None)
        return COMPLETION_ERRORS if route is None else route.form.errors


class ForwardedRequest(Request, frozen=True, kw_only=True):
    """The fields of a forwarded body that the gateway reads."""
