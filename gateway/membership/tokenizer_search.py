"""Finds the tokenizers of models that nobody has configured, when the first engine of the model answers.

The engine's own comes first, if it has Plait's adapter; then the model's name, or vLLM's `root`, on the Hugging Face
hub. The hub is asked over the network only for names that the operator has given: an engine cannot make the gateway
load anything.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol, Self, TypeVar

import httpx
import msgspec
import structlog

from plait.backends.protocol.tokenizer_files import MAX_BYTES, PATH, TokenizerFiles
from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint, fingerprint
from plait.backends.tokenization.file_tokenizer import FileTokenizer, HuggingFaceTokenizer
from plait.backends.tokenization.hub import hub_folder, is_hub_name, pinned
from plait.backends.tokenization.offered_tokenizer import cache_folder, content_name, load_offered
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.config.sections import Config
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.engine_checks import TOKENIZE, note, tokenizer_mismatch

FIND_S = 60.0
"""For an offer to come and to be loaded, and for a look at the hub."""
MOST_MODELS = 16
"""So many base models of one engine get a tokenizer: an engine lists what it likes, and each takes some 100 MB."""
MAX_OFFER_BYTES = MAX_BYTES + 2**20

T = TypeVar("T")

log = structlog.get_logger(__name__)


class Learner(Protocol):
    """Has the tokenizers of models."""

    def lacks(self, model: str) -> bool:
        """Whether a base model's tokenizer is to be found, and has not been."""
        ...

    def exact(self, model: str) -> Tokenizer | None:
        """A base model's tokenizer, if its ids are to be the engines'."""
        ...

    def chat_template(self, model: str) -> str | None:
        """The text of the configured template; None: the tokenizer's own. Raises ValueError."""
        ...

    def learn(self, model: str, specification: str, tokenizer: Tokenizer, found: TokenizerFingerprint | None) -> None:
        """A tokenizer has been found, which can be loaded again by its specification."""
        ...


class TokenizerSearch:
    """Finds tokenizers for `learner`. Offers are kept below `folder`. `given` are the names that the operator gave."""

    def __init__(self, learner: Learner, folder: Path, given: Collection[str], *, trusts_templates: bool) -> None:
        self._learner = learner
        self._folder = folder
        self._given = given
        self._trusts_templates = trusts_templates
        self._searched: set[tuple[str, str]] = set()
        self._finding: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._loaded: dict[str, tuple[FileTokenizer, TokenizerFingerprint]] = {}  # by what was offered

    @classmethod
    def of(cls, config: Config, learner: Learner) -> Self:
        """The search of a configuration."""
        given = {model.name for model in config.models} | {name for one in config.engines for name in one.models}
        return cls(learner, cache_folder(), given, trusts_templates=config.server.trust_engine_templates)

    async def prepare(self, engine_id: str, http: httpx.AsyncClient, roots: Mapping[str, str | None]) -> bool:
        """Find what is lacking for the base models that an engine serves, once until it is `lost`.

        Returns whether a tokenizer was found: what other engines agree on is to be compared anew. `roots` has what the
        engine says of where it has each of them from. Raises `httpx.TransportError`.
        """
        found = False
        for model, root in islice(roots.items(), MOST_MODELS):
            if (engine_id, model) not in self._searched and self._learner.lacks(model):
                async with self._finding[model]:
                    if self._learner.lacks(model):
                        found |= await self._find(engine_id, http, model, root)
                self._searched.add((engine_id, model))
        return found

    def lost(self, engine_id: str, engine: FleetEngine | None) -> None:
        """The engine does not answer, or has gone (None). What comes back may be another process."""
        self._searched = {(searched, model) for searched, model in self._searched if searched != engine_id}
        if engine is not None:
            engine.mismatches.clear()
            engine.contradictions = 0
            engine.compared = False

    async def compare(self, engine: FleetEngine, http: httpx.AsyncClient) -> None:
        """Note how the tokenizer of an engine that does not report it differs, unless that was `compared`.

        Raises `httpx.TransportError`.
        """
        if engine.compared:
            return
        problem: str | None = None
        for model in engine.offer.models.keys() - engine.offer.adapters.keys():
            tokenizer = self._learner.exact(model)
            if engine.offer.has(TOKENIZE) and tokenizer is not None:
                problem = await tokenizer_mismatch(http, model, tokenizer) or problem
        note(engine, "tokenizer", problem)
        engine.compared = True

    async def _find(self, engine_id: str, http: httpx.AsyncClient, model: str, root: str | None) -> bool:
        if await self._from_engine(engine_id, http, model):
            return True
        for name in filter(None, (model, root)):
            if await self._from_hub(model, name):
                return True
        log.warning(
            "no tokenizer found: tokens are estimated, and cached prefixes are guessed",
            model=model,
            engine=engine_id,
            hint=f"start the engine with Plait's adapter, or set tokenizer of the model in [[models]]: {model}",
        )
        return False

    async def _from_engine(self, engine_id: str, http: httpx.AsyncClient, model: str) -> bool:
        try:
            async with asyncio.timeout(FIND_S):
                offer = await _offer(http)
                if offer is None:
                    return False
                tokenizer, found = await self._load(offer, self._learner.chat_template(model))
        except httpx.TransportError:
            raise
        except Exception as error:  # noqa: BLE001 - the libraries raise what they like for files that are no tokenizer
            log.warning("offered tokenizer refused", engine=engine_id, model=model, problem=repr(error))
            return False
        of_engine = msgspec.structs.replace(found, name=f"that of engine {engine_id}: {offer.fingerprint.name}")
        self._learner.learn(model, tokenizer.name, tokenizer, of_engine)
        log.info(
            "tokenizer found", model=model, engine=engine_id, its_name=offer.fingerprint.name, tokenizer=tokenizer.name
        )
        return True

    async def _load(self, offer: TokenizerFiles, template: str | None) -> tuple[FileTokenizer, TokenizerFingerprint]:
        """The tokenizer of an offer. Models for which the same is offered share it."""
        name = f"{content_name(offer)} {template or ''}"
        if name not in self._loaded:
            trusts = self._trusts_templates
            load = partial(load_offered, offer, self._folder, trusts_template=trusts, chat_template=template)
            self._loaded[name] = await asyncio.to_thread(_without_panic, load)
        return self._loaded[name]

    async def _from_hub(self, model: str, name: str) -> bool:
        if not is_hub_name(name):
            return False
        try:
            async with asyncio.timeout(FIND_S):
                folder = await asyncio.to_thread(hub_folder, name, may_download=name in self._given)
                if folder is None:
                    return False
                template = self._learner.chat_template(model)
                load = partial(HuggingFaceTokenizer, pinned(name, folder), folder, template)
                found = await asyncio.to_thread(_without_panic, load)
        except Exception as error:  # noqa: BLE001 - as above
            log.warning("tokenizer of the hub not used", model=model, problem=repr(error))
            return False
        self._learner.learn(model, found.name, found, await asyncio.to_thread(fingerprint, found))
        log.info("tokenizer found", model=model, tokenizer=found.name)
        return True


def _without_panic(load: Callable[[], T]) -> T:
    """What `load` returns. A panic in a library of Rust is no `Exception`: it becomes a ValueError."""
    try:
        return load()
    except Exception:
        raise
    except BaseException as error:  # noqa: BLE001 - of Rust
        raise ValueError(f"a library failed: {error!r}") from None


async def _offer(http: httpx.AsyncClient) -> TokenizerFiles | None:
    """What an engine offers; None if it has no such route. Raises `httpx.HTTPError`, ValueError for too many bytes."""
    body = bytearray()
    async with http.stream("GET", PATH, timeout=FIND_S) as response:
        if response.status_code in {404, 405}:
            return None
        response.raise_for_status()
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > MAX_OFFER_BYTES:
                raise ValueError(f"the offer has more than {MAX_OFFER_BYTES} bytes")
    return msgspec.msgpack.decode(body, type=TokenizerFiles)
