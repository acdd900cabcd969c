"""Tokenizes requests: the token ids that an engine would compute, and their chained hashes of tree blocks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Sequence
from math import inf
from typing import Final

import msgspec

from plait.backends.errors import CallerError, ContextLengthError, UnsupportedError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.backends.tokenization.offered_tokenizer import BoundedTemplates
from plait.backends.tokenization.template_process import Job
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.calls.model_tokenizers import ModelTokenizers
from plait.gateway.config.sections import Config
from plait.policy.prefix.block_hash import extend_chain, root_hash

CHARACTERS_PER_TOKEN: Final = 4
"""English text in most vocabularies."""


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """A request's prompts as token ids. `tokens` is their total, `block_hashes` are those of the first prompt.

    `exact` is True if the engine's tokenizer gives the same ids. `root` is the hash before the first block. One of
    `turn_ends` ends each answer in a chat; None: an answer may end anywhere.
    """

    tokens: int
    block_hashes: array[int]
    exact: bool
    prompts: Sequence[Sequence[int]]
    root: int = 0
    turn_ends: frozenset[int] | None = None


class PromptReader:
    """Tokenizes prompts with the tokenizers of their models; safe to call from several threads.

    If the configuration trusts them, the chat templates of requests are rendered in processes, one for each model.
    `base` is the base model of a LoRA adapter, which has its tokenizer.
    """

    def __init__(self, config: Config, block_tokens: int, base: Callable[[str], str] = str) -> None:
        self.tokenizers = ModelTokenizers(config, block_tokens, base)
        self._takes_templates = config.server.trust_request_chat_template
        self._block_tokens = block_tokens

    def waits(self, request: ChatRequest | CompletionRequest) -> bool:
        """Whether reading a request waits for another process, which renders its chat template."""
        if not isinstance(request, ChatRequest):
            return False
        tokenizer = self.tokenizers.encoder(request.model).tokenizer
        return request.chat_template is not None or isinstance(tokenizer, BoundedTemplates)

    def check(self, request: ChatRequest | CompletionRequest) -> None:
        """Raises `CallerError` for a chat template of the request's own, unless they are trusted."""
        if not self._takes_templates and isinstance(request, ChatRequest) and request.chat_template is not None:
            raise CallerError(
                "'chat_template' is not taken from requests here. Leave it out: the model has its own, and "
                "'chat_template_kwargs' sets its options. An operator can allow it with "
                "'trust_request_chat_template = true' under [server].",
                param="chat_template",
            )

    def check_size(self, model: str, size_bytes: int, context_tokens: int | None, field: str) -> None:
        """Raises `ContextLengthError` if the text of a prompt cannot fit by its bytes. `field` is the prompt's."""
        tokenizer = self.tokenizers.encoder(model).tokenizer
        longest = tokenizer.longest_token_bytes
        if context_tokens is None or longest is None or not tokenizer.exact:
            return
        if size_bytes > context_tokens * longest:
            raise ContextLengthError(
                f"The prompt has {size_bytes} bytes. The model '{model}' has a context of {context_tokens} tokens, and "
                f"a token has at most {longest} bytes, so {context_tokens * longest} bytes fit at most. Shorten it.",
                param=field,
            )

    def read(
        self, request: ChatRequest | CompletionRequest, cache_salt: str | None, context_tokens: int | None = None
    ) -> TokenizedPrompt:
        """All of `steps` at once."""
        steps = self.steps(request, cache_salt, context_tokens)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                prompt: TokenizedPrompt = end.value
                return prompt

    def steps(
        self, request: ChatRequest | CompletionRequest, cache_salt: str | None, context_tokens: int | None = None
    ) -> Generator[int, None, TokenizedPrompt]:
        """Tokenize a request's prompts in turns. `context_tokens` is the model's context, None if it is not known.

        Before each turn it yields how many characters of a prompt are not encoded yet.
        Raises `CallerError` for messages that the chat template refuses, and before it tokenizes a prompt whose bytes
        cannot fit. A prompt with content that is not text is not tokenized. It is served, but no cached prefix is
        matched.
        """
        encoder, salt = self.tokenizers.encoder(request.model), cache_salt or ""
        tokenizer, root = encoder.tokenizer, root_hash(request.model, salt)
        adds_tokens = isinstance(request, CompletionRequest) and request.add_special_tokens
        prompts: list[Sequence[int]] = []
        hashes = array("Q")
        try:
            for prompt in self._prompts(request, tokenizer, salt):
                if isinstance(prompt, list):
                    prompts.append(prompt)
                    continue
                if len(prompt) * 4 > _surely_fitting_bytes(tokenizer, context_tokens):
                    size_bytes = len(prompt.encode(errors="replace"))
                    self.check_size(request.model, size_bytes, context_tokens, request.prompt_field)
                if len(prompt) < encoder.part_characters:
                    yield len(prompt)
                    prompts.append(encoder.encode(prompt, salt, add_special_tokens=adds_tokens))
                    continue
                encoded = yield from encoder.steps(
                    prompt, (request.model, salt), root, add_special_tokens=adds_tokens, salt=salt
                )
                hashes = hashes if prompts else encoded.hashes
                prompts.append(encoded.ids)
        except UnsupportedError:
            return TokenizedPrompt(0, array("Q"), exact=False, prompts=())
        if not prompts:
            return TokenizedPrompt(0, array("Q"), exact=False, prompts=())
        yield 0
        extend_chain(hashes, prompts[0], self._block_tokens, root)
        turn_ends = tokenizer.special_ids if isinstance(request, ChatRequest) else None
        return TokenizedPrompt(sum(map(len, prompts)), hashes, tokenizer.exact, prompts, root, turn_ends)

    def _prompts(
        self, request: ChatRequest | CompletionRequest, tokenizer: Tokenizer, salt: str
    ) -> Sequence[str | list[int]]:
        """The prompts as texts or, as a client may send them, as token ids."""
        if isinstance(request, CompletionRequest):
            return () if request.prompt is None else request.prompts()  # the prompt may be embeddings
        if request.chat_template is None:
            return (
                tokenizer.render_chat(
                    request.messages,
                    tools=request.tools,
                    add_generation_prompt=request.add_generation_prompt,
                    continue_final_message=request.continue_final_message,
                    template_kwargs=request.chat_template_kwargs,
                    salt=salt,
                ),
            )
        self.check(request)
        job = Job(
            request.messages,
            request.chat_template,
            request.tools,
            request.add_generation_prompt,
            request.continue_final_message,
            request.chat_template_kwargs,
        )
        return (self.tokenizers.worker(request.model).render(job),)


def _surely_fitting_bytes(tokenizer: Tokenizer, context_tokens: int | None) -> float:
    """A prompt of no more bytes is not refused for them (`check_size`)."""
    longest = tokenizer.longest_token_bytes
    return inf if context_tokens is None or longest is None else context_tokens * longest
