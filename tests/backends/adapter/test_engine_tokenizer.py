"""The fingerprint in the reports of vLLM and SGLang is that of the gateway for the same files, and else says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from plait.backends.adapter.engine_tokenizer import EngineTokenizer, read_tokenizer, with_fields
from plait.backends.protocol.cache_state import CacheState
from plait.backends.protocol.tokenizer_fingerprint import NO_TOKENIZER, TokenizerFingerprint, fingerprint
from plait.backends.tokenization.loading import load_tokenizer
from tests.backends.adapter.api_servers import SERVERS, Server, SglangServer, VllmServer, install_engines
from tests.backends.tokenization.tokenizer_folders import TEMPLATE, folder_of
from tests.backends.tokenization.trained import files_of

THINKING = TEMPLATE + "{% if thinks is defined and not thinks %}<think></think>{% endif %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path, "m", files_of("gpt-2"), THINKING)


def of_gateway(folder: Path, chat_template: Path | None = None) -> TokenizerFingerprint:
    template = None if chat_template is None else str(chat_template)
    return fingerprint(load_tokenizer(str(folder), chat_template=template))


async def reported(server: Server, monkeypatch: pytest.MonkeyPatch) -> TokenizerFingerprint:
    install_engines(monkeypatch, server)
    found = (await server.report()).tokenizer
    assert found is not None
    return found


@pytest.mark.parametrize("kind", SERVERS)
async def test_it_is_the_gateways_for_the_same_files(
    kind: type[Server], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await reported(kind(folder), monkeypatch) == of_gateway(folder)


@pytest.mark.parametrize("kind", SERVERS)
async def test_it_shows_the_template_that_the_engine_was_given(
    kind: type[Server], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }} is asked.")
    found = await reported(kind(folder, template=template.read_text()), monkeypatch)
    assert found == of_gateway(folder, template)
    assert found.chats != of_gateway(folder).chats


@pytest.mark.parametrize("kind", SERVERS)
async def test_it_shows_what_the_template_gets_by_default(
    kind: type[Server], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await reported(kind(folder, defaults={"thinks": False}), monkeypatch)
    plain = of_gateway(folder)
    assert found.chats != plain.chats
    assert msgspec.structs.replace(found, chats=plain.chats) == plain


async def test_no_gateway_renders_sglangs_own_conversation_templates(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await reported(SglangServer(folder, conversation="vicuna"), monkeypatch)
    assert found.chats != of_gateway(folder).chats
    assert found.ids == of_gateway(folder).ids


@pytest.mark.parametrize("kind", SERVERS)
async def test_an_engine_may_have_no_tokenizer(kind: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    found = await reported(kind(None), monkeypatch)
    assert found == NO_TOKENIZER
    assert found.is_none


async def test_vllm_reads_its_tokenizer_when_it_starts_and_never_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = VllmServer(folder)
    install_engines(monkeypatch, server)
    application = server.application()
    await application({"type": "lifespan"}, None, None)
    server._loaded.get_vocab = None  # it would fail now
    server.application = lambda: application  # type: ignore[method-assign]
    assert [(await server.report()).tokenizer for _ in range(2)] == [of_gateway(folder)] * 2


def test_a_tokenizer_that_cannot_be_read_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def find() -> EngineTokenizer:
        raise AttributeError("there is no renderer in this version")

    found = msgspec.msgpack.decode(read_tokenizer(find, "0.5"))
    assert found == {"tokenizer": None, "chats": {"version": "0.5", "requested": "", "drops_tools": False}}
    assert "Plait cannot read the tokenizer" in caplog.text
    assert "there is no renderer in this version" in caplog.text


def test_tokens_and_templates_need_not_be_those_of_transformers() -> None:
    """Tokens in bytes, no way to ask for added ones, and a template that answers with ids."""

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        return [0] * add_special_tokens + list(text.encode())

    tokenizer: Any = SimpleNamespace(get_vocab=lambda: {bytes([byte]): byte for byte in range(256)}, encode=encode)
    found = fingerprint(EngineTokenizer("odd", tokenizer, lambda *_: [1, 2, 3]))
    refusing = fingerprint(EngineTokenizer("odd", tokenizer, lambda *_: None))
    assert found == refusing
    assert not found.is_none


async def test_nothing_else_of_the_report_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = VllmServer(folder)
    install_engines(monkeypatch, server)
    whole = await server.report()
    assert msgspec.structs.replace(whole, tokenizer=None, chats=None) == msgspec.msgpack.decode(
        server.scheduler_report(), type=CacheState
    )


def test_a_newer_report_keeps_fields_that_this_version_does_not_know() -> None:
    reported = read_tokenizer(lambda: None, "1")
    report = msgspec.msgpack.decode(with_fields(msgspec.msgpack.encode({"engine": "e", "new": [1]}), reported))
    assert (report["engine"], report["new"]) == ("e", [1])
    assert report["tokenizer"] == msgspec.to_builtins(NO_TOKENIZER)
    assert report["chats"]["version"] == "1"
