"""Refusals of prompts that exceed the model's context: by bytes, by exact tokens, or by estimated tokens."""

from __future__ import annotations

from plait.backends.errors import ContextLengthError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.policy.types import ESTIMATE_MARGIN


def refuse_bytes(model: str, size_bytes: int, context_tokens: int, longest_token_bytes: int, field: str) -> None:
    """Raises `ContextLengthError` for a text that exceeds the context even if each of its tokens is the longest one."""
    if size_bytes > context_tokens * longest_token_bytes:
        raise ContextLengthError(
            f"The prompt has {size_bytes} bytes. The model '{model}' has a context of {context_tokens} tokens, and "
            f"a token has at most {longest_token_bytes} bytes, so {context_tokens * longest_token_bytes} bytes fit at "
            "most. Shorten it.",
            param=field,
            prompt_tokens=-(-size_bytes // longest_token_bytes),
            context_tokens=context_tokens,
        )


def refuse_tokens(
    request: ChatRequest | CompletionRequest, prompt_tokens: int, output_tokens: int, context_tokens: int
) -> None:
    """Raises `ContextLengthError` if the request has a single prompt.

    With several prompts, `prompt_tokens` is their sum, and each prompt may fit.
    """
    if request.single_prompt:
        raise ContextLengthError(
            f"The model '{request.model}' has a context of {context_tokens} tokens; the request needs "
            f"{prompt_tokens + output_tokens}: {prompt_tokens} of prompt and {output_tokens} of output. Shorten one "
            "of them.",
            param=request.prompt_field,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            context_tokens=context_tokens,
        )


def refuse_estimate(request: ChatRequest | CompletionRequest, prompt_tokens: int, context_tokens: int) -> None:
    """Raises `ContextLengthError` if a single prompt is far too long for an engine that would truncate it silently."""
    if request.single_prompt and prompt_tokens > ESTIMATE_MARGIN * context_tokens:
        raise ContextLengthError(
            f"The prompt has about {prompt_tokens} tokens. An engine of the model '{request.model}' has a context of "
            f"{context_tokens} and would cut the prompt without a word. Shorten it, or have the engine load the model "
            "with a longer context.",
            param=request.prompt_field,
            prompt_tokens=prompt_tokens,
            context_tokens=context_tokens,
        )
