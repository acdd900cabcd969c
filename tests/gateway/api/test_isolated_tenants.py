"""With `isolate_tenants`, no tenant learns from times what another one has sent, whatever the route."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator, Sequence

import pytest

from plait.backends.tokenization.file_tokenizer import FileTokenizer
from plait.gateway.calls.call_reader import PromptReader
from tests.gateway.api.fake_relay import CHAT, TEXT, Api, body_for

COUNT, EMBEDDINGS = "/v1/messages/count_tokens", "/v1/embeddings"
DOCUMENT = [{"role": "user", "content": "A line of a document that two tenants have.\n" * 250}]


@pytest.fixture
async def api(prompts: PromptReader) -> AsyncIterator[Api]:
    api = Api(prompts, "one", "two", isolate_tenants=True)
    api.router.health.answered("a", {"m": 10_000})
    yield api
    await api.http.aclose()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The characters that were tokenized, not found in the cache of known beginnings."""
    counted: list[int] = []
    encode_array, encode_parts = FileTokenizer.encode_array, FileTokenizer.encode_parts

    def counting(tokenizer: FileTokenizer, text: str, **options: bool) -> array[int]:
        counted.append(len(text))
        return encode_array(tokenizer, text, **options)

    def counting_parts(tokenizer: FileTokenizer, texts: Sequence[str]) -> list[array[int]]:
        counted.append(sum(map(len, texts)))
        return encode_parts(tokenizer, texts)

    monkeypatch.setattr(FileTokenizer, "encode_array", counting)
    monkeypatch.setattr(FileTokenizer, "encode_parts", counting_parts)
    return counted


def bearer(key: str) -> str:
    return f"Bearer {key}"


async def test_a_prefix_is_found_by_its_tenant_only(api: Api) -> None:
    hashes = []
    for key, salt in (("one", None), ("one", None), ("two", None), ("one", "mine"), ("two", "mine")):
        body = {"prompt": list(range(64)), "cache_salt": salt}
        asked = await api.asked(TEXT, body, authorization=bearer(key))
        hashes.append(asked.call.block_hashes[0])
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4


@pytest.mark.parametrize("first", [COUNT, CHAT])
async def test_what_another_tenant_has_sent_is_tokenized_anew(api: Api, encoded: list[int], first: str) -> None:
    characters = []
    for path, key in ((first, "one"), (COUNT, "two"), (COUNT, "two"), (first, "one")):
        encoded.clear()
        messages = [{**DOCUMENT[0], "content": first + DOCUMENT[0]["content"]}]
        assert (await api.post(path, {"messages": messages}, authorization=bearer(key))).status_code == 200
        characters.append(sum(encoded))
    whole = len(DOCUMENT[0]["content"])
    assert characters[0] > whole < characters[1], "the second tenant finds nothing of the first one's"
    assert max(characters[2:]) < whole / 2, "each finds its own"


async def test_engines_separate_embedded_texts_too(api: Api) -> None:
    salts = []
    for key, salt in (("one", {}), ("two", {}), ("two", {"cache_salt": "mine"})):
        asked = await api.asked(EMBEDDINGS, {"input": "x", **salt}, authorization=bearer(key))
        sent = json.loads(body_for(asked, "vllm"))
        salts.append(sent.pop("cache_salt"))
        assert sent == {"model": "m", "input": "x"}
    assert salts[0] == salts[0].strip() != ""
    assert salts[0] != salts[1]
    assert salts[2] == f"{salts[1]}:mine"


async def test_what_engines_do_not_compute_goes_as_it_came(api: Api) -> None:
    asked = await api.asked("/tokenize", {"prompt": "x"}, authorization=bearer("one"))
    sent = body_for(asked, "vllm")
    assert sent == b'{"model": "m", "prompt": "x"}'


@pytest.mark.parametrize("fields", [{}, {"/v1/messages": {"model", "cache_salt"}}, {"/v1/messages": {"model"}}])
async def test_a_route_of_an_engine_separates_tenants_or_is_not_taken(api: Api, fields: dict[str, set[str]]) -> None:
    api.router.health.answered("a", {"m": 10_000}, routes={"/v1/messages"}, fields=fields)
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    response = await api.post("/v1/messages", body, authorization=bearer("one"))
    asked = api.relay.deliveries[-1]
    takes = "cache_salt" in fields.get("/v1/messages", {"cache_salt"})
    assert (asked.path, response.status_code) == (("/v1/messages", 200) if takes else (CHAT, 502))
    assert json.loads(body_for(asked))["cache_salt"]
    tool = {"type": "web_search_20250305", "name": "web_search"}
    response = await api.post(
        "/v1/messages", {**body, "tools": [tool], "tool_choice": {"type": "any"}}, authorization=bearer("one")
    )
    assert response.status_code == (200 if takes else 400)
    assert takes or "/v1/messages of an engine takes no 'cache_salt'" in response.json()["error"]["message"]
