"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from plait.backends.embedded.prompts import chat_tokens
from plait.backends.embedded.serving import Serving, json_response
from plait.backends.errors import CallerError
from plait.backends.protocol.openai import ChatRequest, check_request, decode_body, parse_request


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
    """The routes, over one model's tokenizer."""

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
