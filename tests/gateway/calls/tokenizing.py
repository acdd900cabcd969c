"""A prompt read at once, as one that is short."""

from __future__ import annotations

from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.gateway.calls.call_reader import PromptReader, TokenizedPrompt


def read(
    reader: PromptReader,
    request: ChatRequest | CompletionRequest,
    cache_salt: str | None,
    context_tokens: int | None = None,
) -> TokenizedPrompt:
    steps = reader.steps(request, cache_salt, context_tokens)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            prompt: TokenizedPrompt = end.value
            return prompt
