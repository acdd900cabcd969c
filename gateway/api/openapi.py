"""The gateway's routes as an OpenAPI document, with the descriptions of headers and the example bodies.

A schema of a call's body lists the fields that the gateway reads. Further fields are allowed, and engines check them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import msgspec

from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.gateway.api.program_api import PATH as PROGRAMS
from plait.gateway.api.program_api import ProgramBody
from plait.gateway.api.semantic_api import GetBody, SessionBody, VariableBody
from plait.gateway.calls.annotations import PROGRAM_WITH_GETS, TAKEN
from plait.gateway.calls.routes import CHAT_PATH, KINDS, ROUTES, TEXT_PATH, ForwardedRequest
from plait.gateway.chaining.submission import SubmitBody

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

_MESSAGES: Final = [{"role": "user", "content": "Say hello."}]

EXAMPLES: Final[dict[str, Json]] = {
    "/v1/chat/completions": {"model": "demo", "messages": _MESSAGES, "max_tokens": 16},
    "/v1/completions": {"model": "demo", "prompt": "Hello", "max_tokens": 16},
    "/v1/responses": {"model": "demo", "input": "Say hello.", "max_output_tokens": 16},
    "/v1/responses/input_tokens": {"model": "demo", "input": "Say hello."},
    "/v1/messages": {"model": "demo", "messages": _MESSAGES, "max_tokens": 16},
    "/v1/messages/count_tokens": {"model": "demo", "messages": _MESSAGES},
    "/v1/embeddings": {"model": "demo", "input": "Hello"},
    "/v1/rerank": {"model": "demo", "query": "greetings", "documents": ["hello", "stone"]},
    "/rerank": {"model": "demo", "query": "greetings", "documents": ["hello", "stone"]},
    "/v1/score": {"model": "demo", "text_1": "hello", "text_2": ["hi", "stone"]},
    "/score": {"model": "demo", "text_1": "hello", "text_2": ["hi", "stone"]},
    "/v2/rerank": {"model": "demo", "query": "greetings", "documents": ["hello", "stone"]},
    "/v1/classify": {"model": "demo", "input": "Hello"},
    "/classify": {"model": "demo", "input": "Hello"},
    "/pooling": {"model": "demo", "input": "Hello"},
    "/v1/moderations": {"model": "demo", "input": "Hello"},
    "/v1/images/generations": {"model": "demo", "prompt": "A cat", "n": 1},
    "/v1/audio/speech": {"model": "demo", "voice": "alloy", "input": "Hello"},
    "/tokenize": {"model": "demo", "prompt": "Hello"},
    "/detokenize": {"model": "demo", "tokens": [1, 2, 3]},
    "/v1/sessions": {"ttl_s": 600},
    "/v1/variables": {"session_id": "s", "semantic_var_id": "topic", "value": "rain"},
    "/v1/get": {"session_id": "s", "semantic_var_id": "summary", "criteria": "latency"},
    "/v1/submit": {
        "session_id": "s",
        "model": "demo",
        "messages": [
            {"role": "user", "content": "Sum up {{topic}}."},
            {"role": "assistant", "content": "{{summary}}"},
        ],
        "placeholders": [
            {"name": "topic", "semantic_var_id": "topic"},
            {"name": "summary", "in_out": True, "semantic_var_id": "summary"},
        ],
    },
    "/v1/programs": {
        "values": {"topic": "rain"},
        "calls": [
            {
                "model": "demo",
                "messages": [
                    {"role": "user", "content": "Write about {{topic}}."},
                    {"role": "assistant", "content": "{{text}}"},
                ],
                "placeholders": [{"name": "topic"}, {"name": "text", "in_out": True, "semantic_var_id": "text"}],
            }
        ],
        "gets": {"text": None},
    },
}
"""By path: an example body for a POST."""


_BODIES: Final[Mapping[str, type[msgspec.Struct]]] = {
    CHAT_PATH: ChatRequest,
    TEXT_PATH: CompletionRequest,
    **{path: ForwardedRequest for path, route in ROUTES.items() if path not in KINDS and not route.has_files},
    "/v1/programs": ProgramBody,
    "/v1/sessions": SessionBody,
    "/v1/submit": SubmitBody,
    "/v1/get": GetBody,
    "/v1/variables": VariableBody,
}
"""By path of a POST: the type of its JSON body, with the fields that the gateway reads."""

_FILES: Final = {
    "/v1/images/edits": "image",
    "/v1/audio/transcriptions": "file",
    "/v1/audio/translations": "file",
}
"""By path of a POST whose body is a form: the field with the file."""

_POSTS: Final = {
    "/ping": "Whether the gateway runs",
    "/v1/responses/{response_id}/cancel": "Cancel a response in the background",
    "/v1/sessions/{session_id}/close": "Say that no more calls of a session come",
    "/admin/engines": "Add an engine",
    "/admin/engines/{name}": "Drain an engine, or give it calls again",
    "/admin/explain": "What would be decided now for a call",
}
"""By path of a POST whose body is empty or not described here: its summary."""

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
    "/v1/responses/{response_id}": "A response that is stored or in the background",
    "/v1/responses/{response_id}/input_items": "The input of a response",
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
    "/v1/receipts/{request_id}": "Why a request went where it went, and what came of it",
    "/admin/receipts": "The receipts of the newest or the worst requests",
    "/admin/receipts/{request_id}": "The receipt of one request",
    "/admin/status": "What is wrong now, the engines, and what waits",
    "/admin/live": "The fleet and its calls, as server-sent events; needs the admin key",
    "/admin/": "The live view, a page that shows /admin/live",
    "/admin/app.js": "Its script",
    "/admin/app.css": "Its style",
    "/admin/icon.svg": "Its icon",
}

_DELETES: Final = {
    "/v1/responses/{response_id}": "Forget a response",
    "/v1/sessions/{session_id}": "Delete a session",
    "/v1/sessions/{session_id}/calls/{call_id}": "Cancel a call of a session",
    "/admin/engines/{name}": "Remove an engine",
}


@cache
def document(version: str) -> bytes:
    _, schemas = msgspec.json.schema_components(set(_BODIES.values()), ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        for name in [name for name, field in schema.get("properties", {}).items() if field.get("type") == "null"]:
            del schema["properties"][name]  # refused
        if schema.get("type") == "object":
            schema.setdefault("additionalProperties", True)  # the default, but generators of clients need it stated
    paths: dict[str, Json] = {}
    for path, body in _BODIES.items():
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        content = {"application/json": {"schema": schema, "example": EXAMPLES[path]}}
        paths.setdefault(path, {})["post"] = {
            **_call(path, _SUMMARIES[path]),
            "requestBody": {"required": True, "content": content},
        }
    for path, name in _FILES.items():
        fields = {"model": {"type": "string"}, name: {"type": "string", "contentMediaType": "application/octet-stream"}}
        form = {"type": "object", "properties": fields, "required": [name], "additionalProperties": True}
        content = {"multipart/form-data": {"schema": form}}
        paths[path] = {"post": {**_call(path, _SUMMARIES[path]), "requestBody": {"required": True, "content": content}}}
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
    """The operation of a call, or of sessions: `_operation` with the headers of request and answer."""
    operation = _operation(path, summary)
    taken = TAKEN[PROGRAM_WITH_GETS if path == PROGRAMS else path] if path not in ROUTES else None
    operation["parameters"] = [
        {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
        for name, (text, schema) in REQUEST_HEADERS.items()
        if taken is None or name.removeprefix("plait-").replace("-", "_") in taken
    ]
    operation["responses"]["200"]["headers"] = {
        name: {"description": text, "schema": {"type": "string"}}
        for name, text in RESPONSE_HEADERS.items()
        if taken is None or (name == "plait-slo" and path in {PROGRAMS, "/v1/get"})
    }
    return operation


def _operation(path: str, summary: str) -> Json:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    answers: Json = {"200": {"description": "The answer"}, "default": {"description": "An error, in the API's shape"}}
    return {"summary": summary, "responses": answers} | ({"parameters": parameters} if parameters else {})
