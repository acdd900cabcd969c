"""Every route with every method and many wrong bodies: each error is an OpenAI error object with the right status."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.server_process import NO_TLS, Server
from e2e.servers import Fleet, Launcher
from tests.waiting import WITHIN_S

CHAT, TEXT, SUBMIT, GET = "/v1/chat/completions", "/v1/completions", "/v1/submit", "/v1/get"
PATHS = (
    CHAT, TEXT, SUBMIT, GET, "/v1/sessions", "/v1/sessions/none", "/v1/sessions/%00%ff", "/v1/variables",
    "/v1/variables/none/x", "/v1/variables/none", "/v1/models", "/v1/models/none", "/v1/models/a/b/c", "/v1/embeddings",
    "/v1", "/", "//", "/admin/engines", "/admin/engines/none", "/v1/chat/completions/", "/v1/%2e%2e/metrics",
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "BREW")
MESSAGE = {"role": "user", "content": "Hello."}
GOOD = {"model": "demo", "messages": [MESSAGE], "prompt": "Hello.", "max_tokens": 1}
WRONG_FIELDS: tuple[dict[str, Any], ...] = (
    {"model": None}, {"model": 7}, {"model": "none"}, {"model": "x" * 10_000}, {"messages": None}, {"messages": []},
    {"messages": "Hello."}, {"messages": [7]}, {"messages": [{"role": 7}]}, {"prompt": None}, {"prompt": []},
    {"prompt": {"a": 1}}, {"prompt": [1, "a"]}, {"prompt": [-1]}, {"max_tokens": -1}, {"max_tokens": "many"},
    {"max_tokens": 10**30}, {"n": 0}, {"n": 1_000}, {"n": "two"}, {"stream": "yes"}, {"stream_options": 7},
    {"stream_options": {"include_usage": True}}, {"stop": 7}, {"seed": "x"}, {"plait": 7}, {"plait": {"nothing": 1}},
    {"plait": {"priority": 1.5}}, {"plait": {"inputs": "x"}}, {"plait": {"output": "9x", "session": "s"}},
    {"chat_template": "{{ 1 }}"}, {"vllm_xargs": 7}, {"tools": 7}, {"session_id": "\x00"}, {"ttl_s": -1},
    {"semantic_var_id": "9"}, {"placeholders": 7}, {"criteria": "never"}, {"timeout_s": "long"},
)  # fmt: skip
RAW_BODIES: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"7", b"null", b'"text"', b"\xff\xfe", b'{"model": "\\ud800"}', b"[" * 3_000,
    b'{"a":' * 200 + b"1" + b"}" * 200, b"a=1&b=2", b"<xml/>", b'{"model": "demo", "model": 7}', b"\x00" * 64,
    b'{"model": NaN}', b"{" + b" " * 10_000 + b"}",
)  # fmt: skip
HEADERS: tuple[dict[str, str], ...] = (
    {"plait-priority": "high"}, {"plait-nothing": "1"}, {"plait-session": "\x7f"}, {"plait-slo-ttft-ms": "-1"},
    {"plait-inputs": "x"}, {"plait-output": "9"}, {"x-slo-ttft-ms": "soon"}, {"authorization": "Basic eDp5"},
)  # fmt: skip


def bodies() -> Iterator[bytes]:
    """Some 55 wrong bodies."""
    for fields in WRONG_FIELDS:
        yield json.dumps({**GOOD, **fields}).encode()
    yield from RAW_BODIES


def cases() -> Iterator[tuple[str, str, bytes, dict[str, str]]]:
    """Method, path, body and headers of each case."""
    for method, path in product(METHODS, PATHS):
        for body in bodies():
            yield method, path, body, {}
    for path, headers in product((CHAT, TEXT), HEADERS):
        yield "POST", path, json.dumps(GOOD).encode(), headers


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Launcher(Path(tmp_path_factory.mktemp("matrix"))) as launch:
        engine = launch.engine("one")
        gateway = launch.gateway([engine], log={"level": "warning"})
        Fleet(gateway, {"one": engine}).start()
        yield gateway


def problem(method: str, response: httpx.Response) -> str | None:
    """What is wrong with an answer; None if it is an error as it has to be, or no error."""
    status, headers = response.status_code, response.headers
    if status < 400:
        return None
    problems = {
        f"status {status}": status >= 500,
        "no Retry-After": status in {429, 503} and "retry-after" not in headers,
        "no Allow": status == 405 and "allow" not in headers,
        f"not an error object: {response.text[:80]}": method != "HEAD" and not is_error_object(response),
    }
    return next((what for what, holds in problems.items() if holds), None)


def is_error_object(response: httpx.Response) -> bool:
    """Whether a response has OpenAI's error object, with a message."""
    if not response.headers.get("content-type", "").startswith("application/json"):
        return False
    error = response.json().get("error") or {}
    return {"message", "type", "param", "code"} <= error.keys() and len(error["message"]) > 10


def test_every_error_is_openais(gateway: Server) -> None:
    found, wrong = Counter[int](), list[str]()
    with httpx.Client(base_url=gateway.url, verify=NO_TLS, trust_env=False, timeout=WITHIN_S) as client:
        for method, path, body, headers in cases():
            response = client.request(method, path, content=body, headers=headers)
            found[response.status_code] += 1
            if (what := problem(method, response)) is not None:
                wrong.append(f"{method} {path} {body[:60]!r} {headers}: {what}")
    assert not wrong, f"{len(wrong)} of {found.total()}:\n" + "\n".join(wrong[:20])
    assert found.total() >= 5_000
    assert "Traceback" not in gateway.log()
