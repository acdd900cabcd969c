"""What the gateway says of itself, and what stands in front of its routes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from starlette.routing import Route

from plait.backends.protocol.api_errors import COMPLETION_ERRORS
from plait.gateway.api.error_answers import UnknownPath
from plait.gateway.api.own_route import OwnRoute
from plait.gateway.app import Gateway
from plait.gateway.calls.annotations import _HEADER_KEYS
from plait.gateway.calls.routes import KINDS, ForwardedRequest
from plait.gateway.config.file import parse_config
from plait.gateway.config.sections import Config
from tests.call_routes import ROUTES

ENGINES = [{"name": "a", "url": "http://127.0.0.1:1"}]


def client(**server: Any) -> httpx.AsyncClient:
    gateway = Gateway(parse_config({"engines": ENGINES, "server": server}, "test"))
    gateway.kernel.router.health.answered("a", {"m": 1_000})
    return httpx.AsyncClient(transport=httpx.ASGITransport(gateway.app), base_url="http://gateway")


@pytest.mark.parametrize("path", ["/", "/version", "/ping", "/load", "/get_model_info", "/openapi.json", "/health"])
async def test_tools_find_what_they_ask_for(path: str) -> None:
    async with client() as http:
        assert (await http.get(path)).status_code == 200


async def test_the_page_names_models_only_where_anybody_may_ask() -> None:
    async with client() as http, client(api_keys=["k"]) as keyed:
        assert ": m." in (await http.get("/")).text
        assert ": m." not in (await keyed.get("/")).text
        assert (await keyed.get("/get_model_info")).status_code == 401


async def test_the_document_has_every_route_of_a_call_and_leaves_its_body_open() -> None:
    async with client() as http:
        document = (await http.get("/openapi.json")).json()
    assert ROUTES.keys() <= {path for path, methods in document["paths"].items() if "post" in methods}
    for path in ROUTES:
        ((_, content),) = document["paths"][path]["post"]["requestBody"]["content"].items()
        schema = content["schema"]
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        assert schema["additionalProperties"] is True
    assert document["components"]["schemas"]["GetBody"]["additionalProperties"] is False


async def test_the_document_has_every_route_that_answers() -> None:
    """With the headers and an example of a call."""
    made = Gateway(Config())
    routes = [route for route in made.routes if isinstance(route, Route)]
    answering = {(path, "POST") for path in ROUTES} | {
        (route.path.replace(":path}", "}"), method)
        for route in routes
        for method in (route.methods or ())
        if method != "HEAD" and not isinstance(route, UnknownPath)
    }
    async with client() as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    assert {(path, method.upper()) for path, methods in paths.items() for method in methods} == answering
    chat = paths["/v1/chat/completions"]["post"]
    assert {parameter["name"] for parameter in chat["parameters"]} == _HEADER_KEYS.keys()
    assert "plait-cached-tokens" in chat["responses"]["200"]["headers"]


def test_examples_are_valid_bodies() -> None:
    own = [route for route in Gateway(Config()).routes if isinstance(route, OwnRoute) and route.body is not None]
    bodies = {route.path: (route.example, route.body) for route in own}
    bodies |= {path: (route.example, KINDS.get(path, ForwardedRequest)) for path, route in ROUTES.items()}
    assert len(bodies) > 20
    for path, (example, body) in bodies.items():
        assert example or ROUTES[path].file
        assert body is not None
        msgspec.json.decode(msgspec.json.encode(example), type=body)


async def test_the_documents_patterns_are_those_of_json_schema() -> None:
    async with client() as http:
        document = (await http.get("/openapi.json")).json()
    name = document["components"]["schemas"]["GetBody"]["properties"]["semantic_var_id"]
    assert name == {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,63}$"}
    assert "\\\\Z" not in json.dumps(document)


async def test_metrics_may_need_a_key_of_their_own() -> None:
    async with client(metrics_key="k", api_keys=["other"]) as http:
        assert (await http.get("/metrics")).status_code == 401
        assert (await http.get("/metrics", headers={"authorization": "Bearer other"})).status_code == 401
        assert (await http.get("/metrics", headers={"authorization": "Bearer k"})).status_code == 200


async def test_requests_come_with_the_root_path_and_without() -> None:
    async with client(root_path="/llm") as http:
        assert (await http.get("/llm/v1/models")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.get("/llmv1/models")).status_code == 404
        assert (await http.post("/llm/v1/chat/completions", content=b"{")).json()["error"]["code"] == "invalid_json"


async def test_pages_of_the_configured_origins_may_call() -> None:
    async with client(cors_origins=["https://app.example"]) as http:
        asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
        allowed = await http.options("/v1/chat/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        from_public = {**asked, "access-control-request-private-network": "true"}
        private = await http.options("/v1/chat/completions", headers=from_public)
        assert (private.status_code, private.headers["access-control-allow-private-network"]) == (200, "true")
        refused = await http.options("/v1/models", headers={**from_public, "origin": "https://other.example"})
        assert refused.status_code == 400
        other = await http.get("/v1/models", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
        own = await http.get("/v1/models", headers={"origin": "https://app.example"})
        assert "plait-engine" in own.headers["access-control-expose-headers"]


def test_errors_have_the_form_of_the_api_that_owns_the_path() -> None:
    of_messages = ROUTES["/v1/messages"].form.errors
    assert ROUTES.errors_of("/v1/messages/batches/1") is of_messages
    for path in ("/v1/messagesx", "/v1/responses/r1", "/v1/none", "/", "", "/" * 60_000):
        assert ROUTES.errors_of(path) is COMPLETION_ERRORS
    assert ROUTES.errors_of("/v1/responses") is ROUTES["/v1/responses"].form.errors


async def test_all_methods_of_a_path_are_allowed() -> None:
    async with client() as http:
        allowed = [(await http.options(path)).headers["allow"] for path in ("/ping", "/v1/sessions/s")]
    assert [sorted(one.split(", ")) for one in allowed] == [["GET", "HEAD", "POST"], ["DELETE", "GET", "HEAD"]]
