"""An engine that costs little: it answers each POST from memory, with `max_tokens` tokens.

`python -m benchmarks.plain.answering_engine PORT`. A stream comes in one piece, or, if the request's `user` is `paced`,
with a pause before each token.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any, Final

import httptools
import msgspec
import uvloop

PAUSE_S: Final = 0.001
"""Before each token of a paced stream, so that the gateway reads it alone."""

MODEL: Final = "demo"
_MODELS: Final = b'{"object":"list","data":[{"id":"%b","object":"model","max_model_len":32768}]}' % MODEL.encode()


class _Request(msgspec.Struct):
    max_tokens: int
    stream: bool = False
    user: str = ""


class _Connection(asyncio.Protocol):
    """One connection of a gateway. It takes one request at a time."""

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
        else:
            self._transport.write(_whole(b"404 Not Found", b"{}"))

    def _answer(self, request: _Request) -> None:
        if not request.stream:
            self._transport.write(_whole(b"200 OK", _completion(request.max_tokens)))
            return
        pieces = [_HEAD, *_events(request.max_tokens), b"0\r\n\r\n"]
        if request.user != "paced":
            self._transport.write(b"".join(pieces))
            return
        self._write_next(iter(pieces))

    def _write_next(self, pieces: Iterator[bytes]) -> None:
        piece = next(pieces, None)
        if piece is not None:
            self._transport.write(piece)
            asyncio.get_running_loop().call_later(PAUSE_S, self._write_next, pieces)


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


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
