"""The tokenizer and chat rendering of SGLang's API server, for the fingerprint that gateways compare with their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from plait.backends.adapter.engine_tokenizer import EngineTokenizer
from plait.backends.adapter.required_names import load
from plait.backends.protocol.tokenizer_fingerprint import Messages
from plait.backends.sglang.compatibility import chat_encoding, started_with

_CHATS: Final = "sglang.srt.entrypoints.openai"
_OWN_TOOLS: Final = frozenset({"muse"})
"""Parsers of models for which SGLang changes tools before the template gets them."""


def served_tokenizer(tokenizer_manager: Any, template_manager: Any) -> EngineTokenizer | None:
    """The tokenizer of an API server that starts; None with `--skip-tokenizer-init`.

    Raises AttributeError if this SGLang keeps it elsewhere.
    """
    tokenizer = tokenizer_manager.tokenizer
    if tokenizer is None:
        return None
    serving = started_with("serving", tokenizer_manager.server_args)
    defaults = dict(getattr(serving, "default_chat_template_kwargs", None) or {})
    own = _own_renderer(tokenizer_manager, template_manager)

    def render(messages: Messages, tools: Messages | None, variables: Mapping[str, Any]) -> object:
        if own is not None:
            return f"SGLang's own {own}"  # which no gateway renders
        options = {**defaults, **variables, "tokenize": False, "add_generation_prompt": True, "return_dict": False}
        return tokenizer.apply_chat_template(messages, tools=tools, **options)

    def prepare(messages: Messages, tools: Messages | None) -> tuple[Messages, Messages | None]:
        return _prepared(messages, tools, template_manager.jinja_template_content_format)

    # A default effort overrides a call's effort, unlike any other default. Gateways do not know that rule.
    is_usual = own is None and "reasoning_effort" not in defaults and _is_usual(tokenizer_manager, template_manager)
    return EngineTokenizer(
        str(serving.tokenizer_path),
        tokenizer,
        render,
        template_kwargs=defaults,
        prepare=prepare if is_usual else None,
    )


def _own_renderer(tokenizer_manager: Any, template_manager: Any) -> str | None:
    """What SGLang renders chats with instead of the tokenizer's template; None: with that template."""
    if template_manager.chat_template_name is not None:
        return f"conversation template {template_manager.chat_template_name}"
    if getattr(template_manager, "python_chat_template", None) is not None:
        return "template in Python"
    if _parser(tokenizer_manager, "reasoning_parser") == "hunyuan":
        return "effort of Hunyuan"  # which it gives to chats without one
    encoding = chat_encoding(tokenizer_manager, _parser(tokenizer_manager, "tool_call_parser"))
    return f"encoding {encoding}" if encoding else None


def _is_usual(tokenizer_manager: Any, template_manager: Any) -> bool:
    """Whether SGLang prepares chats as `_prepared` does, without special treatment of this model."""
    if load(f"{_CHATS}.serving_chat.normalize_assistant_tool_call_arguments") is None:
        return False
    reasoning = getattr(template_manager, "reasoning_config", None)
    return (
        not getattr(template_manager, "jinja_template_may_reorder_tool_results", False)
        and getattr(reasoning, "effort_kwarg", None) is None
        and getattr(tokenizer_manager.model_config.hf_config, "model_type", None) != "minimax_m3_vl"
        and _parser(tokenizer_manager, "tool_call_parser") not in _OWN_TOOLS
    )


def _parser(tokenizer_manager: Any, option: str) -> str | None:
    """The parser that an option names; where SGLang can choose one for the model, the chosen parser."""
    find = getattr(tokenizer_manager, "config_value", None)
    name: str | None = getattr(tokenizer_manager.server_args, option, None) if find is None else find(option)
    return name


def _prepared(messages: Messages, tools: Messages | None, content_format: str) -> tuple[Messages, Messages | None]:
    """Messages and tools as SGLang's own code gives them to the template. Raises what that code raises."""
    request = load(f"{_CHATS}.protocol.ChatCompletionRequest")(model="", messages=messages, tools=tools)
    normalize_calls = load(f"{_CHATS}.serving_chat.normalize_assistant_tool_call_arguments")
    normalize_result = load(f"{_CHATS}.serving_chat.normalize_tool_content")
    process = load("sglang.srt.parser.jinja_template_utils.process_content_for_template_format")
    prepared = []
    for message in request.messages:
        fields = message.model_dump()
        normalize_calls(fields)
        if fields.get("content") is None:
            fields["content"] = ""
        ready = process(fields, content_format, [], [], [], [])
        ready["content"] = normalize_result(ready["role"], ready.get("content"))
        prepared.append(ready)
    return prepared, [tool.model_dump() for tool in request.tools] if request.tools else None
