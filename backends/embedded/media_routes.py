"""Images, speech and transcripts, in the shapes of OpenAI's API: small stand-ins, made at once."""

from __future__ import annotations

import time
import wave
from base64 import b64encode
from collections.abc import Iterator
from hashlib import blake2b
from io import BytesIO
from typing import Any, Final

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from plait.backends.embedded.serving import Serving, json_response
from plait.backends.errors import CallerError
from plait.backends.protocol.openai import decode_body

RATE: Final = 24_000
"""Samples in a second of speech, of two bytes each."""

CHARACTER_S: Final = 0.06
"""What is spoken in that time."""

PIECE_BYTES: Final = 16 * 1024
MOST_IMAGES: Final = 10
PIXEL: Final = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360000002000001e221bc33"
    "0000000049454e44ae426082"
)
"""A PNG of one transparent pixel."""


class SpeechRequest(msgspec.Struct, frozen=True):
    """`POST /v1/audio/speech`."""

    input: str
    model: str = ""


class ImageRequest(msgspec.Struct, frozen=True):
    """`POST /v1/images/generations`."""

    prompt: str
    model: str = ""
    n: int | None = None


_SPEECH: Final = msgspec.json.Decoder(SpeechRequest)
_IMAGE: Final = msgspec.json.Decoder(ImageRequest)


class MediaRoutes:
    """The routes, over one model."""

    def __init__(self, serving: Serving) -> None:
        self._model = serving.model
        self.routes = [
            serving.route("/v1/images/generations", self._generate),
            serving.route("/v1/images/edits", self._edit),
            serving.route("/v1/audio/speech", self._speak),
            serving.route("/v1/audio/transcriptions", self._transcribe),
            serving.route("/v1/audio/translations", self._transcribe),
        ]

    async def _generate(self, request: Request) -> Response:
        asked = decode_body(await request.body(), _IMAGE)
        self._model.check(asked.model)
        return _images(1 if asked.n is None else asked.n)

    async def _edit(self, request: Request) -> Response:
        async with request.form() as form:
            self._check(form)
            await _file(form, "image")
            return _images(int(str(form.get("n") or 1)))

    async def _speak(self, request: Request) -> Response:
        asked = decode_body(await request.body(), _SPEECH)
        self._model.check(asked.model)
        return StreamingResponse(_pieces(silence(len(asked.input) * CHARACTER_S)), media_type="audio/wav")

    async def _transcribe(self, request: Request) -> Response:
        """The text names the audio by its size and its hash, so that a test sees which bytes have come."""
        async with request.form() as form:
            self._check(form)
            audio = await _file(form, "file")
            text, kind = transcript(audio), form.get("response_format") or "json"
        if kind == "text":
            return Response(text, media_type="text/plain")
        return json_response({"text": text, "usage": {"type": "duration", "seconds": 1}})

    def _check(self, form: FormData) -> None:
        self._model.check(str(form.get("model") or ""))


def transcript(audio: bytes) -> str:
    """The text of a recording."""
    return f"{len(audio)} bytes {blake2b(audio, digest_size=8).hexdigest()}"


def silence(for_s: float) -> bytes:
    """A WAV file of that length."""
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
    data: list[dict[str, Any]] = [{"b64_json": b64encode(PIXEL).decode()}] * count
    return json_response({"created": int(time.time()), "data": data})


async def _file(form: FormData, name: str) -> bytes:
    """The bytes of an uploaded file, of which there may be several under this name."""
    for given in (form.get(name), form.get(f"{name}[]")):
        if isinstance(given, UploadFile):
            return await given.read()
    raise CallerError(f"'{name}' must be a file", param=name)
