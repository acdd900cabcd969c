"""`GET /plait/tokenizer` of vLLM and SGLang: what it offers can be loaded, and is what the engine reports."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from plait.backends.protocol.tokenizer_files import PATH, TokenizerFiles
from plait.backends.tokenization.offered_tokenizer import load_offered
from tests.backends.adapter.api_servers import SERVERS, Server, install_engines
from tests.backends.tokenization.tokenizer_folders import TEMPLATE, folder_of
from tests.backends.tokenization.trained import files_of

THINKING = TEMPLATE + "{% if thinks is defined and not thinks %}<think></think>{% endif %}"


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("template", [None, "{{ messages[0].content }} is asked."])
@pytest.mark.parametrize("defaults", [None, {"thinks": False}])
async def test_a_gateway_can_load_it(
    kind: type[Server],
    template: str | None,
    defaults: dict[str, bool] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = kind(folder_of(tmp_path, "m", files_of("gpt-2"), THINKING), template=template, defaults=defaults)
    install_engines(monkeypatch, server)
    answer = await server.get(PATH)
    assert answer.status_code == 200, answer.text
    offer = msgspec.msgpack.decode(answer.content, type=TokenizerFiles)
    assert offer.fingerprint == (await server.report()).tokenizer
    tokenizer, _ = load_offered(offer, tmp_path / "kept", trusts_template=True)
    messages = [{"role": "user", "content": "Is it raining?"}]
    assert tokenizer.encode_chat(messages) == server.chat_ids(messages)


@pytest.mark.parametrize("kind", SERVERS)
async def test_an_engine_without_one_says_so(kind: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    server = kind(None)
    install_engines(monkeypatch, server)
    answer = await server.get(PATH)
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "This engine runs without a tokenizer.")


@pytest.mark.parametrize("kind", SERVERS)
async def test_one_that_cannot_be_written_is_not_offered(
    kind: type[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = kind(folder_of(tmp_path, "m", files_of("gpt-2")))
    install_engines(monkeypatch, server)

    def fails(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("a tokenizer's own code")

    monkeypatch.setattr(type(server.tokenizer), "save_pretrained", fails)
    answer = await server.get(PATH)
    assert answer.status_code == 404
    assert "a tokenizer's own code" in answer.json()["error"]["message"]
