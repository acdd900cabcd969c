"""The prompt of a chat is the one that the engine makes of the same body, whatever fields the body has.

Each body is sent to the engine and then through the gateway. SGLang gets token ids from the gateway where these are
known to be its own, and the messages alone where they are not. A prediction is compared where the gateway is sure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from e2e.real_engines.calls import fields_of
from e2e.real_engines.engine import MODEL, EngineKind, RealEngine
from e2e.real_engines.findings import Findings
from e2e.real_engines.fleet import EngineFleet, new_gateway
from e2e.server_process import Server
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS

_TURNS: Final = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}\
{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}\
{% if message.tool_calls %}{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endif %}\
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_TOOLS: Final = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
TEMPLATES: Final = {
    "effort": "effort {{ reasoning_effort | default('medium') }}\n" + _TOOLS + _TURNS,
    "thinking": _TOOLS
    + _TURNS
    + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    + "{% if thinking is defined and thinking %}<think>{% endif %}",
    "documents": "{% if documents %}{% for document in documents %}{{ document.text }}\n{% endfor %}{% endif %}"
    + _TOOLS
    + _TURNS.replace("{{ message.content }}", "{{ message.content | trim }}"),
}
NAMES: Final = [*TEMPLATES] if "PLAIT_NIGHTLY" in os.environ else ["effort"]
"""Each takes a start of an engine."""

_TEXT: Final = "The quick brown fox jumps over the lazy dog. " * 30
_USER: Final = {"role": "user", "content": _TEXT}
_TOOL: Final = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object", "properties": {}}},
}
_OTHER_TOOL: Final = {"type": "function", "function": {"parameters": {"type": "object"}, "name": "other"}}
_TWO: Final = [_TOOL, _OTHER_TOOL]
_CALL: Final = {"id": "call1", "type": "function", "function": {"arguments": '{"a": 1}', "name": "look_up"}}
_ASKED: Final = [_USER, {"role": "assistant", "content": None, "tool_calls": [_CALL]}]
_PARTS: Final = [{"type": "text", "text": _TEXT}, {"type": "text", "text": "Twice."}]
_NAMED: Final = {"type": "function", "function": {"name": "other"}}
_DOCUMENTS: Final = [{"title": "t", "text": _TEXT}]

BODIES: Final[list[dict[str, Any]]] = [
    {},
    {"messages": [{"role": "system", "content": "Be terse."}, _USER]},
    {"messages": [_USER, {"role": "assistant", "content": "Yes."}, _USER]},
    {"messages": [_USER, {"role": "assistant", "content": "Yes."}]},
    {"messages": [{"role": "user", "content": _PARTS}]},
    {"messages": [{"role": "system", "content": _PARTS}, _USER]},
    {"messages": [{"role": "user", "content": _TEXT, "name": "bob"}]},
    {"messages": [{"role": "developer", "content": "Be terse."}, _USER]},
    {"messages": [*_ASKED, {"role": "tool", "tool_call_id": "call1", "content": "found"}], "tools": [_TOOL]},
    {"messages": [*_ASKED, {"role": "tool", "tool_call_id": "call1", "content": _PARTS}], "tools": [_TOOL]},
    {"tools": [_TOOL]},
    {"tools": _TWO},
    {"tools": _TWO, "tool_choice": "auto"},
    {"tools": _TWO, "tool_choice": "none"},
    {"tools": _TWO, "tool_choice": _NAMED},
    {"tools": []},
    {"reasoning_effort": "none"},
    {"reasoning_effort": "low"},
    {"reasoning_effort": "high"},
    {"reasoning_effort": None},
    {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
    {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
    {"reasoning": {"effort": "low"}},
    {"reasoning": {"enabled": True}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": True, "unread": 1}},
    {"chat_template_kwargs": {"reasoning_effort": "none"}},
    {"documents": _DOCUMENTS},
    {"documents": _DOCUMENTS, "chat_template_kwargs": {"documents": [{"text": "others"}]}},
    {"chat_template_kwargs": {"documents": [{"text": "others"}]}},
    {"messages": [_USER, {"role": "assistant", "content": "Well, "}], "continue_final_message": True,
     "add_generation_prompt": False},
    {"add_generation_prompt": False},
    {"add_special_tokens": True},
    {"temperature": 0.5, "top_p": 0.9, "stop": ["never"], "n": 2, "user": "u"},
    {"metadata": {"a": "b"}, "parallel_tool_calls": False, "logprobs": True, "top_logprobs": 2},
    {"response_format": {"type": "text"}, "seed": 3, "frequency_penalty": 0.1},
    {"stream_options": None, "max_completion_tokens": 2, "logit_bias": None},
    {"unknown_field": 1},
    {"tools": [_TOOL], "reasoning_effort": "low", "tool_choice": "none"},
    {"tools": [_TOOL], "reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
]  # fmt: skip


@dataclass(frozen=True)
class Templated:
    """An engine with one of the templates, and a gateway in front of it."""

    gateway: Server
    engine: RealEngine


@pytest.fixture(scope="module", params=NAMES)
def templated(
    request: pytest.FixtureRequest, kind: EngineKind, python: Path, model: Path, folder: Path
) -> Iterator[Templated]:
    name = str(request.param)
    if kind.name == "vllm" and "PLAIT_NIGHTLY" not in os.environ:
        pytest.skip("vLLM renders all chats itself: only predictions depend on the fields")
    path = folder / f"{name}.jinja"
    path.write_text(TEMPLATES[name])
    engine = kind.plait(f"engine-{name}", python, model, folder, flags=["--chat-template", str(path)])
    gateway = new_gateway(f"gateway-{name}", {engine.name: engine}, model, folder, chat_template=path)
    with ExitStack() as stack:
        EngineFleet(gateway, {engine.name: engine}).start(stack)
        yield Templated(gateway, engine)


def body_of(engine: RealEngine, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "messages": [_USER], "max_tokens": 1, engine.prompt_ids_option: True, **fields}


def test_each_body_has_the_engines_own_prompt(templated: Templated, kind: EngineKind, findings: Findings) -> None:
    fleet = EngineFleet(templated.gateway, {templated.engine.name: templated.engine})
    unsure = served = 0
    for fields in BODIES:
        body = body_of(templated.engine, fields)
        direct = templated.engine.post("/v1/chat/completions", json=body)
        fleet.settle()
        answer = templated.gateway.post("/v1/chat/completions", json=body)
        assert answer.status_code == direct.status_code, (fields, answer.text, direct.text)
        if direct.status_code != 200:
            continue
        served += 1
        found, wanted = answer.json(), direct.json()
        assert found["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"], fields
        assert templated.engine.prompt_ids(found) == templated.engine.prompt_ids(wanted), fields
        if not fields_of(kind, body).is_exact:
            unsure += 1
            continue
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert abs(int(answer.headers["plait-cached-tokens"]) - cached) <= TREE_BLOCK_TOKENS, fields
    findings.figures["chats with fields"] = {"bodies": len(BODIES), "served": served, "unsure": unsure}
    assert unsure <= 10
    assert templated.gateway.get("/ready").json().get("degraded") is None


def test_another_effort_is_not_predicted_to_be_cached(templated: Templated) -> None:
    """The template has the effort at its head, so that two efforts share no block."""
    if "effort" not in templated.engine.name:
        pytest.skip("the template has the effort elsewhere")
    text = f"Another one: {_TEXT}"
    fleet = EngineFleet(templated.gateway, {templated.engine.name: templated.engine})
    predicted = []
    for effort in ("low", "high", "high"):
        body = {
            **body_of(templated.engine, {"reasoning_effort": effort}),
            "messages": [{"role": "user", "content": text}],
        }
        answer = templated.gateway.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        predicted.append(int(answer.headers["plait-cached-tokens"]))
        fleet.settle()
    assert predicted[:2] == [0, 0]
    assert predicted[2] > 0
