"""Embeddings, scores, ranks and classes, in vLLM's shapes. They are made at once, not in emulated time."""

from __future__ import annotations

import time
import uuid
from array import array
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from math import sqrt
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from plait.backends.embedded.serving import Serving, json_response
from plait.backends.errors import CallerError
from plait.backends.protocol.openai import CompletionRequest, decode_body

DIMENSIONS: Final = 1024
"""Without `dimensions`, as many as current embedding models have. A request may ask for fewer."""
_PLACES: Final = 16


def embedding(token_ids: Sequence[int], dimensions: int = DIMENSIONS) -> list[float]:
    """A vector of length 1; those of texts that share tokens are near each other. There must be a token.

    Each token adds 1 or -1 in a few places, which its hash chooses (a sparse random projection of the bag of tokens).
    So equal inputs have equal vectors, and texts without a common token are nearly orthogonal.
    """
    vector = [0.0] * dimensions
    for token, count in Counter(token_ids).items():
        for place, sign in _signs(token):
            vector[place % dimensions] += sign * count
    length = sqrt(sum(value * value for value in vector))
    if length == 0:  # the signs cancelled out, as can happen with one or two dimensions
        return [1.0, *vector[1:]]
    return [value / length for value in vector]


def similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of two vectors of length 1."""
    return sum(a * b for a, b in zip(one, other, strict=True))


@lru_cache(maxsize=100_000)
def _signs(token: int) -> tuple[tuple[int, int], ...]:
    """The places of a token, each with its sign."""
    digest = blake2b(token.to_bytes(8, "little"), digest_size=4 * _PLACES).digest()
    numbers = (int.from_bytes(digest[at : at + 4], "little") for at in range(0, len(digest), 4))
    return tuple((number >> 1, 1 if number & 1 else -1) for number in numbers)


Json = dict[str, Any]


class EmbeddingRequest(msgspec.Struct, frozen=True):
    """`POST /v1/embeddings`: `input` is a text, token ids, or a list of either."""

    input: Any
    model: str = ""
    encoding_format: str = "float"
    dimensions: int | None = None
    add_special_tokens: bool = True


class RerankRequest(msgspec.Struct, frozen=True):
    """`POST /rerank`: a document is a text, or an object with one. `top_n` of 0 means all."""

    query: Any
    documents: list[Any]
    model: str = ""
    top_n: int = 0


class ScoreRequest(msgspec.Struct, frozen=True):
    """`POST /score`: one text to compare with others, or pairs. The pairs of fields are names for the same."""

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None
    model: str = ""


class PoolingRequest(msgspec.Struct, frozen=True):
    """`POST /pooling`, `/classify` and `/v1/moderations`: an input as of embeddings."""

    input: Any
    model: str = ""


RequestT = TypeVar("RequestT")
_DECODERS = {
    kind: msgspec.json.Decoder(kind) for kind in (EmbeddingRequest, RerankRequest, ScoreRequest, PoolingRequest)
}


class PoolingRoutes:
    """The routes, over one model."""

    def __init__(self, serving: Serving) -> None:
        self._model = serving.model
        self.routes = [
            serving.route("/v1/embeddings", self._embeddings),
            *(serving.route(path, self._rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
            *(serving.route(path, self._score) for path in ("/score", "/v1/score")),
            *(serving.route(path, self._classify) for path in ("/classify", "/v1/classify")),
            serving.route("/pooling", self._pool),
            serving.route("/v1/moderations", self._moderate),
        ]

    async def _embeddings(self, request: Request) -> Response:
        asked = await self._read(request, EmbeddingRequest)
        dimensions = DIMENSIONS if asked.dimensions is None else asked.dimensions
        if not 1 <= dimensions <= DIMENSIONS:
            raise CallerError(f"'dimensions' must be between 1 and {DIMENSIONS}, not {dimensions}", param="dimensions")
        if asked.encoding_format not in {"float", "base64"}:
            raise CallerError("'encoding_format' must be 'float' or 'base64'", param="encoding_format")
        prompts = [self._tokens(prompt, "input", asked.add_special_tokens) for prompt in _inputs(asked.input)]
        vectors = [embedding(prompt, dimensions) for prompt in prompts]
        data = [
            {
                "index": index,
                "object": "embedding",
                "embedding": vector if asked.encoding_format == "float" else _base64(vector),
            }
            for index, vector in enumerate(vectors)
        ]
        return json_response(self._list(data, sum(map(len, prompts))))

    async def _rerank(self, request: Request) -> Response:
        asked = await self._read(request, RerankRequest)
        documents = _texts(asked.documents, "documents")
        scores, tokens = self._scores(_texts(asked.query, "query") * len(documents), documents)
        ranked = sorted(range(len(documents)), key=lambda index: -scores[index])
        results = [
            {
                "index": index,
                "document": {"text": documents[index], "multi_modal": None},
                "relevance_score": scores[index],
            }
            for index in ranked[: asked.top_n if asked.top_n > 0 else None]
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return json_response(
            {"id": f"rerank-{uuid.uuid4().hex}", "model": self._model.name, "usage": usage, "results": results}
        )

    async def _score(self, request: Request) -> Response:
        asked = await self._read(request, ScoreRequest)
        firsts = _texts(_given(asked, ("text_1", "queries", "data_1")), "text_1")
        seconds = _texts(_given(asked, ("text_2", "documents", "items", "data_2")), "text_2")
        if len(firsts) == 1:
            firsts *= len(seconds)
        if len(firsts) != len(seconds):
            raise CallerError("'text_1' must be one text, or as many as 'text_2' has", param="text_1")
        scores, tokens = self._scores(firsts, seconds)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return json_response(self._list(data, tokens))

    async def _classify(self, request: Request) -> Response:
        """Two classes, by the first number of the vector."""
        prompts = await self._prompts(request)
        shares = [(1 + embedding(prompt)[0]) / 2 for prompt in prompts]
        data = [
            {"index": index, "label": f"LABEL_{share >= 0.5:d}", "probs": [1 - share, share], "num_classes": 2}
            for index, share in enumerate(shares)
        ]
        return json_response(self._list(data, sum(map(len, prompts))))

    async def _pool(self, request: Request) -> Response:
        prompts = await self._prompts(request)
        data = [
            {"index": index, "object": "pooling", "data": embedding(prompt)} for index, prompt in enumerate(prompts)
        ]
        return json_response(self._list(data, sum(map(len, prompts))))

    async def _moderate(self, request: Request) -> Response:
        result = {"flagged": False, "categories": {"violence": False}, "category_scores": {"violence": 0.0}}
        results = [result for _ in await self._prompts(request)]
        return json_response({"id": f"modr-{uuid.uuid4().hex}", "model": self._model.name, "results": results})

    async def _prompts(self, request: Request) -> list[list[int]]:
        asked = await self._read(request, PoolingRequest)
        return [self._tokens(prompt, "input") for prompt in _inputs(asked.input)]

    async def _read(self, request: Request, kind: type[RequestT]) -> RequestT:
        asked: Any = decode_body(await request.body(), _DECODERS[kind])  # type: ignore[index]
        self._model.check(asked.model)
        found: RequestT = asked
        return found

    def _tokens(self, prompt: str | list[int], param: str, add_special_tokens: bool = True) -> list[int]:
        if isinstance(prompt, str):
            prompt = self._model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        if not prompt:
            raise CallerError(f"'{param}' has an empty text; it must have at least one token.", param=param)
        self._model.check_context(len(prompt), 0, param)
        return prompt

    def _scores(self, firsts: list[str], seconds: list[str]) -> tuple[list[float], int]:
        """The similarity of each pair, and the tokens of all pairs."""
        scores, tokens = [], 0
        for first, second in zip(firsts, seconds, strict=True):
            pair = [self._tokens(text, "text_1" if text is first else "text_2") for text in (first, second)]
            tokens += sum(map(len, pair))
            scores.append(similarity(*map(embedding, pair)))
        return scores, tokens

    def _list(self, data: list[Json], tokens: int) -> Json:
        return {
            "id": f"embd-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": self._model.name,
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }


def _inputs(given: Any) -> list[str] | list[list[int]]:
    """The inputs one by one. They have the forms of a text completion's prompts."""
    try:
        return CompletionRequest(prompt=given).prompts()
    except CallerError as error:
        raise CallerError(error.message.replace("prompt", "input"), param="input") from error


def _given(asked: ScoreRequest, names: Iterable[str]) -> Any:
    return next((value for name in names if (value := getattr(asked, name)) is not None), None)


def _texts(given: object, param: str) -> list[str]:
    """The texts of a text or a list of them; an object stands for its `text`."""
    items = given if isinstance(given, list) else [given]
    found = [item.get("text") if isinstance(item, dict) else item for item in items]
    texts = [text for text in found if isinstance(text, str)]
    if not texts or len(texts) < len(found):
        raise CallerError(f"'{param}' must be a text or a non-empty list of texts", param=param)
    return texts


def _base64(vector: Iterable[float]) -> str:
    """32-bit floats, little-endian, as OpenAI's clients read them."""
    values = array("f", vector)
    return b64encode(values.tobytes()).decode()
