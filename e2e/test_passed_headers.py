"""The headers that pass, on every route: those that are listed, in both directions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from e2e.server_process import NO_TLS, Server, eventually
from e2e.servers import Launcher
from e2e.stub_engine import EVENT_STREAM, JSON, Script, StubEngine
from plait.gateway.intake.agents import SESSION_HEADERS
from plait.gateway.membership.engine_link import TO_CLIENTS, TO_ENGINES
from tests.call_routes import ROUTES
from tests.waiting import WITHIN_S

LISTED_ANSWER = {name.decode() for name in TO_CLIENTS} - {"content-type"}
LISTED_REQUEST = {name.decode() for name in TO_ENGINES} - {"content-type"}
VENDORS = {
    "access-control-allow-origin": "*", "access-control-allow-credentials": "true", "access-control-max-age": "theirs",
    "access-control-expose-headers": "*", "x-powered-by": "http://10.0.0.7:8000", "x-vendor-id": "theirs",
    "x-ratelimit-remaining-tokens": "theirs", "endpoint-load-metrics": "theirs", "etag": "theirs", "link": "theirs",
    "x-request-id": "theirs", "request-id": "theirs", "retry-after-ms": "1", "x-should-retry": "false",
    "set-cookie": "a=theirs", "location": "http://10.0.0.7", "plait-engine": "theirs", "plait-slo": "theirs",
    "x-accel-buffering": "theirs",
}  # fmt: skip
"""What engines send, or might. Their server adds `server` and `date`."""
ANSWER_HEADERS = (*VENDORS.items(), *((name, "listed") for name in LISTED_ANSWER))
OURS = {
    "content-type", "content-length", "transfer-encoding", "connection", "date", "x-request-id", "retry-after",
    "x-should-retry", "plait-engine", "plait-placement", "plait-cached-tokens", "plait-session", "plait-slo",
    "plait-loaded-tokens", "plait-waited-s", "x-accel-buffering",
}  # fmt: skip
CLIENTS = {
    "origin": "https://page.example", "referer": "https://page.example/a", "cookie": "a=theirs", "user-agent": "theirs",
    "x-forwarded-for": "10.0.0.9", "x-api-key": "sk-theirs", "api-key": "sk-theirs", "baggage": "theirs",
    "x-stainless-lang": "theirs", "openai-organization": "theirs", "plait-session": "s-1", "x-vendor": "theirs",
    "content-encoding": "identity", "access-control-request-method": "POST",
    **{name.decode(): "theirs" for name in SESSION_HEADERS},
}  # fmt: skip
SENT = {"content-type": "application/json", **CLIENTS, **dict.fromkeys(LISTED_REQUEST, "listed")}
OF_THE_GATEWAY = {"host", "content-length", "x-request-id", "authorization", "content-type", "accept-encoding"}

CHOICE: dict[str, Any] = {"index": 0, "finish_reason": "stop", "text": "Hi"}
CHOICE["message"] = {"role": "assistant", "content": "Hi"}
WHOLE = json.dumps(
    {"id": "a-1", "object": "response", "status": "completed", "output": [], "type": "message", "content": [],
     "stop_reason": "end_turn", "choices": [CHOICE]}
).encode()  # fmt: skip
"""An answer of every form at once."""
CHUNK = {"id": "a-1", "choices": [{"index": 0, "delta": {"content": "Hi"}, "text": "Hi", "finish_reason": "stop"}]}
STREAMS = {
    "/v1/responses": [{"type": "response.completed", "response": json.loads(WHOLE)}],
    "/v1/messages": [
        {"type": "message_start", "message": json.loads(WHOLE)},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ],
}
"""The events of engines that have these routes."""

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/rerank": {"query": "Hi", "documents": ["Ho"]},
    "/rerank": {"query": "Hi", "documents": ["Ho"]},
    "/v1/score": {"text_1": "Hi", "text_2": "Ho"},
    "/score": {"text_1": "Hi", "text_2": "Ho"},
    "/v2/rerank": {"query": "Hi", "documents": ["Ho"]},
    "/v1/classify": {"input": "Hi"},
    "/classify": {"input": "Hi"},
    "/pooling": {"input": "Hi"},
    "/v1/moderations": {"input": "Hi"},
    "/v1/images/generations": {"prompt": "Hi"},
    "/v1/audio/speech": {"input": "Hi", "voice": "alloy"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}
ENGINES = {"plain": (), "native": tuple(ROUTES)}
"""Models, each with an engine of its own that has these routes. The plain one's answers are translated."""
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
PAGE = "https://app.example"


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, StubEngine]]:
    with StubEngine("plain") as plain, StubEngine("native", ENGINES["native"]) as native:
        yield {"plain": plain, "native": native}


@pytest.fixture(scope="module", params=["default", "more"])
def gateway(
    request: pytest.FixtureRequest, engines: dict[str, StubEngine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """An open gateway that passes an engine's first error on. The second lets more headers pass, and a page call."""
    once: dict[str, Any] = {"upstream": {"max_attempts": 1}}
    more = {"pass_request_headers": ["X-Vendor"], "pass_response_headers": ["X-Vendor-Id"]}
    sections = {"upstream": once["upstream"] | more, "server": {"cors_origins": [PAGE]}}
    with Launcher(tmp_path_factory.mktemp(request.param)) as launch:
        entries = [{"name": name, "url": engine.url} for name, engine in engines.items()]
        server = launch.gateway(
            entries, request.param, models=list(engines), **(sections if request.param == "more" else once)
        )
        server.start()
        server.wait_until_ready()
        eventually(lambda: server.metric("plait_engine_up") == len(entries))
        yield server


def passes_more(gateway: Server) -> bool:
    return gateway.name == "more"


def events(path: str, model: str) -> list[bytes]:
    if model == "native" and path in STREAMS:
        return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in STREAMS[path]]
    return [f"data: {json.dumps(CHUNK)}\n\ndata: [DONE]\n\n".encode()]


def ask(gateway: Server, path: str, model: str, **fields: Any) -> httpx.Response:
    """A request for this route, which may be a form with a file."""
    if not ROUTES[path].file:
        return gateway.post(path, json={"model": model, **fields, **BODIES[path]}, headers=SENT)
    form = f'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\n{model}\r\n--b--\r\n'
    headers = {**SENT, "content-type": "multipart/form-data; boundary=b"}
    return httpx.post(f"{gateway.url}{path}", content=form.encode(), headers=headers, verify=NO_TLS, timeout=WITHIN_S)


def check(gateway: Server, response: httpx.Response) -> set[str]:
    """Only listed headers pass. Returns the names of those that did."""
    more = {"x-vendor-id", "vary", "access-control-expose-headers"} if passes_more(gateway) else set()
    found = set(response.headers) - ({"request-id"} if response.request.url.path.startswith("/v1/messages") else set())
    assert found <= OURS | LISTED_ANSWER | more | {"content-type"}
    assert response.headers.get("access-control-expose-headers") != "*"
    theirs = {name for name, value in response.headers.items() if "theirs" in value or "10.0.0.7" in value}
    assert theirs <= more, "an engine cannot set a header of the gateway's"
    return found


@pytest.mark.parametrize("model", ENGINES)
@pytest.mark.parametrize("path", ROUTES)
def test_on_every_route_listed_headers_pass_and_no_others(
    gateway: Server, engines: dict[str, StubEngine], path: str, model: str
) -> None:
    engine, is_here = engines[model], path.endswith("_tokens") and model == "plain"
    for stream in (False, True) if path in STREAMED else (False,):
        pieces = events(path, model) if stream else [WHOLE]
        engine.script = Script(pieces, headers=(*(EVENT_STREAM if stream else JSON), *ANSWER_HEADERS))
        response = ask(gateway, path, model, stream=stream)
        assert response.status_code == 200, response.text
        found = check(gateway, response)
        assert response.headers.get("x-accel-buffering") == ("no" if stream else None)
        if is_here:
            continue
        assert found >= LISTED_ANSWER
        received = engine.received[-1].headers
        assert received.keys() - OF_THE_GATEWAY - {"x-vendor"} == LISTED_REQUEST
        assert ("x-vendor" in received) == ("x-vendor-id" in found) == passes_more(gateway)
        assert {received[name] for name in LISTED_REQUEST} == {"listed"}


@pytest.mark.parametrize("model", ENGINES)
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("error", [(422, b'{"error": {"message": "no"}}'), (404, b"<html>"), (500, b"{}")])
def test_an_errors_headers_pass_no_more(
    gateway: Server, engines: dict[str, StubEngine], path: str, model: str, error: tuple[int, bytes]
) -> None:
    status, body = error
    engines[model].script = Script([body], status, (*JSON, *ANSWER_HEADERS))
    check(gateway, ask(gateway, path, model))


def test_what_is_kept_and_chained_passes_no_more(gateway: Server, engines: dict[str, StubEngine]) -> None:
    def post(path: str, body: dict[str, Any], **annotations: str) -> httpx.Response:
        response = gateway.post(path, json=body, headers=annotations)
        assert response.status_code == 200, response.text
        check(gateway, response)
        return response

    engine, chat = engines["plain"], {"model": "plain", **BODIES["/v1/chat/completions"]}
    engine.script = Script(events("/v1/chat/completions", "plain"), headers=(*EVENT_STREAM, *ANSWER_HEADERS))
    producer = {"plait-session": f"s-{gateway.name}", "plait-output": "v"}
    for _ in range(2):  # the second is a repetition, which no engine sees
        post("/v1/chat/completions", chat, **producer)
    variable = {"session_id": f"s-{gateway.name}", "semantic_var_id": "v"}
    assert post("/v1/get", variable).json()["value"] == "Hi"
    prompt = {"model": "plain", "prompt": "Say {{w}}", "placeholders": [{"name": "w", "in_out": True}]}
    post("/v1/submit", {"session_id": f"s-{gateway.name}", **prompt})
    post("/v1/get", {**variable, "semantic_var_id": "w"})
    engine.script = Script([WHOLE], headers=(*JSON, *ANSWER_HEADERS))
    kept = post("/v1/responses", {"model": "plain", **BODIES["/v1/responses"]}).json()["id"]
    check(gateway, gateway.get(f"/v1/responses/{kept}"))


@pytest.mark.parametrize("origin", [PAGE, "https://other.example"])
def test_which_pages_may_read_says_the_gateway_alone(
    gateway: Server, engines: dict[str, StubEngine], origin: str
) -> None:
    engines["plain"].script = Script([WHOLE], headers=(*JSON, *ANSWER_HEADERS))
    body = {"model": "plain", **BODIES["/v1/chat/completions"]}
    response = gateway.post("/v1/chat/completions", json=body, headers={"origin": origin})
    allowed = [value for name, value in response.headers.multi_items() if name == "access-control-allow-origin"]
    assert allowed == ([PAGE] if passes_more(gateway) and origin == PAGE else [])
