"""Requests that are made to hurt, as bytes, and the error that each gets.

They are meant for a gateway with the model `demo`, and a model `small` with a context of 512 tokens. It is open, or has
the key `one`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HEAD = b"Host: a\r\nAuthorization: Bearer one\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD
GET = b"GET /v1/models HTTP/1.1\r\n" + HEAD


def posted(body: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    length = str(len(body)).encode()
    return b"POST " + path + b" HTTP/1.1\r\n" + HEAD + b"Content-Length: " + length + b"\r\n\r\n" + body


def chat(content: Any = "hello", **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "demo", "messages": messages, "max_tokens": 4} | fields).encode()


def with_content(raw: bytes) -> bytes:
    return posted(chat("HERE").replace(b'"HERE"', raw))


@dataclass(frozen=True)
class Case:
    """Bytes to send, in pieces, and the error that comes back. `code` None: OpenAI's null."""

    name: str
    pieces: Sequence[bytes]
    status: int
    code: str | None
    param: str | None = None


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LARGE_TEMPLATE = "{{ 'a' * 300000000 }}"

CASES = [
    Case("TLS", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], 400, "invalid_http"),
    Case("no HTTP", [b"hello\r\n\r\n"], 400, "invalid_http"),
    Case("HTTP/2", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], 400, "invalid_http"),
    Case("a bad version", [b"GET / HTTP/9.9\r\n\r\n"], 400, "invalid_http"),
    Case("a bad target", [b"GET nowhere HTTP/1.1\r\n\r\n"], 400, "invalid_http"),
    Case("CONNECT", [b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n"], 400, "invalid_http"),
    Case("a bad header name", [GET + b"a b: c\r\n\r\n"], 400, "invalid_http"),
    Case("a control character", [GET + b"a: \x01\r\n\r\n"], 400, "invalid_http"),
    Case("a folded header", [GET + b"a: b\r\n c\r\n\r\n"], 400, "invalid_http"),
    Case("no host", [b"GET /health HTTP/1.1\r\n\r\n"], 400, "invalid_http"),
    Case("two hosts", [GET + b"Host: b\r\n\r\n"], 400, "invalid_http"),
    Case("two encodings", [POST + b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n"], 400, "invalid_http"),
    Case("chunks of HTTP/1.0", [b"POST / HTTP/1.0\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"], 400,
         "invalid_http"),
    Case("two lengths", [POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello"], 400, "invalid_http"),
    Case("length and chunks", [POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"], 400, "invalid_http"),
    Case("a negative length", [POST + b"Content-Length: -1\r\n\r\n"], 400, "invalid_http"),
    Case("a bad chunk", [POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n"], 400, "invalid_http"),
    Case("an endless chunk", [POST + b"Transfer-Encoding: chunked\r\n\r\n", b"f" * 17 + b"\r\n"], 400, "invalid_http"),
    Case("many headers", [GET + b"a: b\r\n" * 200 + b"\r\n"], 431, "too_many_headers"),
    Case("a large header", [GET + b"a: " + b"b" * 70_000 + b"\r\n\r\n"], 431, "headers_too_large"),
    Case("a header without an end", [GET + b"a: ", *[b"b" * 60_000] * 8], 431, "headers_too_large"),
    Case("a long target", [b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + HEAD + b"\r\n"], 431, "headers_too_large"),
    Case("a trailer without an end", [POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\na: ", *[b"b" * 60_000] * 8], 431,
         "headers_too_large"),
    Case("large trailers", [POST + b"Transfer-Encoding: chunked\r\n\r\n2000\r\n" + b" " * 0x2000 + b"\r\n0\r\na: "
         + b"b" * 70_000 + b"\r\n\r\n"], 431, "headers_too_large"),
    Case("many trailers", [POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 200 + b"\r\n"], 431,
         "too_many_headers"),
    Case("chunk extensions", [POST + b"Transfer-Encoding: chunked\r\n\r\n",
         *[b"100;" + b"a" * 1_000 + b"\r\n" + b" " * 256 + b"\r\n"] * 100], 431, "headers_too_large"),
    Case("a slow head", [GET], 408, "request_timeout"),
    Case("a slow body", [POST + b"Content-Length: 10\r\n\r\n{"], 408, "request_timeout"),
    Case("no body", [POST + b"Transfer-Encoding: chunked\r\n\r\n"], 408, "request_timeout"),
    Case("a declared size", [POST + b"Content-Length: 99999999999\r\n\r\n"], 413, "body_too_large"),
    Case("not JSON", [posted(b"{")], 400, "invalid_json"),
    Case("1,000 levels", [with_content(b"[" * 1_000 + b"]" * 1_000)], 400, "json_too_deep"),
    Case("1,000,000 levels", [with_content(b"[" * 1_000_000)], 400, "json_too_deep"),
    Case("200 levels", [with_content(b'{"a":' * 200 + b"1" + b"}" * 200)], 400, "json_too_deep"),
    Case("1,000,000 objects", [with_content(b"[" + b"{}," * 1_000_000 + b"{}]")], 400, "json_too_many_values"),
    Case("deep in a session", [posted(b"[" * 5_000, b"/v1/sessions")], 400, None),
    Case("deep in a submission", [posted(b'{"a":' * 5_000, b"/v1/submit")], 400, "json_too_deep"),
    Case("invalid UTF-8", [with_content(b'"\xff\xfe"')], 400, "invalid_json"),
    Case("invalid UTF-8 in a key", [posted(chat(HERE=1).replace(b"HERE", b"\xff"))], 400, "invalid_json"),
    Case("invalid UTF-8 in a nested key", [posted(chat(a={"b": {"HERE": 1}}).replace(b"HERE", b"\xff"))], 400,
         "invalid_json"),
    Case("invalid UTF-8 in plait", [posted(chat(plait={"HERE": 1}).replace(b"HERE", b"\xff"))], 400, "invalid_json"),
    Case("invalid UTF-8 in a forwarded key", [posted(b'{"model": "demo", "input": "x", "\xff": 1}', b"/v1/embeddings")],
         400, "invalid_json"),
    Case("invalid UTF-8 in a program", [posted(b'{"calls": [{"\xff": 1}]}', b"/v1/programs")], 400, "invalid_json"),
    Case("half a pair in a name", [posted(rb'{"model": "\ud800x"}')], 400, None, "messages"),
    Case("half a pair in arguments", [posted(chat(tool_calls=None).replace(b'"role": "user"', json.dumps({
        "role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}],
    }).encode()[1:-1]))], 400, None, "prompt"),
    Case("a long model name", [posted(chat(model="m" * 1_000_000))], 400, None, "model"),
    Case("large template options", [posted(chat(chat_template_kwargs={"a": "b" * 50_000}))], 400, None,
         "chat_template_kwargs"),
    Case("loops in a template", [posted(chat(chat_template=LOOPS))], 400, None, "chat_template"),
    Case("a large text in a template", [posted(chat(chat_template=LARGE_TEMPLATE))], 400, None, "chat_template"),
    Case("a template that fails", [posted(chat(chat_template="{% for %}"))], 400, None, "chat_template"),
    Case("more than fits", [posted(chat("a" * 24_000_000, model="small"))], 400, "context_length_exceeded", "messages"),
    Case("a word of 3 MB", [posted(chat("a" * 3_000_000))], 400, "prompt_without_spaces"),
    Case("a method", [b"TRACE /health HTTP/1.1\r\n" + HEAD + b"\r\n"], 405, "method_not_allowed"),
    Case("options", [b"OPTIONS /v1/chat/completions HTTP/1.1\r\n" + HEAD + b"\r\n"], 405, "method_not_allowed"),
]  # fmt: skip


def is_whole(answer: bytes) -> bool:
    """Whether an answer has as many bytes as it says."""
    head, found, body = answer.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.splitlines() if line.lower().startswith(b"content-length:")]
    return bool(found and lengths) and len(body) >= int(lengths[0])
