"""`GET /plait/tokenizer` inside an engine's own API server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from plait.backends.adapter.asgi import Scope, Send, send_answer
from plait.backends.adapter.engine_tokenizer import EngineTokenizer
from plait.backends.errors import MethodNotAllowedError, NotFoundError, PlaitError
from plait.backends.protocol.tokenizer_files import PATH

Find = Callable[[Scope], EngineTokenizer | None]
"""Checks a request's API key and returns the engine's tokenizer; raises `PlaitError`."""


async def answer(scope: Scope, send: Send, find: Find, fingerprint: bytes) -> None:
    """Answer one request. `fingerprint` is that of the tokenizer, encoded."""
    try:
        await send_answer(send, 200, await _offer(scope, find, fingerprint), b"application/msgpack")
    except PlaitError as error:
        await send_answer(send, error.status, error.body())
    except Exception as error:  # noqa: BLE001 - some models bring the code of their tokenizer
        refusal = NotFoundError(f"The tokenizer of this engine cannot be offered: {error!r}")
        await send_answer(send, refusal.status, refusal.body())


async def _offer(scope: Scope, find: Find, fingerprint: bytes) -> bytes:
    """The offer. The files are written and read on a thread: that takes up to a second."""
    if scope["method"] != "GET":
        raise MethodNotAllowedError(f"{PATH} takes GET requests only")
    tokenizer = find(scope)
    if tokenizer is None:
        raise NotFoundError("This engine runs without a tokenizer.")
    return await asyncio.to_thread(tokenizer.offer, fingerprint)
