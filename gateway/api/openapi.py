"""The gateway's routes as an OpenAPI document.

Bodies of calls are open: the schemas say what the gateway itself reads, and engines judge every other field.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

import msgspec

from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.gateway.api.openapi_parts import EXAMPLES, REQUEST_HEADERS, RESPONSE_HEADERS, Json
from plait.gateway.api.program_api import ProgramBody
from plait.gateway.api.semantic_api import GetBody, SessionBody, VariableBody
from plait.gateway.calls.routes import CHAT_PATH, ROUTES, TEXT_PATH, ForwardedRequest
from plait.gateway.programs.submission import SubmitBody

_BODIES: Final[Mapping[str, type[msgspec.Struct]]] = {
    CHAT_PATH: ChatRequest,
    TEXT_PATH: CompletionRequest,
    **{path: ForwardedRequest for path in ROUTES if path not in {CHAT_PATH, TEXT_PATH}},
    "/v1/programs": ProgramBody,
    "/v1/sessions": SessionBody,
    "/v1/submit": SubmitBody,
    "/v1/get": GetBody,
    "/v1/variables": VariableBody,
}
"""What the gateway reads of the body of each POST."""

_POSTS: Final = {
    "/ping": "Whether the gateway runs",
    "/v1/sessions/{session_id}/close": "Say that no more calls of a session come",
    "/admin/engines": "Add an engine",
    "/admin/engines/{name}": "Drain an engine, or give it calls again",
}
"""POSTs without a body that the gateway's users would write. Those of the admin API need its key."""

_SUMMARIES: Final = {
    **{path: route.summary for path, route in ROUTES.items()},
    "/v1/programs": "Run a whole program of calls",
    "/v1/sessions": "Open a session",
    "/v1/submit": "Submit a call with placeholders",
    "/v1/get": "Wait for a variable",
    "/v1/variables": "Set a variable",
}

_READS: Final = {
    "/": "A page for people; leads to the live view where there is an admin API",
    "/v1/models": "The models that are served",
    "/v1/models/{model}": "One model",
    "/v1/responses/{response_id}": "A stored response",
    "/v1/responses/{response_id}/input_items": "The input of a stored response",
    "/v1/sessions/{session_id}": "A session",
    "/health": "Whether the gateway runs",
    "/ready": "Whether engines are up for every model",
    "/ping": "Whether the gateway runs",
    "/version": "The gateway's version",
    "/load": "Calls on engines",
    "/get_model_info": "The model that a request without a model gets",
    "/metrics": "Prometheus metrics",
    "/openapi.json": "This document",
    "/v1/variables/{session_id}/{variable}": "A variable's value and its state",
    "/admin/engines": "The engines",
    "/admin/engines/{name}": "One engine",
    "/admin/live": "The fleet and its calls, as server-sent events; needs the admin key",
    "/admin/": "The live view, a page that shows /admin/live",
    "/admin/app.js": "Its script",
    "/admin/app.css": "Its style",
    "/admin/icon.svg": "Its icon",
}

_DELETES: Final = {
    "/v1/responses/{response_id}": "Forget a stored response",
    "/v1/sessions/{session_id}": "Delete a session",
    "/v1/sessions/{session_id}/calls/{call_id}": "Cancel a call of a session",
    "/admin/engines/{name}": "Remove an engine",
}


@cache
def document(version: str) -> bytes:
    """The document, as JSON."""
    _, schemas = msgspec.json.schema_components(set(_BODIES.values()), ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        if schema.get("type") == "object":
            schema.setdefault("additionalProperties", True)  # the default, but tools for clients want it said
    paths: dict[str, Json] = {}
    for path, body in _BODIES.items():
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        content = {"application/json": {"schema": schema, "example": EXAMPLES[path]}}
        paths.setdefault(path, {})["post"] = {
            **(_call if path in ROUTES else _operation)(path, _SUMMARIES[path]),
            "requestBody": {"required": True, "content": content},
        }
    for method, summaries in (("get", _READS), ("post", _POSTS), ("delete", _DELETES)):
        for path, summary in summaries.items():
            paths.setdefault(path, {})[method] = _operation(path, summary)
    bearer = {"type": "http", "scheme": "bearer"}
    encoded = msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Plait", "version": version, "summary": "An OpenAI-compatible gateway"},
            "paths": paths,
            "components": {"schemas": schemas, "securitySchemes": {"key": bearer}},
            "security": [{}, {"key": []}],
        }
    )
    return encoded.replace(rb"\\Z", b"$")  # the end of a text in JSON Schema's patterns, which are not Python's


def _call(path: str, summary: str) -> Json:
    """A call's operation, with the headers of calls."""
    operation = _operation(path, summary)
    operation["parameters"] = [
        {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
        for name, (text, schema) in REQUEST_HEADERS.items()
    ]
    operation["responses"]["200"]["headers"] = {
        name: {"description": text, "schema": {"type": "string"}} for name, text in RESPONSE_HEADERS.items()
    }
    return operation


def _operation(path: str, summary: str) -> Json:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    answers: Json = {"200": {"description": "The answer"}, "default": {"description": "An error, in the API's shape"}}
    return {"summary": summary, "responses": answers} | ({"parameters": parameters} if parameters else {})
