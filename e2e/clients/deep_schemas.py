"""The gateway's OpenAPI document with what clients send to each route, so that generated requests reach an engine.

The document itself says only what the gateway reads, because engines judge the rest. Requests made of that alone would
nearly all be refused for their model or for the lack of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Json = dict[str, Any]

TEXT: Final[Json] = {"type": "string", "maxLength": 200}
TEXTS: Final[Json] = {"type": "array", "items": TEXT, "maxItems": 4}
LIMIT: Final[Json] = {"type": "integer", "minimum": 1, "maximum": 20}
FLAG: Final[Json] = {"type": "boolean"}
ANYTHING: Final[Json] = {}


def object_of(required: Mapping[str, Json], **optional: Json) -> Json:
    """An object with these fields, and any others."""
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def one_of(*values: str) -> Json:
    """One of these texts."""
    return {"enum": list(values)}


def list_of(item: Json, least: int = 1) -> Json:
    """A short list."""
    return {"type": "array", "items": item, "minItems": least, "maxItems": 3}


SCHEMA: Final = object_of({"type": one_of("object")}, properties={"type": "object", "additionalProperties": ANYTHING})
PART: Final = {
    "anyOf": [
        object_of({"type": one_of("text"), "text": TEXT}),
        object_of({"type": one_of("input_text", "output_text"), "text": TEXT}),
        object_of({"type": one_of("image_url"), "image_url": object_of({"url": TEXT})}),
        object_of({"type": one_of("tool_use", "tool_result")}, id=TEXT, tool_use_id=TEXT, content=ANYTHING),
        object_of({"type": TEXT}),
    ]
}
CONTENT: Final = {"anyOf": [TEXT, list_of(PART, 0)]}
CALL: Final = object_of({"id": TEXT, "function": object_of({"name": TEXT, "arguments": TEXT})})
MESSAGE: Final = object_of(
    {"role": one_of("system", "user", "assistant", "tool"), "content": CONTENT},
    tool_calls=list_of(CALL, 0),
    tool_call_id=TEXT,
)
ITEM: Final = {
    "anyOf": [
        object_of({"role": one_of("system", "user", "assistant"), "content": CONTENT}),
        object_of({"type": one_of("function_call"), "call_id": TEXT, "name": TEXT, "arguments": TEXT}),
        object_of({"type": one_of("function_call_output"), "call_id": TEXT, "output": CONTENT}),
        object_of({"type": TEXT}),
    ]
}
TOOL: Final = object_of({"type": one_of("function"), "function": object_of({"name": TEXT}, parameters=SCHEMA)})
FORMAT: Final = object_of(
    {"type": one_of("text", "json_object", "json_schema")}, json_schema=object_of({"name": TEXT}, schema=SCHEMA)
)
SHARED: Final = {"stream": FLAG, "temperature": {"type": "number"}, "stop": {"anyOf": [TEXT, TEXTS]}}

FIELDS: Final[Mapping[str, Json]] = {
    "/v1/chat/completions": object_of(
        {"messages": list_of(MESSAGE), "max_tokens": LIMIT},
        n={"type": "integer", "minimum": 1, "maximum": 3},
        tools=list_of(TOOL),
        tool_choice=one_of("auto", "none", "required"),
        response_format=FORMAT,
        logprobs=FLAG,
        **SHARED,
    ),
    "/v1/completions": object_of(
        {"prompt": {"anyOf": [TEXT, TEXTS, list_of({"type": "integer"})]}, "max_tokens": LIMIT},
        echo=FLAG,
        logprobs={"type": "integer"},
        **SHARED,
    ),
    "/v1/responses": object_of(
        {"input": {"anyOf": [TEXT, list_of(ITEM)]}, "max_output_tokens": LIMIT},
        instructions=TEXT,
        tools=list_of(object_of({"type": one_of("function"), "name": TEXT}, parameters=SCHEMA)),
        tool_choice={"anyOf": [one_of("auto", "required"), object_of({"type": TEXT})]},
        text=object_of({"format": object_of({"type": one_of("text", "json_schema")}, schema=SCHEMA)}),
        reasoning={"type": "object"},
        **SHARED,
    ),
    "/v1/messages": object_of(
        {"messages": list_of(MESSAGE), "max_tokens": LIMIT},
        system=CONTENT,
        tools=list_of(object_of({"name": TEXT, "input_schema": SCHEMA})),
        tool_choice=object_of({"type": one_of("auto", "any", "tool")}, name=TEXT),
        thinking={"type": "object"},
        stream=FLAG,
    ),
    "/v1/messages/count_tokens": object_of({"messages": list_of(MESSAGE)}, system=CONTENT),
    "/v1/embeddings": object_of(
        {"input": {"anyOf": [TEXT, TEXTS, list_of({"type": "integer"})]}}, encoding_format=TEXT
    ),
    "/v1/rerank": object_of({"query": TEXT, "documents": TEXTS}, top_n={"type": "integer"}),
    "/rerank": object_of({"query": TEXT, "documents": TEXTS}),
    "/v1/score": object_of({"text_1": {"anyOf": [TEXT, TEXTS]}, "text_2": {"anyOf": [TEXT, TEXTS]}}),
    "/score": object_of({"text_1": TEXT, "text_2": TEXT}),
    "/tokenize": {"anyOf": [object_of({"prompt": TEXT}), object_of({"messages": list_of(MESSAGE)})]},
    "/detokenize": object_of({"tokens": list_of({"type": "integer"})}),
}
"""What clients send to each route, beside the model."""


def deepened(document: Json, model: str) -> Json:
    """The document with these fields in its routes' bodies. Requests that fit it name `model`."""
    of_model = object_of({"model": one_of(model)})
    paths = dict(document["paths"])
    for path, fields in FIELDS.items():
        if path not in paths:
            continue
        post = dict(paths[path]["post"])
        content = {"application/json": {"schema": {"allOf": [of_model, fields]}}}
        post["requestBody"] = {"required": True, "content": content}
        paths[path] = {**paths[path], "post": post}
    return {**document, "paths": paths}
