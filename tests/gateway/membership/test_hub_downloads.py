"""Tokenizers that come from the hub while the gateway serves, in front of `ModelTokenizers`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import plait.gateway.calls.model_tokenizers
import plait.gateway.membership.hub_downloads
from plait.backends.protocol.openai import CompletionRequest
from plait.backends.tokenization import hub_download
from plait.gateway.calls.call_reader import PromptReader, TokenizedPrompt, Tokenizing
from plait.gateway.config.sections import Config, ModelConfig
from plait.gateway.membership.hub_downloads import HubDownloads
from plait.gateway.metrics import new_registry
from plait.gateway.supervision import Supervisor
from tests.backends.tokenization.tokenizer_folders import folder_of
from tests.backends.tokenization.trained import files_of
from tests.waiting import WITHIN_S

COMMIT = "0123456789abcdef"
NAME = "far/model"
TEXT = "The quick brown fox jumps over the lazy dog. "


class Hub:
    """A hub that is silent until it is to give `folder`, or `refuses`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refuses = False
        self.answers = asyncio.Event()
        self.asked = 0

    async def download(self, name: str) -> Path:
        assert name == NAME
        self.asked += 1
        await self.answers.wait()
        if self.refuses:
            raise ValueError("the hub does not have it")
        return self.folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(folder_of(tmp_path, COMMIT, files_of("gpt-2")))
    monkeypatch.setattr(plait.gateway.membership.hub_downloads, "download", hub.download)
    monkeypatch.setattr(plait.gateway.calls.model_tokenizers, "is_to_be_downloaded", lambda spec: spec == NAME)
    return hub


@pytest.fixture
def reader(hub: Hub) -> PromptReader:
    return PromptReader(Config(models=(ModelConfig(name="m", tokenizer=NAME),)), 64)


@pytest.fixture
async def downloads(reader: PromptReader) -> AsyncIterator[HubDownloads]:
    supervisor = Supervisor(new_registry())
    yield HubDownloads(reader.tokenizers, supervisor)
    await supervisor.close()
    reader.tokenizers.close()


def read(reader: PromptReader, text: str = TEXT) -> TokenizedPrompt:
    begun = reader.begin(CompletionRequest(model="m", prompt=text), None, None, len(text))
    assert isinstance(begun, TokenizedPrompt)
    return begun


def whole(steps: Tokenizing) -> TokenizedPrompt:
    """The prompt, after the turns that are left of it."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            prompt: TokenizedPrompt = end.value
            return prompt


async def until_found(downloads: HubDownloads) -> None:
    found = asyncio.Event()
    downloads.on_found = found.set
    async with asyncio.timeout(WITHIN_S):
        await found.wait()


async def test_tokens_are_estimated_until_it_has_come(hub: Hub, reader: PromptReader, downloads: HubDownloads) -> None:
    with capture_logs() as logs:
        downloads.open()
    assert [(entry["model"], entry["tokenizer"]) for entry in logs] == [("m", NAME)]
    before, tokenizers = read(reader), reader.tokenizers
    assert (before.exact, tokenizers.exact("m"), tokenizers.lacks("m")) == (False, None, False)
    estimated = tokenizers.fingerprint("m")
    hub.answers.set()
    await until_found(downloads)
    after = read(reader)
    assert after.exact
    assert after.tokens != before.tokens
    assert (tokenizers.awaited, tokenizers.specification("m")) == ({}, f"{NAME}@{COMMIT}")
    assert tokenizers.fingerprint("m") != estimated, "engines are compared with the one that has come"


async def test_a_prompt_under_way_keeps_its_tokenizer(hub: Hub, reader: PromptReader, downloads: HubDownloads) -> None:
    downloads.open()
    steps = reader.steps(CompletionRequest(model="m", prompt=[TEXT, TEXT]), None)
    next(steps)
    hub.answers.set()
    await until_found(downloads)
    prompt = whole(steps)
    assert not prompt.exact, "no engine gets its ids"
    assert list(prompt.prompts[0]) == list(prompt.prompts[1])


async def test_why_it_does_not_come_is_said_once(
    hub: Hub, reader: PromptReader, downloads: HubDownloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plait.gateway.membership.hub_downloads, "AGAIN_S", 0.001)
    hub.refuses = True
    hub.answers.set()
    with capture_logs() as logs:
        downloads.open()
        async with asyncio.timeout(WITHIN_S):
            while hub.asked < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    assert [entry["log_level"] for entry in logs] == ["warning", "error"]
    assert reader.tokenizers.awaited["m"] == (NAME, "the hub does not have it")
    hub.refuses = False
    await until_found(downloads)
    assert read(reader).exact


async def test_a_silent_hub_takes_no_longer_than_it_may(reader: PromptReader, downloads: HubDownloads) -> None:
    await downloads.try_all(0.01)
    assert reader.tokenizers.awaited["m"] == (NAME, None)


def test_the_process_prints_the_folder_or_why_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(hub_download, "hub_folder", lambda _name, may_download: tmp_path if may_download else None)
    assert (hub_download.main(NAME), capsys.readouterr().out) == (0, str(tmp_path))

    def refuse(_name: str, *, may_download: bool) -> Path | None:
        raise ValueError(f"not\n given, {may_download}")

    monkeypatch.setattr(hub_download, "hub_folder", refuse)
    assert (hub_download.main(NAME), capsys.readouterr().out) == (1, "not given, True")
