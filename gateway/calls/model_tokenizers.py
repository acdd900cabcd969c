"""Each model's tokenizer: the configured one, or the one found through its engines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint
from plait.backends.tokenization.cache_folder import cache_folder
from plait.backends.tokenization.chat_template import read_template
from plait.backends.tokenization.file_tokenizer import HuggingFaceTokenizer
from plait.backends.tokenization.loading import AUTO, is_to_be_downloaded, load_tokenizer
from plait.backends.tokenization.offered_tokenizer import KEPT, BoundedTemplates
from plait.backends.tokenization.prompt_encoder import PartCache, PromptEncoder
from plait.backends.tokenization.template_worker import TemplateWorker
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.config.sections import Config, ModelConfig
from plait.gateway.membership.hub_downloads import AwaitedTokenizer

ESTIMATED = "estimated"
"""The specification of a model's tokenizer until one is found: token counts are estimated."""

ESTIMATED_FINGERPRINT = TokenizerFingerprint("none found: estimated", ESTIMATED, ESTIMATED, ESTIMATED, ESTIMATED)


class ModelTokenizers:
    """The tokenizers of all models; thread-safe. `base` maps a LoRA adapter to its base model, whose tokenizer it has.

    By base model: `encoders` are loaded, `specifications` say where each was loaded from, `awaited` are still to be
    downloaded. Raises ValueError if a configured tokenizer that needs no download cannot be loaded.
    """

    def __init__(self, config: Config, block_tokens: int, base: Callable[[str], str]) -> None:
        self._config = config
        self._base = base
        self._block_tokens = block_tokens
        self._parts = PartCache(config.server.token_cache_bytes)
        self.encoders: dict[str, PromptEncoder] = {}
        self._fingerprints: dict[str, TokenizerFingerprint] = {}
        self._workers: dict[str, TemplateWorker] = {}
        self._lock = threading.Lock()
        self.specifications: dict[str, str] = {}
        self.awaited: dict[str, AwaitedTokenizer] = {}
        for model in config.models:
            if is_to_be_downloaded(model.tokenizer):
                self.wait_for(model.name, AwaitedTokenizer(model.tokenizer))
            elif model.tokenizer != AUTO:
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
        """The encoder of a model's prompts. It estimates token counts as long as no tokenizer has been found."""
        encoder = self.encoders.get(model)
        if encoder is None:
            base = self._base(model)
            if base not in self.encoders:
                self._put(base, ESTIMATED, load_tokenizer(ESTIMATED, chat_template=self._template(base)))
            encoder = self.encoders[base]
        return encoder

    def worker(self, model: str) -> TemplateWorker:
        base = self._base(model)
        self.encoder(base)  # so that the model has a specification
        with self._lock:
            if base not in self._workers:
                self._workers[base] = TemplateWorker(self.specifications[base], self._template(base))
            return self._workers[base]

    def fingerprint(self, model: str) -> TokenizerFingerprint | None:
        """The fingerprint to compare with engines' reports. None for a configured tokenizer that is not exact.

        Until a tokenizer is found, the fingerprint agrees with no engine's: block hashes of estimated tokens are not
        those in engines' reports.
        """
        is_estimated = self.lacks(model) or model in self.awaited
        return self._fingerprints.get(model) or (ESTIMATED_FINGERPRINT if is_estimated else None)

    def requested(self, model: str) -> str:
        """The digest of the example chats, prepared as SGLang does; empty without an exact tokenizer."""
        encoder = self.encoders.get(model)
        return encoder.tokenizer.requested if encoder is not None and encoder.tokenizer.exact else ""

    def lacks(self, model: str) -> bool:
        """Whether the tokenizer of a base model is `auto` and has not been found yet."""
        return self._config.model(model).tokenizer == AUTO and self.specifications.get(model, ESTIMATED) == ESTIMATED

    def specification(self, model: str) -> str:
        """The specification of a base model's tokenizer, also of one that is not downloaded yet."""
        awaited = self.awaited.get(model)
        return self.specifications.get(model, ESTIMATED) if awaited is None else awaited.name

    def exact(self, model: str) -> Tokenizer | None:
        """A base model's tokenizer, unless it only estimates."""
        tokenizer = self.encoder(model).tokenizer
        return tokenizer if tokenizer.exact else None

    def chat_template(self, model: str) -> str | None:
        """The text of the configured template; None: the tokenizer's own."""
        path = self._template(model)
        return None if path is None else read_template(Path(path).expanduser())

    def wait_for(self, model: str, awaited: AwaitedTokenizer) -> None:
        """Estimate a base model's tokens until its tokenizer is downloaded (`learn`)."""
        self.awaited[model] = awaited

    def learn(self, model: str, specification: str, tokenizer: Tokenizer, found: TokenizerFingerprint | None) -> None:
        """Replace the estimate of a base model by a tokenizer; `found` is its fingerprint."""
        self._put(model, specification, tokenizer, found)
        self.awaited.pop(model, None)
        with self._lock:
            worker = self._workers.pop(model, None)
        if worker is not None:
            worker.close()
        if self._config.server.trust_request_chat_template:
            self.worker(model).start()

    def _load(self, model: ModelConfig) -> Tokenizer:
        """Load a configured tokenizer.

        The cache folder has tokenizers that engines offered. Their chat templates run in a process with limits.
        """
        folder, trusts = Path(model.tokenizer), self._config.server.trust_engine_templates
        if folder.parent == cache_folder(KEPT) and model.chat_template is None and not trusts:
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
        tokenizer.prepare()
        self.encoders[model] = PromptEncoder(tokenizer, self._block_tokens, self._parts)
