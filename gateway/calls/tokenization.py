"""Tokenizes requests: the token ids that an engine would compute, and their chained hashes of tree blocks."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence

import msgspec

from plait.backends.errors import CallerError, ContextLengthError, UnsupportedError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint, fingerprint
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.part_cache import PartCache
from plait.backends.tokenization.prompt_encoder import PromptEncoder
from plait.backends.tokenization.template_process import Job
from plait.backends.tokenization.template_worker import TemplateWorker
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.calls.turns import Steps
from plait.gateway.config import Config, ModelConfig
from plait.policy.prefix.block_hash import extend_chain, root_hash


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
    """Tokenizes prompts for every model of a configuration; safe to call from several threads.

    If the configuration trusts them, the chat templates of requests are rendered in processes, one for each model.
    `base` is the base model of a LoRA adapter, which has its tokenizer.
    """

    def __init__(self, config: Config, block_tokens: int, base: Callable[[str], str] = str) -> None:
        self._config = config
        self._base = base
        self._block_tokens = block_tokens
        self._parts = PartCache(config.server.token_cache_bytes)
        self._encoders = {model.name: self._load(model) for model in config.models}
        tokenizers = {name: encoder.tokenizer for name, encoder in self._encoders.items()}
        self._fingerprints = {name: fingerprint(one) for name, one in tokenizers.items() if one.exact}
        self._workers: dict[str, TemplateWorker] = {}
        self._lock = threading.Lock()

    def open(self) -> None:
        """Start the processes of the configured models, so that the first request does not wait."""
        if self._config.server.trust_request_chat_template:
            for model in self._config.models:
                self._worker(model.name).start()

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers.values():
            worker.close()

    def fingerprint(self, model: str) -> TokenizerFingerprint | None:
        """The fingerprint of a configured model's tokenizer. None for `bytes`: its engines get texts in any case."""
        return self._fingerprints.get(model)

    def check(self, request: ChatRequest | CompletionRequest) -> None:
        """Raises `CallerError` for a chat template of the request's own, unless they are trusted."""
        if _own_template(request) is not None and not self._config.server.trust_request_chat_template:
            raise CallerError(
                "'chat_template' is not taken from requests here. Leave it out: the model has its own, and "
                "'chat_template_kwargs' sets its options. An operator can allow it with "
                "'trust_request_chat_template = true' under [server].",
                param="chat_template",
            )

    def check_size(self, model: str, size_bytes: int, context_tokens: int | None, field: str) -> None:
        """Raises `ContextLengthError` if the text of a prompt cannot fit by its bytes. `field` is the prompt's."""
        tokenizer = self._encoder(model).tokenizer
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
    ) -> Steps[TokenizedPrompt]:
        """Tokenize a request's prompts in turns. `context_tokens` is the model's context, None if it is not known.

        Raises `CallerError` for messages that the chat template refuses, and before it tokenizes a prompt whose bytes
        cannot fit. A prompt with content that is not text is not tokenized. It is served, but no cached prefix is
        matched.
        """
        encoder = self._encoder(request.model)
        tokenizer = encoder.tokenizer
        scope = (request.model, cache_salt or "")
        root = root_hash(*scope)
        prompts: list[Sequence[int]] = []
        hashes = array("Q")
        try:
            for prompt in self._prompts(request, tokenizer):
                if isinstance(prompt, list):
                    prompts.append(prompt)
                    continue
                text, adds_tokens = prompt, isinstance(request, CompletionRequest) and request.add_special_tokens
                if context_tokens is not None and len(text) * 4 > context_tokens:  # else it fits, whatever it is
                    size_bytes = len(text.encode(errors="replace"))
                    self.check_size(request.model, size_bytes, context_tokens, request.prompt_field)
                encoded = yield from encoder.steps(text, scope, root, add_special_tokens=adds_tokens)
                hashes = hashes if prompts else encoded.hashes
                prompts.append(encoded.ids)
        except UnsupportedError:
            return TokenizedPrompt(0, array("Q"), exact=False, prompts=())
        if not prompts:
            return TokenizedPrompt(0, array("Q"), exact=False, prompts=())
        yield
        extend_chain(hashes, prompts[0], self._block_tokens, root)
        turn_ends = tokenizer.special_ids if isinstance(request, ChatRequest) else None
        return TokenizedPrompt(sum(map(len, prompts)), hashes, tokenizer.exact, prompts, root, turn_ends)

    def _prompts(self, request: ChatRequest | CompletionRequest, tokenizer: Tokenizer) -> Iterator[str | list[int]]:
        """The prompts as texts or, as a client may send them, as token ids."""
        if isinstance(request, CompletionRequest):
            yield from () if request.prompt is None else request.prompts()  # the prompt may be embeddings
        elif request.chat_template is not None:
            self.check(request)
            yield self._worker(request.model).render(
                Job(
                    request.messages,
                    request.chat_template,
                    request.tools,
                    request.add_generation_prompt,
                    request.continue_final_message,
                    request.chat_template_kwargs,
                )
            )
        else:
            yield tokenizer.render_chat(
                request.messages,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                template_kwargs=request.chat_template_kwargs,
            )

    def _worker(self, model: str) -> TemplateWorker:
        settings = self._config.model(self._base(model))
        with self._lock:
            if model not in self._workers:
                self._workers[model] = TemplateWorker(settings.tokenizer, settings.chat_template)
            return self._workers[model]

    def _encoder(self, model: str) -> PromptEncoder:
        encoder = self._encoders.get(model)
        if encoder is None:
            encoder = self._encoders[model] = self._load(self._config.model(self._base(model)))
        return encoder

    def _load(self, model: ModelConfig) -> PromptEncoder:
        tokenizer = load_tokenizer(model.tokenizer, chat_template=model.chat_template)
        return PromptEncoder(tokenizer, self._block_tokens, self._parts)


def _own_template(request: ChatRequest | CompletionRequest) -> str | None:
    return request.chat_template if isinstance(request, ChatRequest) else None
