"""Tokenizes requests: the token ids that an engine would compute, and their chained hashes of tree blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from plait.backends.errors import UnsupportedError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.backends.tokenization.tokenizer import Tokenizer, load_tokenizer
from plait.gateway.config import Config
from plait.policy.prefix.block_hash import chain, root_hash


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A request's prompts as token ids. `tokens` is their total, `block_hashes` are those of the first prompt.

    `exact` is True if the engine's tokenizer gives the same ids.
    """

    tokens: int
    block_hashes: array[int]
    exact: bool
    prompts: Sequence[Sequence[int]]


class PromptReader:
    """Tokenizes prompts for every model of a configuration; safe to call from several threads."""

    def __init__(self, config: Config, block_tokens: int) -> None:
        self._config = config
        self._block_tokens = block_tokens
        self._tokenizers = {
            model.name: load_tokenizer(model.tokenizer, chat_template=model.chat_template) for model in config.models
        }

    def read(self, request: ChatRequest | CompletionRequest, cache_salt: str | None) -> TokenizedPrompt:
        """Tokenize a request's prompts. Raises `CallerError` for messages that the chat template refuses.

        A prompt with content that is not text is not tokenized. It is served, but no cached prefix is matched.
        """
        tokenizer = self._tokenizer(request.model)
        try:
            prompts = _prompts(request, tokenizer)
        except UnsupportedError:
            return TokenizedPrompt(0, array("Q"), exact=False, prompts=())
        hashes = chain(prompts[0], self._block_tokens, root_hash(request.model, cache_salt or ""))
        return TokenizedPrompt(sum(map(len, prompts)), hashes, tokenizer.exact, prompts)

    def _tokenizer(self, model: str) -> Tokenizer:
        tokenizer = self._tokenizers.get(model)
        if tokenizer is None:
            settings = self._config.model(model)
            tokenizer = load_tokenizer(settings.tokenizer, chat_template=settings.chat_template)
            self._tokenizers[model] = tokenizer
        return tokenizer


def _prompts(request: ChatRequest | CompletionRequest, tokenizer: Tokenizer) -> list[list[int]]:
    if isinstance(request, ChatRequest):
        return [
            tokenizer.encode_chat(
                request.messages,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                template_kwargs=request.chat_template_kwargs,
                chat_template=request.chat_template,
            )
        ]
    return [
        prompt if isinstance(prompt, list) else tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)
        for prompt in request.prompts()
    ]
