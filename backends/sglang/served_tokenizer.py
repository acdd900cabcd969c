"""SGLang's tokenizer and chat template, as its API server uses them for prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.backends.adapter.engine_tokenizer import EngineTokenizer
from plait.backends.adapter.required_names import load
from plait.backends.protocol.tokenizer_probe import Messages


def served_tokenizer(tokenizer_manager: Any, template_manager: Any) -> EngineTokenizer | None:
    """The tokenizer of an API server that starts; None with `--skip-tokenizer-init`.

    Raises AttributeError if this SGLang keeps it elsewhere.
    """
    tokenizer, conversation = tokenizer_manager.tokenizer, template_manager.chat_template_name
    if tokenizer is None:
        return None
    serving = load("sglang.srt.runtime_context.get_serving")()
    defaults = dict(serving.default_chat_template_kwargs or {})

    def render(messages: Messages, tools: Messages | None, variables: Mapping[str, Any]) -> object:
        if conversation is not None:
            return f"SGLang's own conversation template {conversation}"  # which no gateway renders
        options = {**defaults, **variables, "tokenize": False, "add_generation_prompt": True, "return_dict": False}
        return tokenizer.apply_chat_template(messages, tools=tools, **options)

    return EngineTokenizer(str(serving.tokenizer_path), tokenizer, render, template_kwargs=defaults)
