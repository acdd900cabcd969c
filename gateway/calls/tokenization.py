"""Tokenizes requests: the token ids that an engine would compute, and their chained hashes of tree blocks.

Each model has a tokenizer: the configured one, or the one that was found when its engines answered.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from plait.backends.errors import CallerError, ContextLengthError, UnsupportedError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint
from plait.backends.tokenization.chat_template import read_template
from plait.backends.tokenization.file_tokenizer import HuggingFaceTokenizer
from plait.backends.tokenization.loading import AUTO, load_tokenizer
from plait.backends.tokenization.offered_tokenizer import BoundedTemplates, cache_folder
from plait.backends.tokenization.prompt_encoder import PartCache, PromptEncoder, WordMemo
from plait.backends.tokenization.template_process import Job
from plait.backends.tokenization.template_worker import TemplateWorker
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.config.sections import Config, ModelConfig
from plait.policy.prefix.block_hash import extend_chain, root_hash

CHARACTERS_PER_TOKEN: Final = 4
"""English text in most vocabularies."""

OFF_LOOP_BYTES: Final = 16 * 1024
"""More is tokenized in threads: some 4,000 tokens would block the event loop for 2 ms or more."""

MOSTLY_KNOWN_BYTES, MOSTLY_KNOWN_MESSAGES = 128 * 1024, 64
"""Of a body whose prompt is rendered and looked up at once, in some 0.2 ms, in case little of it is new."""

ESTIMATED = "estimated"
"""The tokenizer of a model of which none has been found."""

WORDS_PART = 8
"""One in so many bytes of `server.token_cache_bytes` keeps words, which is 8 MiB by default: some 40,000 words."""

ESTIMATED_FINGERPRINT = TokenizerFingerprint("none found: estimated", *[ESTIMATED] * 4)


class ModelTokenizers:
    """The tokenizers of a configuration's models; safe to call from several threads.

    `base` is the base model of a LoRA adapter, which has its tokenizer. `encoders` has those of the base models that
    were asked for (`encoder`), `specifications` what each one's tokenizer can be loaded by again. Raises ValueError for
    a configured one that cannot be loaded.
    """

    def __init__(self, config: Config, block_tokens: int, base: Callable[[str], str]) -> None:
        self._config = config
        self._base = base
        self._block_tokens = block_tokens
        words_bytes = config.server.token_cache_bytes // WORDS_PART
        self._parts = PartCache(config.server.token_cache_bytes - words_bytes)
        self._words = WordMemo(words_bytes) if words_bytes else None
        self.encoders: dict[str, PromptEncoder] = {}
        self._fingerprints: dict[str, TokenizerFingerprint] = {}
        self._workers: dict[str, TemplateWorker] = {}
        self._lock = threading.Lock()
        self.specifications: dict[str, str] = {}
        for model in config.models:
            if model.tokenizer != AUTO:
                self._put(model.name, model.tokenizer, self._load(model))

    def open(self) -> None:
        """Start the processes that render requests' templates, so that the first request does not wait."""
        if self._config.server.trust_request_chat_template:
            for model in self.specifications:
                self.worker(model).start()

    def close(self) -> None:
        """End the processes that render templates."""
        for worker in self._workers.values():
            worker.close()
        for encoder in self.encoders.values():
            if isinstance(encoder.tokenizer, HuggingFaceTokenizer):
                encoder.tokenizer.close()

    def encoder(self, model: str) -> PromptEncoder:
        """Encodes the prompts of a model. One of which no tokenizer has been found has an estimate."""
        encoder = self.encoders.get(model)
        if encoder is None:
            base = self._base(model)
            if base not in self.encoders:
                self._put(base, ESTIMATED, load_tokenizer(ESTIMATED, chat_template=self._template(base)))
            encoder = self.encoders[base]
        return encoder

    def worker(self, model: str) -> TemplateWorker:
        """Renders the templates of requests."""
        base = self._base(model)
        self.encoder(base)
        with self._lock:
            if base not in self._workers:
                self._workers[base] = TemplateWorker(self.specifications[base], self._template(base))
            return self._workers[base]

    def fingerprint(self, model: str) -> TokenizerFingerprint | None:
        """The fingerprint of a model's tokenizer. None for one that is no engine's: engines get texts in any case.

        A model of which none was found has one that agrees with no engine: so its reports are not taken for exact.
        """
        return self._fingerprints.get(model) or (ESTIMATED_FINGERPRINT if self.lacks(model) else None)

    def lacks(self, model: str) -> bool:
        """Whether the tokenizer of a base model is to be found, and has not been."""
        return self._config.model(model).tokenizer == AUTO and self.specifications.get(model, ESTIMATED) == ESTIMATED

    def exact(self, model: str) -> Tokenizer | None:
        """A base model's tokenizer, if its ids are to be the engines'."""
        tokenizer = self.encoder(model).tokenizer
        return tokenizer if tokenizer.exact else None

    def chat_template(self, model: str) -> str | None:
        """The text of the configured template; None: the tokenizer's own."""
        path = self._template(model)
        return None if path is None else read_template(Path(path).expanduser())

    def learn(self, model: str, specification: str, tokenizer: Tokenizer, found: TokenizerFingerprint | None) -> None:
        """The tokenizer of a base model has been found; `found` is its fingerprint."""
        self._put(model, specification, tokenizer, found)
        with self._lock:
            worker = self._workers.pop(model, None)
        if worker is not None:
            worker.close()
        if self._config.server.trust_request_chat_template:
            self.worker(model).start()

    def _load(self, model: ModelConfig) -> Tokenizer:
        """A configured tokenizer. One that an engine has offered, and `--save` has named, is not trusted more."""
        folder, trusts = Path(model.tokenizer), self._config.server.trust_engine_templates
        if folder.parent == cache_folder() and model.chat_template is None and not trusts:
            return BoundedTemplates(model.tokenizer, folder)
        return load_tokenizer(model.tokenizer, chat_template=model.chat_template)

    def _template(self, model: str) -> str | None:
        return self._config.model(model).chat_template

    def _put(
        self, model: str, specification: str, tokenizer: Tokenizer, found: TokenizerFingerprint | None = None
    ) -> None:
        if tokenizer.exact:
            self._fingerprints[model] = found or tokenizer.fingerprint
        self.specifications[model] = specification
        if self._words is not None:
            self._words.prepare(tokenizer)
        self.encoders[model] = PromptEncoder(tokenizer, self._block_tokens, self._parts, words=self._words)


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """A request's prompts as token ids. `tokens` is their total, `block_hashes` are those of the first prompt.

    `exact` is True if the engine's tokenizer gives the same ids. `root` is the hash before the first block, and
    `whole_hash` stands for all tokens of the first prompt. One of `turn_ends` ends each answer in a chat; None: an
    answer may end anywhere.
    """

    tokens: int
    block_hashes: array[int]
    exact: bool
    prompts: Sequence[Sequence[int]]
    root: int = 0
    whole_hash: int = 0
    turn_ends: frozenset[int] | None = None


Tokenizing = Generator[int, None, TokenizedPrompt]
"""A prompt that is tokenized in turns. Before each it yields how many characters of a prompt are not encoded yet."""


class PromptReader:
    """Tokenizes prompts with the tokenizers of their models; safe to call from several threads.

    If the configuration trusts them, the chat templates of requests are rendered in processes, one for each model.
    `base` is the base model of a LoRA adapter, which has its tokenizer.
    """

    def __init__(self, config: Config, block_tokens: int, base: Callable[[str], str] = str) -> None:
        self.tokenizers = ModelTokenizers(config, block_tokens, base)
        self._takes_templates = config.server.trust_request_chat_template

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

    def begin(
        self,
        request: ChatRequest | CompletionRequest,
        cache_salt: str | None,
        context_tokens: int | None,
        size_bytes: int,
    ) -> TokenizedPrompt | Tokenizing | None:
        """The prompt of a body of that size, if it is short or mostly known; else the `steps` that are left of it.

        None if the first of them waits for another process, which renders the chat template. Raises as `steps` does.
        """
        encoder = self.tokenizers.encoders.get(request.model) or self.tokenizers.encoder(request.model)
        tokenizer, salt = encoder.tokenizer, cache_salt or ""
        if isinstance(request, CompletionRequest):
            adds, turn_ends = request.add_special_tokens, None
        elif request.chat_template is None and not isinstance(tokenizer, BoundedTemplates):
            adds, turn_ends = False, tokenizer.special_ids
        else:
            self.check(request)
            return None
        if size_bytes > OFF_LOOP_BYTES and not _may_be_known(request, size_bytes):
            return self.steps(request, cache_salt, context_tokens)
        given = self._given(request, tokenizer, salt)
        text = given[0] if len(given) == 1 else None
        if not isinstance(text, str) or len(text) >= encoder.part_characters:
            return _begun(self._turns(request, given, encoder, salt, context_tokens))
        if context_tokens is not None and 4 * len(text) > context_tokens:  # a token has a byte or more
            self._check_fits(request, text, tokenizer, context_tokens)
        ids = encoder.encode(text, salt, add_special_tokens=adds)
        hashes, root = array("Q"), root_hash(request.model, salt)
        whole = extend_chain(hashes, ids, encoder.block_tokens, root)
        return TokenizedPrompt(len(ids), hashes, tokenizer.exact, (ids,), root, whole, turn_ends)

    def steps(
        self, request: ChatRequest | CompletionRequest, cache_salt: str | None, context_tokens: int | None = None
    ) -> Tokenizing:
        """Tokenize a request's prompts in turns. `context_tokens` is the model's context, None if it is not known.

        A single short prompt has no turn of its own. Raises `CallerError` for messages that the chat template refuses,
        and before it tokenizes a prompt whose bytes cannot fit. A prompt with content that is not text is served, but
        has no tokens here.
        """
        encoder, salt = self.tokenizers.encoder(request.model), cache_salt or ""
        given = self._given(request, encoder.tokenizer, salt)
        return (yield from self._turns(request, given, encoder, salt, context_tokens))

    def _turns(
        self,
        request: ChatRequest | CompletionRequest,
        given: Sequence[str | list[int]],
        encoder: PromptEncoder,
        salt: str,
        context_tokens: int | None,
    ) -> Tokenizing:
        root, prompts, hashes = root_hash(request.model, salt), list[Sequence[int]](), array("Q")
        adds = isinstance(request, CompletionRequest) and request.add_special_tokens
        for prompt in given:
            if isinstance(prompt, list):
                prompts.append(prompt)
                continue
            self._check_fits(request, prompt, encoder.tokenizer, context_tokens)
            if len(prompt) < encoder.part_characters:
                if len(given) > 1:
                    yield len(prompt)
                prompts.append(encoder.encode(prompt, salt, add_special_tokens=adds))
                continue
            scope = request.model, salt
            encoded = yield from encoder.steps(prompt, scope, root, add_special_tokens=adds, salt=salt)
            hashes = hashes if prompts else encoded.hashes
            prompts.append(encoded.ids)
        if not prompts:
            return TokenizedPrompt(0, array("Q"), exact=False, prompts=())
        if isinstance(given[0], list):  # a million ids may have come, of which nothing is hashed yet
            yield 0
        whole, tokenizer = extend_chain(hashes, prompts[0], encoder.block_tokens, root), encoder.tokenizer
        turn_ends = tokenizer.special_ids if isinstance(request, ChatRequest) else None
        return TokenizedPrompt(sum(map(len, prompts)), hashes, tokenizer.exact, prompts, root, whole, turn_ends)

    def _check_fits(
        self,
        request: ChatRequest | CompletionRequest,
        text: str,
        tokenizer: Tokenizer,
        context_tokens: int | None,
    ) -> None:
        """Raises as `check_size` for a text whose bytes cannot fit. They are counted if they may not."""
        longest = tokenizer.longest_token_bytes
        if context_tokens is not None and longest is not None and len(text) * 4 > context_tokens * longest:
            size = len(text.encode(errors="replace"))
            self.check_size(request.model, size, context_tokens, request.prompt_field)

    def _given(
        self, request: ChatRequest | CompletionRequest, tokenizer: Tokenizer, salt: str
    ) -> Sequence[str | list[int]]:
        """The prompts as texts or, as a client may send them, as token ids. None for what is no text."""
        if isinstance(request, CompletionRequest):
            return () if request.prompt is None else request.prompts()  # the prompt may be embeddings
        try:
            if request.chat_template is not None:
                self.check(request)
                return (self.tokenizers.worker(request.model).render(_job(request)),)
            text = tokenizer.render_chat(
                request.messages,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                template_kwargs=request.chat_template_kwargs,
                salt=salt,
            )
        except UnsupportedError:
            return ()
        return (text,)


def _may_be_known(request: ChatRequest | CompletionRequest, size_bytes: int) -> bool:
    """Whether a long body is worth a look before it takes turns: rendering many messages alone takes long."""
    is_short_chat = not isinstance(request, ChatRequest) or len(request.messages) <= MOSTLY_KNOWN_MESSAGES
    return is_short_chat and size_bytes <= MOSTLY_KNOWN_BYTES


def _begun(steps: Tokenizing) -> TokenizedPrompt | Tokenizing:
    """The prompt, if little of it is new; else the steps that are left."""
    left, new = OFF_LOOP_BYTES, 0
    try:
        while new <= left:
            left -= new
            new = next(steps)
    except StopIteration as end:
        prompt: TokenizedPrompt = end.value
        return prompt
    return steps


def _job(request: ChatRequest) -> Job:
    return Job(
        request.messages,
        request.chat_template,
        request.tools,
        request.add_generation_prompt,
        request.continue_final_message,
        request.chat_template_kwargs,
    )
