"""Where the tokenizers come from of models that nobody has configured."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

import plait.gateway.membership.hub_downloads
import plait.gateway.membership.tokenizer_search
from plait.backends.protocol.tokenizer_files import PATH, TokenizerFiles
from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint, fingerprint
from plait.backends.tokenization.file_tokenizer import EmbeddedTokenizer
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.membership.engine_requests import EngineRequests
from plait.gateway.membership.hub_downloads import AwaitedTokenizer, HubDownloads
from plait.gateway.membership.tokenizer_search import TokenizerSearch, tokenizer_mismatch
from plait.gateway.metrics import new_registry
from plait.gateway.supervision import Supervisor
from tests.backends.tokenization.tokenizer_folders import folder_of
from tests.backends.tokenization.trained import files_of
from tests.gateway.membership.fake_http import requests_to
from tests.waiting import WITHIN_S

OWN = EmbeddedTokenizer()
OFFER = msgspec.msgpack.encode(TokenizerFiles(fingerprint(OWN), OWN.files()))
COMMIT = "0123456789abcdef"


class Learned:
    """What has been learned, by model: the specification."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.awaited: dict[str, AwaitedTokenizer] = {}

    def wait_for(self, model: str, awaited: AwaitedTokenizer) -> None:
        self.awaited[model] = awaited

    def lacks(self, model: str) -> bool:
        return model not in self.found

    def exact(self, _model: str) -> Tokenizer | None:
        return OWN

    def chat_template(self, _model: str) -> str | None:
        return None

    def learn(self, model: str, specification: str, tokenizer: Tokenizer, found: TokenizerFingerprint | None) -> None:
        assert found is not None
        assert msgspec.structs.replace(found, name="") == msgspec.structs.replace(fingerprint(tokenizer), name="")
        self.found[model] = specification
        self.awaited.pop(model, None)


class Searching:
    """A search over one engine, which answers as `answer` does, and a hub with `folders`."""

    def __init__(
        self, tmp_path: Path, answer: Callable[[httpx.Request], httpx.Response], given: tuple[str, ...] = ()
    ) -> None:
        self.learned = Learned()
        self.requests: list[str] = []
        self.supervisor = Supervisor(new_registry())
        downloads = HubDownloads(self.learned, self.supervisor)
        self.search = TokenizerSearch(self.learned, tmp_path / "kept", given, downloads, trusts_templates=True)
        self._answer = answer

    async def prepare(self, roots: Mapping[str, str | None], engine: str = "a") -> bool:
        async def counted(request: httpx.Request) -> httpx.Response:
            self.requests.append(request.url.path)
            return self._answer(request)

        with requests_to(counted) as requests:
            return await self.search.prepare(engine, requests, roots)


def offering(_request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=OFFER)


def stock(_request: httpx.Request) -> httpx.Response:
    return httpx.Response(404)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """A hub that has `known/model` in its cache, and is to be asked for others: the names, and whether by download."""
    asked: list[tuple[str, bool]] = []
    folder = folder_of(tmp_path, COMMIT, files_of("gpt-2"))

    def found(name: str, *, may_download: bool) -> Path | None:
        asked.append((name, may_download))
        return folder if name == "known/model" else None

    async def download(name: str) -> Path:
        asked.append((name, True))
        return folder

    monkeypatch.setattr(plait.gateway.membership.hub_downloads, "download", download)
    monkeypatch.setattr(plait.gateway.membership.tokenizer_search, "hub_folder", found)
    return asked


async def test_the_engines_own_comes_first(tmp_path: Path, hub: list[tuple[str, bool]]) -> None:
    searching = Searching(tmp_path, offering)
    assert [await searching.prepare({"known/model": None}, engine) for engine in "aab"] == [True, False, False]
    assert (searching.learned.found, searching.requests, hub) == ({"known/model": "embedded"}, [PATH], [])


@pytest.mark.parametrize("roots", [{"known/model": None}, {"served-as": "known/model"}])
async def test_an_engine_without_the_adapter_has_its_models_name_or_root(
    tmp_path: Path, hub: list[tuple[str, bool]], roots: dict[str, str | None]
) -> None:
    searching = Searching(tmp_path, stock)
    await searching.prepare(roots)
    assert list(searching.learned.found.values()) == [f"known/model@{COMMIT}"]
    assert hub == [("known/model", False)]


async def test_only_names_that_the_operator_gave_are_downloaded(tmp_path: Path, hub: list[tuple[str, bool]]) -> None:
    searching = Searching(tmp_path, stock)
    await searching.prepare({"far/model": "far/other"})
    assert (searching.learned.found, hub) == ({}, [("far/model", False), ("far/other", False)])
    given = Searching(tmp_path, stock, ("far/model",))
    assert not await given.prepare({"far/model": None}), "the engine takes calls at once"
    assert list(given.learned.awaited) == ["far/model"]
    found = asyncio.Event()
    given.search.downloads.on_found = found.set
    async with asyncio.timeout(WITHIN_S):
        await found.wait()
    await given.supervisor.close()
    assert given.learned.found == {"far/model": f"far/model@{COMMIT}"}


async def test_nothing_found_is_said_once_and_looked_for_again_after_a_restart(
    tmp_path: Path, hub: list[tuple[str, bool]]
) -> None:
    searching = Searching(tmp_path, stock)
    with capture_logs() as logs:
        for _ in range(3):
            await searching.prepare({"m": "/models/m"})
    assert [entry["event"].partition(":")[0] for entry in logs] == ["no tokenizer found"]
    assert hub == [], "neither is a name of the hub"
    searching._answer = offering
    searching.search.lost("a")
    await searching.prepare({"m": None})
    assert searching.learned.found == {"m": "embedded"}


@pytest.mark.parametrize(
    ("content", "status"), [(b"no msgpack", 200), (OFFER[:-10], 200), (b"{}", 500), (bytes(70 * 2**20), 200)]
)
async def test_an_offer_that_cannot_be_used_is_said(
    tmp_path: Path, hub: list[tuple[str, bool]], content: bytes, status: int
) -> None:
    searching = Searching(tmp_path, lambda _request: httpx.Response(status, content=content))
    with capture_logs() as logs:
        await searching.prepare({"known/model": None})
    assert logs[0]["event"] == "offered tokenizer refused"
    assert searching.learned.found == {"known/model": f"known/model@{COMMIT}"}, "the next source is asked"
    assert hub


# Engines that do not report their tokenizer.


@contextmanager
def tokenizing(tokenizer: Tokenizer | None, status: int = 200) -> Iterator[EngineRequests]:
    """An engine that has `/tokenize`."""

    async def answer(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        assert (request.url.path, asked["model"]) == ("/tokenize", "m")
        if tokenizer is None or ("messages" in asked and status != 200):
            return httpx.Response(status, text="nothing")
        ids = tokenizer.encode(asked["prompt"]) if "prompt" in asked else tokenizer.encode_chat(asked["messages"])
        return httpx.Response(200, json={"tokens": ids, "count": len(ids)})

    with requests_to(answer) as requests:
        yield requests


async def test_the_same_ids_are_no_mismatch() -> None:
    with tokenizing(OWN) as requests:
        assert await tokenizer_mismatch(requests, "m", OWN) is None


async def test_other_ids_are_named_with_both_values() -> None:
    with tokenizing(load_tokenizer("bytes")) as requests:
        problem = await tokenizer_mismatch(requests, "m", OWN)
    assert problem is not None
    assert "tokens of a text" in problem
    assert "from token 0 on" in problem


async def test_another_template_is_found_by_a_chat(tmp_path_factory: pytest.TempPathFactory) -> None:
    template = tmp_path_factory.mktemp("t") / "other.jinja"
    template.write_text("{{ messages[0].content }}")
    with tokenizing(load_tokenizer("embedded", chat_template=str(template))) as requests:
        problem = await tokenizer_mismatch(requests, "m", OWN)
    assert problem is not None
    assert "tokens of a chat" in problem


@pytest.mark.parametrize("status", [200, 400, 404, 501])
async def test_an_engine_that_does_not_say_is_no_mismatch(status: int) -> None:
    with tokenizing(None, status) as requests:
        assert await tokenizer_mismatch(requests, "m", OWN) is None


async def test_an_engine_may_tokenize_texts_only() -> None:
    with tokenizing(OWN, 400) as requests:
        assert await tokenizer_mismatch(requests, "m", OWN) is None
