"""Finds the tokenizer of a model without a configured one, when its first engine answers.

Sources, in this order: the engine itself, if it has Plait's adapter; the Hugging Face cache on this machine, by the
model's name or vLLM's `root`; a download from the hub. A download needs a name that the operator has given, so that an
engine cannot make the gateway download anything, and runs in the background.

An engine with the adapter reports its tokenizer's fingerprint. For any other engine with `/tokenize`, the ids of a text
and a chat are compared.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import structlog

from plait.backends.errors import EngineError, EngineGarbledError, PlaitError
from plait.backends.protocol.tokenizer_files import MAX_BYTES, PATH, TokenizerFiles
from plait.backends.protocol.tokenizer_fingerprint import TEXTS, TokenizerFingerprint, fingerprint
from plait.backends.tokenization.cache_folder import cache_folder
from plait.backends.tokenization.file_tokenizer import FileTokenizer
from plait.backends.tokenization.hub import hub_folder, is_hub_name
from plait.backends.tokenization.offered_tokenizer import KEPT, content_name, load_offered
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.config.sections import Config
from plait.gateway.fleet.health import Offer
from plait.gateway.membership.engine_requests import EngineRequests, RefusedRequestError
from plait.gateway.membership.hub_downloads import HubDownloads, Tokenizers, load_from, without_panic

FIND_S = 60.0
"""The time to fetch and load an engine's tokenizer."""
MOST_MODELS = 16
"""The most base models of one engine that get a tokenizer, because an engine may list any number, at 100 MB each."""
MAX_OFFER_BYTES = MAX_BYTES + 2**20

TOKENIZE: Final = "/tokenize"
PROBE_TEXT: Final = "\n".join(TEXTS[:6])
"""Some 400 tokens: short enough for any context."""
PROBE_CHAT: Final = [{"role": "user", "content": " Say «hi». "}]

log = structlog.get_logger(__name__)


class TokenizerSearch:
    """Finds tokenizers for `learner`. Engines' tokenizers are cached in `folder`.

    `given` are the names from the configuration, which `downloads` may download.
    """

    def __init__(
        self,
        learner: Tokenizers,
        folder: Path,
        given: Collection[str],
        downloads: HubDownloads,
        *,
        trusts_templates: bool,
    ) -> None:
        self._learner = learner
        self.downloads = downloads
        self._folder = folder
        self._given = given
        self._trusts_templates = trusts_templates
        self._searched: set[tuple[str, str]] = set()
        self._finding: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._loaded: dict[str, tuple[FileTokenizer, TokenizerFingerprint]] = {}  # by what was offered

    @classmethod
    def of(cls, config: Config, learner: Tokenizers, downloads: HubDownloads) -> Self:
        """The search of a configuration."""
        given = {model.name for model in config.models} | {name for one in config.engines for name in one.models}
        trusts_templates = config.server.trust_engine_templates
        return cls(learner, cache_folder(KEPT), given, downloads, trusts_templates=trusts_templates)

    async def prepare(self, engine_id: str, requests: EngineRequests, roots: Mapping[str, str | None]) -> bool:
        """Search the missing tokenizers of an engine's base models, once until the engine is `lost`.

        Returns whether one was found; then all engines have to be compared anew. `roots` has the engine's `root` (hub
        name or path) by base model. Raises `EngineError`.
        """
        found = False
        for model, root in islice(roots.items(), MOST_MODELS):
            if (engine_id, model) not in self._searched and self._learner.lacks(model):
                async with self._finding[model]:
                    if self._learner.lacks(model):
                        found |= await self._find(engine_id, requests, model, root)
                self._searched.add((engine_id, model))
        return found

    def lost(self, engine_id: str) -> None:
        """Search anew when the engine answers again, because it may be another process."""
        self._searched = {(searched, model) for searched, model in self._searched if searched != engine_id}

    async def mismatch(self, offer: Offer, requests: EngineRequests) -> str | None:
        """The difference of a tokenizer that the engine does not report; None if it is equal or cannot be compared.

        Raises `EngineError`.
        """
        problem: str | None = None
        for model in offer.models.keys() - offer.adapters.keys():
            tokenizer = self._learner.exact(model)
            if offer.has(TOKENIZE) and tokenizer is not None:
                problem = await tokenizer_mismatch(requests, model, tokenizer) or problem
        return problem

    async def _find(self, engine_id: str, requests: EngineRequests, model: str, root: str | None) -> bool:
        if await self._from_engine(engine_id, requests, model):
            return True
        names = [name for name in (model, root) if name and is_hub_name(name)]
        for name in names:
            if await self._from_cache(model, name):
                return True
        given = next((name for name in names if name in self._given), None)
        if given is not None:
            self.downloads.want(model, given)
            return False
        log.warning(
            "no tokenizer found: tokens are estimated, and cached prefixes are guessed",
            model=model,
            engine=engine_id,
            hint=f"start the engine with Plait's adapter, or set tokenizer of the model in [[models]]: {model}",
        )
        return False

    async def _from_engine(self, engine_id: str, requests: EngineRequests, model: str) -> bool:
        try:
            async with asyncio.timeout(FIND_S):
                offer = await _offer(requests)
                if offer is None:
                    return False
                tokenizer, found = await self._load(offer, self._learner.chat_template(model))
        except Exception as error:  # the libraries raise what they like for files that are no tokenizer
            if isinstance(error, EngineError) and not isinstance(error, EngineGarbledError):
                raise
            log.warning("offered tokenizer refused", engine=engine_id, model=model, problem=repr(error))
            return False
        of_engine = msgspec.structs.replace(found, name=f"that of engine {engine_id}: {offer.fingerprint.name}")
        self._learner.learn(model, tokenizer.name, tokenizer, of_engine)
        log.info(
            "tokenizer found", model=model, engine=engine_id, its_name=offer.fingerprint.name, tokenizer=tokenizer.name
        )
        return True

    async def _load(self, offer: TokenizerFiles, template: str | None) -> tuple[FileTokenizer, TokenizerFingerprint]:
        """The tokenizer in an engine's files. Models with the same files share it."""
        name = f"{content_name(offer)} {template or ''}"
        if name not in self._loaded:
            trusts = self._trusts_templates
            load = partial(load_offered, offer, self._folder, trusts_template=trusts, chat_template=template)
            self._loaded[name] = await asyncio.to_thread(without_panic, load)
        return self._loaded[name]

    async def _from_cache(self, model: str, name: str) -> bool:
        """Whether the hub's cache on this machine has the tokenizer."""
        try:
            folder = await asyncio.to_thread(hub_folder, name, may_download=False)
            if folder is None:
                return False
            found = await load_from(folder, name, self._learner.chat_template(model))
        except Exception as error:  # noqa: BLE001 - as above
            log.warning("tokenizer of the hub not used", model=model, problem=repr(error))
            return False
        self._learner.learn(model, found.name, found, await asyncio.to_thread(fingerprint, found))
        log.info("tokenizer found", model=model, tokenizer=found.name)
        return True


async def _offer(requests: EngineRequests) -> TokenizerFiles | None:
    """The engine's tokenizer files; None if it has no such route. Raises `EngineError`, `RefusedRequestError`."""
    try:
        with requests.holding(FIND_S) as patient:
            body = await patient.get(PATH, accept=b"application/msgpack", max_bytes=MAX_OFFER_BYTES)
    except RefusedRequestError as error:
        if error.status in {404, 405}:
            return None
        raise
    return msgspec.msgpack.decode(body, type=TokenizerFiles)


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def tokenizer_mismatch(requests: EngineRequests, model: str, tokenizer: Tokenizer) -> str | None:
    """How an engine's `/tokenize` differs from the gateway's tokenizer; None if it is equal or gives no ids.

    Raises `EngineError`.
    """
    asked: dict[str, tuple[dict[str, Any], Sequence[int]]] = {
        "a text": ({"prompt": PROBE_TEXT}, await asyncio.to_thread(tokenizer.encode, PROBE_TEXT)),
    }
    with suppress(PlaitError):  # the model has no chat template, or it cannot be rendered now
        chat = await asyncio.to_thread(tokenizer.encode_chat, PROBE_CHAT)
        asked["a chat"] = ({"messages": PROBE_CHAT, "add_generation_prompt": True}, chat)
    for what, (fields, ours) in asked.items():
        theirs = await _tokenized(requests, {"model": model, **fields})
        if theirs is not None and theirs != list(ours):
            return (
                f"the engine's tokenizer is not the gateway's: it makes {len(theirs)} tokens of {what} "
                f"({_different(theirs, ours)}), the gateway {len(ours)} ({_different(ours, theirs)})"
            )
    return None


async def _tokenized(requests: EngineRequests, body: dict[str, Any]) -> list[int] | None:
    try:
        return msgspec.json.decode(await requests.post(TOKENIZE, body), type=_Tokens).tokens
    except (RefusedRequestError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _different(ids: Sequence[int], others: Sequence[int]) -> str:
    """The first ids that are not those of the others."""
    same = (one == other for one, other in zip(ids, others, strict=False))
    place = next((place for place, is_same in enumerate(same) if not is_same), min(len(ids), len(others)))
    return f"{', '.join(map(str, ids[place : place + 3])) or 'nothing'} from token {place} on"
