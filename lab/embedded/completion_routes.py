"""The routes of completions and their prompts: OpenAI's, the APIs translated to chat completions, and `/tokenize`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from plait.backends.errors import CallerError, NotFoundError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest, check_request, decode_body, parse_request
from plait.backends.translation.answer_translator import TurnTranslator
from plait.backends.translation.translation import COUNT_PATH, TRANSLATIONS
from plait.lab.embedded.completion import Completion, complete_chat, complete_text
from plait.lab.embedded.example_json import requested_json
from plait.lab.embedded.prompts import chat_tokens
from plait.lab.embedded.serving import Serving, json_response

_FIELDS = msgspec.json.Decoder(dict[str, Any])


class CompletionRoutes:
    """The routes that generate text, over one engine."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.routes = [
            serving.route("/v1/chat/completions", self._chat),
            serving.route("/v1/completions", self._text),
            *(self._translated(path) for path in TRANSLATIONS),
            serving.route(COUNT_PATH, self._count_tokens),
        ]

    async def _chat(self, request: Request) -> Response:
        return CompletionResponse(self._complete_chat(request, await request.body()))

    async def _text(self, request: Request) -> Response:
        body = await request.body()
        asked = parse_request(body, CompletionRequest)
        check_request(asked)
        return CompletionResponse(complete_text(asked, self._serving.target(request, asked), requested_json(body)))

    def _complete_chat(self, request: Request, body: bytes) -> Completion:
        asked = parse_request(body, ChatRequest)
        check_request(asked)
        return complete_chat(asked, self._serving.target(request, asked), requested_json(body))

    def _translated(self, path: str) -> Route:
        translation = TRANSLATIONS[path]

        async def answer(request: Request) -> Response:
            fields: dict[str, Any] = decode_body(await request.body(), _FIELDS)
            _refuse_stored(fields)
            completion = self._complete_chat(request, msgspec.json.encode(translation.to_chat(fields)))
            return CompletionResponse(completion, translation.answer(fields))

        return self._serving.route(path, answer)

    async def _count_tokens(self, request: Request) -> Response:
        translation = TRANSLATIONS["/v1/messages"]
        fields: dict[str, Any] = decode_body(await request.body(), _FIELDS)
        asked = parse_request(msgspec.json.encode(translation.to_count(fields)), ChatRequest)
        self._serving.model.check(asked.model)
        tokens = chat_tokens(asked, self._serving.model.tokenizer)
        return Response(translation.counted(len(tokens)), media_type="application/json")


class CompletionResponse(Response):
    """Sends a completion, whole or as events. If the client disconnects, its calls are aborted at once."""

    def __init__(self, completion: Completion, translator: TurnTranslator | None = None) -> None:
        super().__init__()
        self._completion = completion
        self._translator = translator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(scope, receive, send))
        watching = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._completion.abort()
            watching.cancel()
            sending.cancel()
            results = await asyncio.gather(sending, watching, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._completion.stream:
            await self._whole(await self._completion.whole())(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._completion.events():
            body = event if self._translator is None else self._translator.feed(event)
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _whole(self, answer: dict[str, Any]) -> Response:
        if self._translator is None:
            return json_response(answer)
        return Response(self._translator.whole(msgspec.json.encode(answer)), media_type="application/json")


def _refuse_stored(fields: Mapping[str, Any]) -> None:
    """Responses are not stored here, as in vLLM by default."""
    stored = fields.get("previous_response_id")
    if stored is not None:
        raise NotFoundError(f"Response with id {str(stored)[:80]!r} not found.", param="previous_response_id")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class TokenizeRequest(msgspec.Struct, frozen=True):
    """`POST /tokenize`: a prompt. A body without it has the fields of a chat."""

    prompt: str | None = None
    model: str = ""
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str = ""


_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


class TokenRoutes:
    """`/tokenize` and `/detokenize`, in vLLM's shapes, over one model's tokenizer."""

    def __init__(self, serving: Serving) -> None:
        self._model = serving.model
        self.routes = [
            serving.route("/tokenize", self._tokenize),
            serving.route("/detokenize", self._detokenize),
        ]

    async def _tokenize(self, request: Request) -> Response:
        body = await request.body()
        asked = decode_body(body, _TOKENIZE)
        self._model.check(asked.model)
        tokenizer = self._model.tokenizer
        if asked.prompt is None:
            chat = parse_request(body, ChatRequest)
            check_request(chat)
            tokens = chat_tokens(chat, tokenizer)
        else:
            tokens = tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self._model.max_context_tokens,
            "tokens": tokens,
            "token_strs": [tokenizer.decode([token]) for token in tokens] if asked.return_token_strs else None,
        }
        return json_response(answer)

    async def _detokenize(self, request: Request) -> Response:
        asked = decode_body(await request.body(), _DETOKENIZE)
        self._model.check(asked.model)
        try:
            return json_response({"prompt": self._model.tokenizer.decode(asked.tokens)})
        except (ValueError, LookupError, OverflowError) as error:
            raise CallerError("'tokens' has an id that the vocabulary lacks", param="tokens") from error
