"""vLLM's tokenizer and chat template, as its API server uses them for prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.backends.adapter.engine_tokenizer import EngineTokenizer
from plait.backends.adapter.required_names import UnsupportedEngineError, load
from plait.backends.protocol.tokenizer_probe import Messages


def served_tokenizer(state: Any) -> EngineTokenizer | None:
    """The tokenizer by the state of vLLM's application; None with `--skip-tokenizer-init`.

    Raises UnsupportedEngineError or AttributeError if this vLLM keeps them elsewhere.
    """
    config = state.engine_client.vllm_config.model_config
    tokenizer, chats = state.engine_client.renderer.tokenizer, state.online_renderer
    resolve = load("vllm.renderers.hf.resolve_chat_template")
    if resolve is None:
        raise UnsupportedEngineError("this vLLM lacks vllm.renderers.hf.resolve_chat_template")
    if tokenizer is None:
        return None
    given, defaults = chats.chat_template, dict(chats.default_chat_template_kwargs or {})

    def render(messages: Messages, tools: Messages | None, variables: Mapping[str, Any]) -> object:
        template = resolve(tokenizer, chat_template=given, tools=tools, model_config=config)
        if template is None:
            return None
        options = {**defaults, **variables, "tokenize": False, "add_generation_prompt": True}
        return tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, **options)

    own = given if isinstance(given, str) else None
    return EngineTokenizer(str(config.tokenizer), tokenizer, render, own, defaults)
