"""The embedded engine's routes for embeddings, scores, classes, images and audio, in vLLM's and OpenAI's formats.

Answers are small stand-ins, sent at once: these routes take no emulated GPU time.
"""

from __future__ import annotations

import time
import uuid
import wave
from array import array
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from io import BytesIO
from math import hypot
from operator import mul
from typing import Any, Final

import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from plait.backends.errors import CallerError
from plait.backends.protocol.openai import CompletionRequest, decode_body
from plait.lab.embedded.serving import Serving, json_response

DIMENSIONS: Final = 1024
"""The dimensions of a vector, unless a request asks for fewer: as many as current embedding models have."""

PLACES: Final = 16
"""The number of a vector's components that one token changes."""

RATE: Final = 24_000
"""The sample rate of speech, in Hz. A sample has two bytes."""

CHARACTER_S: Final = 0.06
"""Seconds of speech for one character."""

PIECE_BYTES: Final = 16 * 1024
MOST_IMAGES: Final = 10
PIXEL: Final = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360000002000001e221bc33"
    "0000000049454e44ae426082"
)
"""A PNG of one transparent pixel."""


class Asked(msgspec.Struct, frozen=True):
    """The fields of all the routes that take JSON."""

    model: str = ""
    input: Any = None
    encoding_format: str = "float"
    dimensions: int = DIMENSIONS
    query: str = ""
    documents: list[str] = []
    top_n: int = 0
    text_1: Any = None
    text_2: Any = None
    prompt: str = ""
    n: int | None = None


_DECODER: Final = msgspec.json.Decoder(Asked)


def embedding(token_ids: Sequence[int], dimensions: int = DIMENSIONS) -> list[float]:
    """A vector of length 1. Texts that share tokens have vectors near each other.

    Each token adds 1 or -1 in a few components, chosen by its hash: a sparse random projection of the bag of tokens.
    """
    vector = [0.0] * dimensions
    for token, count in Counter(token_ids).items():
        for place, sign in _signs(token):
            vector[place % dimensions] += sign * count
    length = hypot(*vector)
    if length == 0:  # the signs cancelled out, as can happen with one or two dimensions
        return [1.0, *vector[1:]]
    return [value / length for value in vector]


@lru_cache(maxsize=100_000)
def _signs(token: int) -> tuple[tuple[int, int], ...]:
    """`PLACES` pairs of a number and a sign. The number modulo the dimensions is the component that changes."""
    numbers = array("I", blake2b(token.to_bytes(8, "little"), digest_size=4 * PLACES).digest())
    return tuple((number >> 1, 1 if number & 1 else -1) for number in numbers)


class RoutesBesideChat:
    def __init__(self, serving: Serving) -> None:
        self._model = serving.model
        self.routes = [
            serving.route("/v1/embeddings", self._embed),
            *(serving.route(path, self._rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
            *(serving.route(path, self._score) for path in ("/score", "/v1/score")),
            *(serving.route(path, self._classify) for path in ("/classify", "/v1/classify")),
            serving.route("/pooling", self._pool),
            serving.route("/v1/moderations", self._moderate),
            serving.route("/v1/images/generations", self._draw),
            serving.route("/v1/images/edits", self._edit),
            serving.route("/v1/audio/speech", self._speak),
            serving.route("/v1/audio/transcriptions", self._transcribe),
            serving.route("/v1/audio/translations", self._transcribe),
        ]

    async def _embed(self, request: Request) -> Response:
        asked = await self._asked(request)
        if not 1 <= asked.dimensions <= DIMENSIONS:
            raise CallerError(f"'dimensions' must be between 1 and {DIMENSIONS}", param="dimensions")
        prompts = self._prompts(asked.input)
        vectors: list[Any] = [embedding(prompt, asked.dimensions) for prompt in prompts]
        if asked.encoding_format == "base64":  # 32-bit floats, little-endian, as OpenAI's clients read them
            vectors = [b64encode(array("f", vector).tobytes()).decode() for vector in vectors]
        return self._list([{"object": "embedding", "embedding": vector} for vector in vectors], prompts)

    async def _rerank(self, request: Request) -> Response:
        asked = await self._asked(request)
        prompts = self._prompts(asked.documents, "documents")
        scores = _scores(self._prompts(asked.query, "query") * len(prompts), prompts)
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n or None]
        results = [
            {"index": index, "document": {"text": asked.documents[index]}, "relevance_score": scores[index]}
            for index in ranked
        ]
        return json_response({"id": f"rerank-{uuid.uuid4().hex}", "model": self._model.name, "results": results})

    async def _score(self, request: Request) -> Response:
        asked = await self._asked(request)
        ones, others = self._prompts(asked.text_1, "text_1"), self._prompts(asked.text_2, "text_2")
        pairs = ones * len(others) if len(ones) == 1 else ones
        return self._list([{"object": "score", "score": score} for score in _scores(pairs, others)], ones + others)

    async def _classify(self, request: Request) -> Response:
        """Two classes. The probability of the second grows with the embedding's first component."""
        prompts = self._prompts((await self._asked(request)).input)
        shares = [(1 + embedding(prompt)[0]) / 2 for prompt in prompts]
        classes = [{"label": f"LABEL_{share >= 0.5:d}", "probs": [1 - share, share]} for share in shares]
        return self._list(classes, prompts)

    async def _pool(self, request: Request) -> Response:
        prompts = self._prompts((await self._asked(request)).input)
        return self._list([{"object": "pooling", "data": embedding(prompt)} for prompt in prompts], prompts)

    async def _moderate(self, request: Request) -> Response:
        result = {"flagged": False, "categories": {"violence": False}, "category_scores": {"violence": 0.0}}
        results = [result for _ in self._prompts((await self._asked(request)).input)]
        return json_response({"id": f"modr-{uuid.uuid4().hex}", "model": self._model.name, "results": results})

    async def _draw(self, request: Request) -> Response:
        count = (await self._asked(request)).n
        return _images(1 if count is None else count)

    async def _edit(self, request: Request) -> Response:
        await self._uploaded(request, "image")
        return _images(1)

    async def _speak(self, request: Request) -> Response:
        asked = await self._asked(request)
        return StreamingResponse(_pieces(silence(len(str(asked.input)) * CHARACTER_S)), media_type="audio/wav")

    async def _transcribe(self, request: Request) -> Response:
        return json_response({"text": transcript(await self._uploaded(request, "file"))})

    async def _asked(self, request: Request) -> Asked:
        asked = decode_body(await request.body(), _DECODER)
        self._model.check(asked.model)
        return asked

    async def _uploaded(self, request: Request, name: str) -> bytes:
        async with request.form() as form:
            self._model.check(str(form.get("model") or ""))
            if isinstance(given := form.get(name), UploadFile):
                return await given.read()
        raise CallerError(f"'{name}' must be a file", param=name)

    def _prompts(self, given: Any, param: str = "input") -> list[list[int]]:
        """The token ids of each input. Inputs have the forms of a text completion's `prompt`: texts or token ids."""
        try:
            inputs = CompletionRequest(prompt=given).prompts()
        except CallerError as error:
            raise CallerError(error.message.replace("prompt", param), param=param) from error
        encode = self._model.tokenizer.encode
        prompts = [text if isinstance(text, list) else encode(text) for text in inputs]
        for prompt in prompts:
            if not prompt:
                raise CallerError(f"'{param}' has an empty text; it must have at least one token.", param=param)
            self._model.check_context(len(prompt), 0, param)
        return prompts

    def _list(self, data: list[dict[str, Any]], prompts: list[list[int]]) -> Response:
        tokens = sum(map(len, prompts))
        answer = {
            "id": f"embd-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": self._model.name,
            "data": [{"index": index, **one} for index, one in enumerate(data)],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }
        return json_response(answer)


def _scores(ones: list[list[int]], others: list[list[int]]) -> list[float]:
    """The cosine of each pair's vectors."""
    if len(ones) != len(others):
        raise CallerError("'text_1' must be one text, or as many as 'text_2' has", param="text_1")
    return [sum(map(mul, embedding(one), embedding(other))) for one, other in zip(ones, others, strict=True)]


def transcript(audio: bytes) -> str:
    """The text of a recording: the number and the hash of its bytes, by which a test recognises them."""
    return f"{len(audio)} bytes {blake2b(audio, digest_size=8).hexdigest()}"


def silence(for_s: float) -> bytes:
    made = BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(bytes(2 * round(RATE * for_s)))
    return made.getvalue()


def _pieces(whole: bytes) -> Iterator[bytes]:
    return (whole[at : at + PIECE_BYTES] for at in range(0, len(whole), PIECE_BYTES))


def _images(count: int) -> Response:
    if not 1 <= count <= MOST_IMAGES:
        raise CallerError(f"'n' must be between 1 and {MOST_IMAGES}, not {count}", param="n")
    return json_response({"created": int(time.time()), "data": [{"b64_json": b64encode(PIXEL).decode()}] * count})
