"""What the OpenAPI document says of headers, and its examples."""

from __future__ import annotations

from typing import Any, Final

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
"""Each header of calls by its name: what it says, and the schema of its value."""

RESPONSE_HEADERS: Final[dict[str, str]] = {
    "x-request-id": "The request's id in the gateway's log",
    "plait-engine": "The engine that answered",
    "plait-placement": "Why it went there",
    "plait-cached-tokens": "Prompt tokens that were expected in the engine's cache",
    "plait-waited-s": "Seconds that the call waited in the gateway",
    "plait-slo": "Of a call with a TTFT. `expected`: the engine is expected to meet it; `at-risk`: no engine was",
    "plait-session": "The call's session",
}
"""Headers of calls' answers."""

_MESSAGES: Final = [{"role": "user", "content": "Say hello."}]

EXAMPLES: Final[dict[str, Json]] = {
    "/v1/chat/completions": {"model": "demo", "messages": _MESSAGES, "max_tokens": 16},
    "/v1/completions": {"model": "demo", "prompt": "Hello", "max_tokens": 16},
    "/v1/responses": {"model": "demo", "input": "Say hello.", "max_output_tokens": 16},
    "/v1/messages": {"model": "demo", "messages": _MESSAGES, "max_tokens": 16},
    "/v1/messages/count_tokens": {"model": "demo", "messages": _MESSAGES},
    "/v1/embeddings": {"model": "demo", "input": "Hello"},
    "/v1/rerank": {"model": "demo", "query": "greetings", "documents": ["hello", "stone"]},
    "/rerank": {"model": "demo", "query": "greetings", "documents": ["hello", "stone"]},
    "/v1/score": {"model": "demo", "text_1": "hello", "text_2": ["hi", "stone"]},
    "/score": {"model": "demo", "text_1": "hello", "text_2": ["hi", "stone"]},
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
"""A body for each POST that takes one."""
