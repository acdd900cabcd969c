"""The gateway's routes as an OpenAPI document, with the descriptions of headers and the example bodies.

A schema of a call's body lists the fields that the gateway reads. Further fields are allowed, and engines check them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec
from starlette.routing import BaseRoute

from plait.gateway.api.own_route import OwnRoute
from plait.gateway.calls.routes import KINDS, CallRoute, ForwardedRequest

Json = dict[str, Any]

_NAME: Final = "[A-Za-z_][A-Za-z0-9_]{0,63}"
_MILLISECONDS: Final[Json] = {"type": "number", "exclusiveMinimum": 0}
_OBJECTIVE: Final[Json] = {"type": "string", "enum": ["latency", "throughput"]}

REQUEST_HEADERS: Final[dict[str, tuple[str, Json]]] = {
    "plait-slo-ttft-ms": ("Milliseconds to the first token that the call is promised", _MILLISECONDS),
    "plait-slo-tpot-ms": ("Milliseconds for each token after the first", _MILLISECONDS),
    "plait-slo-jct-ms": ("Milliseconds to the last token", _MILLISECONDS),
    "plait-priority": (
        "Of a tenant's calls, lower ones go first",
        {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    ),
    "plait-objective": ("What the call's value is wanted for", _OBJECTIVE),
    "plait-session-objective": ("What the session's results are wanted for", _OBJECTIVE),
    "plait-receipt": ("Whether the answer says why the call went where it went", {"type": "boolean"}),
    "plait-durable": ("Whether a new session outlives the gateway, if that has a store", {"type": "boolean"}),
    "plait-session": (
        "The session that the call is of",
        {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
    ),
    "plait-output": ("The semantic variable that gets the call's text", {"type": "string", "pattern": f"^{_NAME}$"}),
    "plait-inputs": (
        "The semantic variables in the prompt, separated by commas",
        {"type": "string", "pattern": f"^{_NAME}(, *{_NAME})*$"},
    ),
    "plait-when": ("The condition on which the call runs", {"type": "string"}),
}
"""By header of a call: its description, and the schema of its value."""

RESPONSE_HEADERS: Final[dict[str, str]] = {
    "x-request-id": "The request's id in the gateway's log",
    "plait-engine": "The engine that answered",
    "plait-placement": "Why it went there",
    "plait-cached-tokens": "Prompt tokens that were expected in the engine's cache",
    "plait-loaded-tokens": "Of these, tokens that come from tiers below the accelerator, by tier",
    "plait-waited-s": "Seconds that the call waited in the gateway",
    "plait-slo": "Of a call with a TTFT or a JCT, or a TPOT that is missed. `expected`: the engine is expected to "
    "meet it; `at-risk`: no engine was; `missed`: it is over, or no iteration of the engine is as short as the TPOT; "
    "`not-judged`: the answer is not streamed, and no JCT was promised. "
    "Of a get or a program with a JCT: whether it was kept",
    "plait-session": "The call's session",
    "plait-ignored": "What of a translated request was left out, each with its place",
}
"""By header of the answer to a call: its description."""


def document(version: str, calls: Collection[CallRoute], routes: Iterable[BaseRoute]) -> bytes:
    """The document of the routes of calls, and of those of `routes` that say what they are."""
    own = [route for route in routes if isinstance(route, OwnRoute)]
    bodies = {route.body for route in own if route.body is not None} | {ForwardedRequest, *KINDS.values()}
    paths: dict[str, Json] = {}
    for call in calls:
        paths.setdefault(call.path, {})["post"] = _called(call)
    for route in own:
        path = route.path.replace(":path}", "}")
        for method, summary in route.summaries.items():
            paths.setdefault(path, {})[method.lower()] = _operation_of(path, summary, route)
    bearer = {"type": "http", "scheme": "bearer"}
    encoded = msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Plait", "version": version, "summary": "An OpenAI-compatible gateway"},
            "paths": paths,
            "components": {"schemas": _schemas(bodies), "securitySchemes": {"key": bearer}},
            "security": [{}, {"key": []}],
        }
    )
    return encoded.replace(rb"\\Z", b"$")  # the end of a text in JSON Schema's patterns, which are not Python's


def _schemas(bodies: Collection[type[msgspec.Struct]]) -> Json:
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        for name in [name for name, field in schema.get("properties", {}).items() if field.get("type") == "null"]:
            del schema["properties"][name]  # refused
        if schema.get("type") == "object":
            schema.setdefault("additionalProperties", True)  # the default, but generators of clients need it stated
    return schemas


def _called(call: CallRoute) -> Json:
    """The operation of a call."""
    operation = _operation(call.path, call.summary, REQUEST_HEADERS, RESPONSE_HEADERS)
    if call.file:
        file = {"type": "string", "contentMediaType": "application/octet-stream"}
        fields = {"model": {"type": "string"}, call.file: file}
        form = {"type": "object", "properties": fields, "required": [call.file], "additionalProperties": True}
        return {**operation, "requestBody": _required("multipart/form-data", {"schema": form})}
    return {**operation, "requestBody": _json(KINDS.get(call.path, ForwardedRequest), call.example)}


def _operation_of(path: str, summary: str, route: OwnRoute) -> Json:
    """The operation of a route that is no call's."""
    taken = {f"plait-{name.replace('_', '-')}" for name in route.annotations}
    operation = _operation(path, summary, [name for name in REQUEST_HEADERS if name in taken], route.tells)
    return operation if route.body is None else {**operation, "requestBody": _json(route.body, route.example)}


def _operation(path: str, summary: str, asked: Iterable[str] = (), told: Collection[str] = ()) -> Json:
    """An operation whose requests may have the headers `asked`, and its answers those that are `told`."""
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    for name in asked:
        text, schema = REQUEST_HEADERS[name]
        parameters.append({"name": name, "in": "header", "required": False, "description": text, "schema": schema})
    answer: Json = {"description": "The answer"}
    if told:
        answer["headers"] = {
            name: {"description": RESPONSE_HEADERS[name], "schema": {"type": "string"}} for name in told
        }
    answers: Json = {"200": answer, "default": {"description": "An error, in the API's shape"}}
    return {"summary": summary, "responses": answers} | ({"parameters": parameters} if parameters else {})


def _json(body: type[msgspec.Struct], example: Mapping[str, object] | None) -> Json:
    return _required(
        "application/json", {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}, "example": example}
    )


def _required(media_type: str, content: Json) -> Json:
    return {"required": True, "content": {media_type: content}}
