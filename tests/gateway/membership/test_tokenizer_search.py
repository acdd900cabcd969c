"""Where the tokenizers come from of models that nobody has configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

import plait.gateway.membership.tokenizer_search
from plait.backends.protocol.tokenizer_files import PATH, TokenizerFiles
from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint, fingerprint
from plait.backends.tokenization.file_tokenizer import EmbeddedTokenizer
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.membership.tokenizer_search import TokenizerSearch
from tests.backends.tokenization.tokenizer_folders import folder_of
from tests.backends.tokenization.trained import files_of

OWN = EmbeddedTokenizer()
OFFER = msgspec.msgpack.encode(TokenizerFiles(fingerprint(OWN), OWN.files()))
COMMIT = "0123456789abcdef"


class Learned:
    """What has been learned, by model: the specification."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

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


class Searching:
    """A search over one engine, which answers as `answer` does, and a hub with `folders`."""

    def __init__(
        self, tmp_path: Path, answer: Callable[[httpx.Request], httpx.Response], given: tuple[str, ...] = ()
    ) -> None:
        self.learned = Learned()
        self.requests: list[str] = []
        self.search = TokenizerSearch(self.learned, tmp_path / "kept", given, trusts_templates=True)
        self._answer = answer

    async def prepare(self, roots: Mapping[str, str | None], engine: str = "a") -> bool:
        def counted(request: httpx.Request) -> httpx.Response:
            self.requests.append(request.url.path)
            return self._answer(request)

        async with httpx.AsyncClient(transport=httpx.MockTransport(counted), base_url="http://e") as http:
            return await self.search.prepare(engine, http, roots)


def offering(_request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=OFFER)


def stock(_request: httpx.Request) -> httpx.Response:
    return httpx.Response(404)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """A hub that has `known/model` in its cache, and `far/model` by download: the names, and whether by download."""
    asked: list[tuple[str, bool]] = []
    folder = folder_of(tmp_path, COMMIT, files_of("gpt-2"))

    def found(name: str, *, may_download: bool) -> Path | None:
        asked.append((name, may_download))
        return folder if name == "known/model" or (name == "far/model" and may_download) else None

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
    await given.prepare({"far/model": None})
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
    searching.search.lost("a", None)
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
