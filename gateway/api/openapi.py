"""The gateway's routes as an OpenAPI document.

Bodies of calls are open: the schemas say what the gateway itself reads, and engines judge every other field.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import msgspec

from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.gateway.api.program_api import ProgramBody
from plait.gateway.api.semantic_api import GetBody, SessionBody, VariableBody
from plait.gateway.calls.routes import CHAT_PATH, ROUTES, TEXT_PATH, ForwardedRequest
from plait.gateway.programs.submission import SubmitBody

Json = dict[str, Any]

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

_SUMMARIES: Final = {
    **{path: route.summary for path, route in ROUTES.items()},
    "/v1/programs": "Run a whole program of calls",
    "/v1/sessions": "Open a session",
    "/v1/submit": "Submit a call with placeholders",
    "/v1/get": "Wait for a variable",
    "/v1/variables": "Set a variable",
}

_READS: Final = {
    "/": "A page for people",
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
}

_DELETES: Final = {
    "/v1/responses/{response_id}": "Forget a stored response",
    "/v1/sessions/{session_id}": "Delete a session",
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
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
        paths.setdefault(path, {})["post"] = {
            **_operation(path, _SUMMARIES[path]),
            "requestBody": {"required": True, "content": content},
        }
    for method, summaries in (("get", _READS), ("delete", _DELETES)):
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


def _operation(path: str, summary: str) -> Json:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    answers: Json = {"200": {"description": "The answer"}, "default": {"description": "An error, in the API's shape"}}
    return {"summary": summary, "responses": answers} | ({"parameters": parameters} if parameters else {})
