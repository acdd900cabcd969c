"""Which fields of a chat leave its prompt alone, which are rendered as the engine does, and which make it unknown."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plait.backends.protocol.openai import ChatRequest
from plait.backends.tokenization.rendered_fields import INERT, RENDERED, RenderedFields, Renderers, rendered_fields

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
VLLM = Renderers()
SGLANG = Renderers(form="sglang", prepares=True)
UNATTESTED = Renderers(form="sglang")
MIXED = Renderers(is_mixed=True, prepares=True)


def rendered(renderers: Renderers, **fields: Any) -> RenderedFields:
    body = msgspec.json.encode({"messages": [USER], **fields})
    request = msgspec.json.decode(body, type=ChatRequest)
    return rendered_fields(request, msgspec.json.decode(body, type=dict[str, msgspec.Raw]), renderers)


@pytest.mark.parametrize("renderers", [VLLM, SGLANG, UNATTESTED, MIXED])
def test_inert_fields_leave_the_prompt_alone(renderers: Renderers) -> None:
    found = rendered(renderers, temperature=0.5, stop=["x"], metadata={"a": 1}, user="u", parallel_tool_calls=False)
    assert (found.tools, found.template_kwargs) == (None, None)
    assert (found.is_exact, found.is_plain) == (True, renderers != VLLM)


@pytest.mark.parametrize("renderers", [VLLM, SGLANG, UNATTESTED, MIXED])
def test_a_field_that_nobody_knows_makes_the_prompt_unknown(renderers: Renderers) -> None:
    assert not rendered(renderers, zz=1).is_exact
    assert not rendered(renderers, zz=1).is_plain
    assert rendered(renderers, zz=None).is_exact


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "x"},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"thinking": {"type": "enabled"}},
        {"task": "x"},
        {"session_params": {}},
        {"add_special_tokens": True},
        {"truncate_prompt_tokens": 3},
        {"mm_processor_kwargs": {}},
        {"reasoning_effort": 0.5},
        {"reasoning": {"effort": "odd"}},
        {"messages": [USER, {"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "system", "content": "s", "tools": TOOLS}, USER]},
    ],
)
def test_what_sglang_renders_in_a_way_of_its_own_is_unknown(fields: dict[str, Any]) -> None:
    assert not rendered(SGLANG, **fields).is_exact


@pytest.mark.parametrize(
    "fields", [{"add_special_tokens": True}, {"truncate_prompt_tokens": 3}, {"truncation_side": "left"}]
)
def test_what_vllm_renders_in_a_way_of_its_own_is_unknown(fields: dict[str, Any]) -> None:
    assert not rendered(VLLM, **fields).is_exact


@pytest.mark.parametrize("effort", ["none", "low"])
def test_an_effort_switches_thinking_unless_the_client_has(effort: str) -> None:
    thinks = effort != "none"
    assert rendered(VLLM, reasoning_effort=effort).template_kwargs == {
        "enable_thinking": thinks, "reasoning_effort": effort
    }  # fmt: skip
    given = {"reasoning_effort": "high", "enable_thinking": not thinks}
    assert rendered(VLLM, reasoning_effort=effort, chat_template_kwargs=given).template_kwargs == {
        "enable_thinking": not thinks, "reasoning_effort": effort
    }, "vLLM takes the field before the option"  # fmt: skip
    assert rendered(SGLANG, reasoning_effort=effort).template_kwargs == {
        "thinking": thinks, "enable_thinking": thinks, "reasoning_effort": effort
    }  # fmt: skip
    assert rendered(SGLANG, reasoning_effort=effort, chat_template_kwargs=given).template_kwargs == {
        "thinking": thinks, "enable_thinking": not thinks, "reasoning_effort": "high"
    }, "SGLang takes the option before the field"  # fmt: skip


def test_sglang_takes_an_effort_from_reasoning_too() -> None:
    low = {"thinking": True, "enable_thinking": True, "reasoning_effort": "low"}
    assert rendered(SGLANG, reasoning={"effort": "low"}).template_kwargs == low
    assert rendered(SGLANG, reasoning={"reasoning_effort": "low"}, reasoning_effort="high").template_kwargs == low
    thinking = {"thinking": True, "enable_thinking": True}
    assert rendered(SGLANG, reasoning={"enabled": "Yes"}).template_kwargs == thinking
    assert rendered(SGLANG, reasoning={"enable": True}).template_kwargs == thinking
    assert rendered(SGLANG, reasoning={"enabled": False}).template_kwargs is None
    in_options = rendered(SGLANG, chat_template_kwargs={"reasoning_effort": "none"})
    assert in_options.template_kwargs == {"reasoning_effort": "none"}, "there it is a variable alone"


def test_tools_are_those_that_the_engine_renders() -> None:
    named = {"type": "function", "function": {"name": "b"}}
    assert rendered(SGLANG, tools=TOOLS).tools == TOOLS
    assert rendered(SGLANG, tools=TOOLS, tool_choice="required").tools == TOOLS
    assert rendered(SGLANG, tools=TOOLS, tool_choice="none").tools is None
    assert rendered(SGLANG, tools=TOOLS, tool_choice=named).tools == TOOLS[1:]
    assert rendered(VLLM, tools=TOOLS, tool_choice="none").tools == TOOLS
    assert rendered(VLLM, tools=TOOLS, tool_choice=named).tools == TOOLS
    dropping = Renderers(drops_tools=True)
    assert rendered(dropping, tools=TOOLS, tool_choice="none").tools is None
    assert not rendered(Renderers(drops_tools=None), tools=TOOLS, tool_choice="none").is_exact
    assert rendered(Renderers(drops_tools=None), tools=TOOLS).is_exact


def test_documents_are_vllms_alone() -> None:
    documents = [{"text": "d"}]
    assert rendered(VLLM, documents=documents).template_kwargs == {"documents": documents}
    assert rendered(SGLANG, documents=documents).template_kwargs is None
    assert rendered(SGLANG, documents=documents).is_exact


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS},
        {"reasoning_effort": "low"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"messages": [{**USER, "name": "bob"}]},
        {"messages": [USER, {"role": "tool", "tool_call_id": "1", "content": "x"}]},
    ],
)
def test_only_an_attested_form_is_taken_for_more_than_roles_and_texts(fields: dict[str, Any]) -> None:
    assert rendered(SGLANG, **fields).is_exact
    assert not rendered(SGLANG, **fields).is_plain
    assert not rendered(UNATTESTED, **fields).is_exact
    assert not rendered(MIXED, **fields).is_exact


@pytest.mark.parametrize("odd", ["int", "STRING", ["string", "float"]])
def test_types_that_sglang_renames_make_the_prompt_unknown(odd: Any) -> None:
    def tool(kind: Any) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"n": {"type": kind}}}
        return {"type": "function", "function": {"name": "f", "parameters": parameters}}

    assert rendered(SGLANG, tools=[tool("integer"), tool(["string", "null"])]).is_exact
    assert not rendered(SGLANG, tools=[tool(odd)]).is_exact
    assert rendered(VLLM, tools=[tool(odd)]).is_exact


def test_a_null_effort_in_the_options_is_none_to_sglang() -> None:
    found = rendered(SGLANG, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": None})
    assert found.template_kwargs == {"thinking": True, "enable_thinking": True, "reasoning_effort": "low"}


def test_the_tables_do_not_overlap() -> None:
    assert all(INERT.isdisjoint(names) for names in RENDERED.values())
    for names in RENDERED.values():
        assert names - {"chat_template", "tools", "tool_choice"} <= set(ChatRequest.__struct_fields__)


def test_a_request_without_a_body_is_judged_by_what_is_read() -> None:
    request = ChatRequest(messages=[USER], reasoning_effort="low")
    assert rendered_fields(request, None, VLLM).is_exact
