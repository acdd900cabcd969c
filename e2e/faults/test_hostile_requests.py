"""Requests that are made to hurt: each gets an error object that says what to do, and nobody else notices."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.servers import NO_TLS, Fleet, Launcher, Server

HEALTH_S = 0.5
KEYS = ("one", "two")
LIMITS: dict[str, Any] = {
    "max_connections": 64,
    "header_timeout_s": 1,
    "body_timeout_s": 1,
    "trust_request_chat_template": True,
    "api_keys": list(KEYS),
}
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
    Case("two lengths", [POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello"], 400, "invalid_http"),
    Case("length and chunks", [POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"], 400, "invalid_http"),
    Case("a negative length", [POST + b"Content-Length: -1\r\n\r\n"], 400, "invalid_http"),
    Case("a bad chunk", [POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n"], 400, "invalid_http"),
    Case("an endless chunk", [POST + b"Transfer-Encoding: chunked\r\n\r\n", b"f" * 17 + b"\r\n"], 400, "invalid_http"),
    Case("many headers", [GET + b"a: b\r\n" * 200 + b"\r\n"], 431, "too_many_headers"),
    Case("a large header", [GET + b"a: " + b"b" * 70_000 + b"\r\n\r\n"], 431, "headers_too_large"),
    Case("a header without an end", [GET + b"a: ", *[b"b" * 60_000] * 8], 431, "headers_too_large"),
    Case("a long target", [b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"], 431, "headers_too_large"),
    Case("a trailer without an end", [POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\na: ", *[b"b" * 60_000] * 8], 431,
         "headers_too_large"),
    Case("a slow head", [GET], 408, "request_timeout"),
    Case("a slow body", [POST + b"Content-Length: 10\r\n\r\n{"], 408, "request_timeout"),
    Case("no body", [POST + b"Transfer-Encoding: chunked\r\n\r\n"], 408, "request_timeout"),
    Case("a declared size", [POST + b"Content-Length: 99999999999\r\n\r\n"], 413, "body_too_large"),
    Case("not JSON", [posted(b"{")], 400, "invalid_json"),
    Case("1,000 levels", [with_content(b"[" * 1_000 + b"]" * 1_000)], 400, "json_too_deep"),
    Case("1,000,000 levels", [with_content(b"[" * 1_000_000)], 400, "json_too_deep"),
    Case("200 levels", [with_content(b'{"a":' * 200 + b"1" + b"}" * 200)], 400, "json_too_deep"),
    Case("deep in a session", [posted(b"[" * 5_000, b"/v1/sessions")], 400, None),
    Case("deep in a submission", [posted(b'{"a":' * 5_000, b"/v1/submit")], 400, "json_too_deep"),
    Case("invalid UTF-8", [with_content(b'"\xff\xfe"')], 400, "invalid_json"),
    Case("a surrogate in bytes", [with_content(b'"\xed\xa0\x80"')], 400, "invalid_json"),
    Case("half a pair", [with_content(rb'"\ud800"')], 400, "invalid_json"),
    Case("the other half", [with_content(rb'"\udc00x"')], 400, "invalid_json"),
    Case("half a pair in a name", [posted(rb'{"model": "\ud800x"}')], 400, "invalid_json"),
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
    Case("a word of 4 MB", [posted(chat("a" * 4_000_000))], 400, "prompt_without_spaces"),
    Case("a method", [b"TRACE /health HTTP/1.1\r\n\r\n"], 405, "method_not_allowed"),
    Case("options", [b"OPTIONS /v1/chat/completions HTTP/1.1\r\n" + HEAD + b"\r\n"], 405, "method_not_allowed"),
]  # fmt: skip


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A gateway that takes templates, over an engine with a short context and one with a long one."""
    with Launcher(tmp_path_factory.mktemp("hostile")) as launch:
        engines = [launch.engine("small-1", model="small", options=["--max-context-tokens", "512"])]
        engines.append(launch.engine("demo-1"))
        fleet = Fleet(
            launch.gateway(engines, models=["demo", "small"], server=LIMITS),
            {engine.name: engine for engine in engines},
        )
        fleet.start()
        post(fleet.gateway, "one", chat(chat_template="{{ messages[0].content }}"))  # its process has started
        yield fleet.gateway


@contextmanager
def healthy(gateway: Server) -> Iterator[list[float]]:
    """Ask for the health all the time; each answer has to come within `HEALTH_S`."""
    over, times_s = threading.Event(), []

    def ask() -> None:
        with httpx.Client(trust_env=False, verify=NO_TLS, timeout=30) as client:
            while True:
                began_s = time.monotonic()
                assert client.get(f"{gateway.url}/health").status_code == 200
                times_s.append(time.monotonic() - began_s)
                if over.wait(0.01):
                    return

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield times_s
        finally:
            over.set()
    asked.result()
    assert max(times_s) < HEALTH_S, "the gateway stood still"


def sent(gateway: Server, pieces: Sequence[bytes]) -> bytes:
    """The answer to raw bytes, until the connection closes or the answer is whole."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as client:
        for piece in pieces:
            try:
                client.sendall(piece)
            except ConnectionError:
                break
        answer = b""
        while not _is_whole(answer) and (more := client.recv(65_536)):
            answer += more
    return answer


def _is_whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.splitlines() if line.lower().startswith(b"content-length:")]
    return bool(found and lengths) and len(body) >= int(lengths[0])


def post(gateway: Server, key: str, body: bytes) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return gateway.post("/v1/chat/completions", content=body, headers=headers)


def memory_bytes(gateway: Server) -> int:
    """What the gateway's process has in memory."""
    assert gateway._process is not None
    status = Path(f"/proc/{gateway._process.pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hostile_request_is_answered_in_openais_shape(gateway: Server, case: Case) -> None:
    before = gateway.metric("plait_refusals_total")
    with healthy(gateway):
        head, _, body = sent(gateway, case.pieces).partition(b"\r\n\r\n")
    status, kind = int(head.split()[1]), [line for line in head.splitlines() if line.startswith(b"content-type")]
    assert (status, kind) == (case.status, [b"content-type: application/json"])
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    if case.name != "deep in a session":
        assert (error["code"], error["param"]) == (case.code, case.param)
    assert 10 < len(error["message"]) < 1_500
    assert gateway.metric("plait_refusals_total") == before + 1


@pytest.mark.parametrize("template", [LOOPS, LARGE_TEMPLATE], ids=["loops", "a large text"])
def test_templates_of_clients_cost_nobody_else_anything(gateway: Server, template: str) -> None:
    post(gateway, "one", chat())
    memory = memory_bytes(gateway)
    with healthy(gateway), ThreadPoolExecutor(4) as pool:
        attack = [pool.submit(post, gateway, "one", chat(chat_template=template)) for _ in range(4)]
        began_s = time.monotonic()
        assert post(gateway, "two", chat("x" * 20_000)).status_code == 200
        took_s = time.monotonic() - began_s
        assert {answer.result().status_code for answer in attack} == {400}
    grown_bytes = memory_bytes(gateway) - memory
    assert took_s < 1, f"the other tenant's prompt took {took_s:.2f} s"
    assert grown_bytes < 16 * 2**20, f"the gateway grew by {grown_bytes >> 20} MiB"


def test_connections_are_bounded_and_answered(gateway: Server) -> None:
    held = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(LIMITS["max_connections"])]
    answer = sent(gateway, [GET + b"\r\n"])
    for client in held:
        client.close()
    assert answer.startswith(b"HTTP/1.1 503")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
    assert b"retry-after: 1" in answer


def test_a_dozen_long_prompts_do_not_delay_another_tenants(gateway: Server) -> None:
    body = chat("A line of a long prompt, with words.\n" * 55_000)
    assert len(body) > 2_000_000
    with ThreadPoolExecutor(13) as pool, healthy(gateway):
        long = [pool.submit(post, gateway, "one", body) for _ in range(12)]
        time.sleep(0.5)
        times_s = []
        while not all(answer.done() for answer in long):
            began_s = time.monotonic()
            assert post(gateway, "two", chat("another prompt " * 1_400)).status_code == 200
            times_s.append(time.monotonic() - began_s)
            time.sleep(0.05)
    assert max(times_s) < 1, "13 s if prompts were tokenized in the order in which they come"
