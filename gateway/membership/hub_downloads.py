"""Downloads tokenizers from the Hugging Face hub while the gateway serves.

Until a tokenizer is there, its model's tokens are estimated and engines get texts. A prompt is encoded by one tokenizer
from begin to end, so that running calls are not affected. Afterwards engines are compared with the tokenizer anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

import structlog

from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint, fingerprint
from plait.backends.tokenization.file_tokenizer import HuggingFaceTokenizer
from plait.backends.tokenization.hub import pinned
from plait.backends.tokenization.hub_download import download
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.supervision import Supervisor

AGAIN_S: Final = 60.0
"""The pause after a download that failed."""

LONGEST_S: Final = 600.0
"""The longest download: a tokenizer has some 20 MB."""

T = TypeVar("T")

log = structlog.get_logger(__name__)


class AwaitedTokenizer(NamedTuple):
    """A tokenizer to download: its name on the hub, and the problem of the last try."""

    name: str
    problem: str | None = None


class Tokenizers(Protocol):
    """The tokenizers of base models, some of which are still `awaited`, by model."""

    @property
    def awaited(self) -> Mapping[str, AwaitedTokenizer]:
        """The tokenizers that are to be downloaded."""

    def wait_for(self, model: str, awaited: AwaitedTokenizer) -> None:
        """Estimate the tokens of a model until this tokenizer is downloaded."""

    def lacks(self, model: str) -> bool:
        """Whether a model's tokenizer is `auto` and has not been found yet."""

    def exact(self, model: str) -> Tokenizer | None:
        """A model's tokenizer, unless it only estimates."""

    def chat_template(self, model: str) -> str | None:
        """The text of the configured template; None: the tokenizer's own. Raises ValueError."""

    def learn(self, model: str, specification: str, tokenizer: Tokenizer, found: TokenizerFingerprint | None) -> None:
        """Replace the estimate of a model by a tokenizer. `specification` loads it again."""


class HubDownloads:
    """Downloads what `tokenizers` await. `on_found` is called after each download."""

    def __init__(self, tokenizers: Tokenizers, supervisor: Supervisor) -> None:
        self.tokenizers = tokenizers
        self._supervisor = supervisor
        self.on_found: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Start to download the configured tokenizers that are not on this machine."""
        for model in self.tokenizers.awaited:
            self._start(model)

    def want(self, model: str, name: str) -> None:
        """Start to download the tokenizer of a base model without a configured one."""
        if model not in self.tokenizers.awaited:
            self.tokenizers.wait_for(model, AwaitedTokenizer(name))
            self._start(model)

    async def try_all(self, within_s: float) -> None:
        """Try to download each awaited tokenizer once, for `within_s` at most. The others stay awaited."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.gather(*map(self._try, self.tokenizers.awaited))

    def _start(self, model: str) -> None:
        log.warning(
            "tokenizer is being downloaded: until it has come, tokens are estimated and engines get texts",
            model=model,
            tokenizer=self.tokenizers.awaited[model].name,
        )
        self._supervisor.start(f"tokenizer:{model}", partial(self._keep_trying, model))

    async def _keep_trying(self, model: str) -> None:
        while not await self._try(model):  # noqa: ASYNC110 - each try is work
            await asyncio.sleep(AGAIN_S)

    async def _try(self, model: str) -> bool:
        """Try once to download a tokenizer. Returns whether it is not awaited any more."""
        name, said = self.tokenizers.awaited[model]
        try:
            async with asyncio.timeout(LONGEST_S):
                folder = await download(name)
            found = await load_from(folder, name, self.tokenizers.chat_template(model))
            print_of = await asyncio.to_thread(fingerprint, found)
        except Exception as error:  # noqa: BLE001 - the libraries raise what they like for files that are no tokenizer
            problem = str(error) or f"the hub has not given it within {LONGEST_S:g} s"
            if model in self.tokenizers.awaited:
                self.tokenizers.wait_for(model, AwaitedTokenizer(name, problem))
            if problem != said:
                log.error("tokenizer not downloaded", model=model, tokenizer=name, problem=problem, again_in_s=AGAIN_S)  # noqa: TRY400 - not a defect
            return model not in self.tokenizers.awaited
        if model in self.tokenizers.awaited:  # no engine has offered one meanwhile
            self.tokenizers.learn(model, found.name, found, print_of)
            log.info("tokenizer found", model=model, tokenizer=found.name)
            self.on_found()
        return True


async def load_from(folder: Path, name: str, template: str | None) -> HuggingFaceTokenizer:
    """The tokenizer in a folder of the hub's cache. Raises what the libraries raise for files that are none."""

    def load() -> HuggingFaceTokenizer:
        tokenizer = HuggingFaceTokenizer(pinned(name, folder), folder, template)
        tokenizer.prepare()
        return tokenizer

    return await asyncio.to_thread(without_panic, load)


def without_panic(load: Callable[[], T]) -> T:
    """Call `load`. A panic in a library of Rust, which is no `Exception`, becomes a ValueError."""
    try:
        return load()
    except Exception:
        raise
    except BaseException as error:  # noqa: BLE001 - of Rust
        raise ValueError(f"a library failed: {error!r}") from None
