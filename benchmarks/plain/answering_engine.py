"""An engine that costs little: it answers each POST from memory, with `max_tokens` tokens.

`python -m benchmarks.plain.answering_engine PORT [PAUSE_MS]`. A stream comes in one piece, or, if the request's `seed`
is `PACED`, with a pause before each token (1 ms).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any, Final

import httptools
import msgspec
import uvloop

PAUSE_MS: Final = "1"
"""Before each token of a paced stream, so that the gateway reads it alone."""

PACED: Final = 10
"""A seed, because routers that write bodies anew keep it."""

MODEL: Final = "demo"
_MODELS: Final = b'{"object":"list","data":[{"id":"%b","object":"model","max_model_len":131072}]}' % MODEL.encode()

_INFO: Final = b'{"model_path":"%b","served_model_name":"%b","is_generation":true,"version":"0"}' % (
    MODEL.encode(), MODEL.encode()
)  # fmt: skip
"""What routers ask a server before they send it calls."""


class _Request(msgspec.Struct):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    seed: int | None = None

    @property
    def tokens(self) -> int:
        """How many are asked for. Some routers rename the field."""
        return self.max_tokens or self.max_completion_tokens or 1


class _Connection(asyncio.Protocol):
    """One connection of a gateway. It takes one request at a time."""

    pause_s = 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = b"", b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._path, self._body = b"", b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"POST":
            self._answer(msgspec.json.decode(self._body, type=_Request))
        elif self._path in {b"/v1/models", b"/health"}:
            self._transport.write(_whole(b"200 OK", _MODELS))
        elif self._path in {b"/server_info", b"/get_server_info", b"/model_info", b"/get_model_info"}:
            self._transport.write(_whole(b"200 OK", _INFO))
        else:
            self._transport.write(_whole(b"404 Not Found", b"{}"))

    def _answer(self, request: _Request) -> None:
        if not request.stream:
            self._transport.write(_whole(b"200 OK", _completion(request.tokens)))
            return
        pieces = [_HEAD, *_events(request.tokens), b"0\r\n\r\n"]
        if request.seed != PACED:
            self._transport.write(b"".join(pieces))
            return
        self._write_next(iter(pieces))

    def _write_next(self, pieces: Iterator[bytes]) -> None:
        piece = next(pieces, None)
        if piece is not None:
            self._transport.write(piece)
            asyncio.get_running_loop().call_later(self.pause_s, self._write_next, pieces)


_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _events(tokens: int) -> list[bytes]:
    start = b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"%b",' % MODEL.encode()
    token = start + b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}'
    last = start + b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":"length"}]}'
    usage = start + b'"choices":[],"usage":%b}' % _usage(tokens)
    return [_chunk(b"data: %b\n\n" % data) for data in (*[token] * (tokens - 1), last, usage, b"[DONE]")]


def _completion(tokens: int) -> bytes:
    choice = b'{"index":0,"message":{"role":"assistant","content":"%b"},"finish_reason":"length"}' % (
        b" token" * tokens
    )
    return b'{"id":"chatcmpl-1","object":"chat.completion","choices":[%b],"usage":%b}' % (choice, _usage(tokens))


def _usage(tokens: int) -> bytes:
    return b'{"prompt_tokens":100,"completion_tokens":%d,"total_tokens":%d}' % (tokens, 100 + tokens)


def _whole(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(port: int, pause_ms: str = PAUSE_MS) -> None:
    _Connection.pause_s = float(pause_ms) / 1e3
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), *sys.argv[2:]))
