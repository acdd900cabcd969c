"""What the embedded engine serves beside completions, in vLLM's shapes: vectors, tokens, and what describes it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from importlib.metadata import version
from math import isclose
from typing import Any

import pytest
from openai import AsyncOpenAI

from plait.lab.embedded.beside_chat import DIMENSIONS, embedding, transcript
from plait.lab.embedded.prompts import PICTURE_TOKENS
from tests.lab.embedded.served_engine import Served, sdk_transport, serving

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(tokenizer="embedded") as served:
        yield served


async def post(served: Served, path: str, **body: Any) -> Any:
    response = await served.post(path, **body)
    assert response.status_code == 200, response.text
    return response.json()


# Embeddings, scores, ranks.


async def test_embeddings_through_openais_client(served: Served) -> None:
    async with sdk_transport(served) as http:
        client = AsyncOpenAI(api_key="none", base_url="http://engine/v1", http_client=http)
        as_base64 = await client.embeddings.create(model="m", input=["a cat", "a dog"])
        as_floats = await client.embeddings.create(model="m", input=["a cat", "a dog"], encoding_format="float")
    assert [item.index for item in as_floats.data] == [0, 1]
    for packed, plain in zip(as_base64.data, as_floats.data, strict=True):
        assert len(plain.embedding) == DIMENSIONS
        assert packed.embedding == pytest.approx(plain.embedding)
        assert isclose(sum(value**2 for value in plain.embedding), 1)
    assert as_floats.usage.prompt_tokens == as_floats.usage.total_tokens > 2


async def test_equal_inputs_have_equal_vectors_in_every_form(served: Served) -> None:
    tokens = (await post(served, "/tokenize", prompt="a cat"))["tokens"]
    for given in ("a cat", ["a cat"], tokens, [tokens]):
        body = await post(served, "/v1/embeddings", input=given, dimensions=8)
        assert len(body["data"][0]["embedding"]) == 8
        assert body["data"] == (await post(served, "/v1/embeddings", input="a cat", dimensions=8))["data"]
        assert body["usage"]["prompt_tokens"] == len(tokens)


async def test_shared_words_are_near(served: Served) -> None:
    others = ["the cat sat on a mat", "prices rose sharply again", "the cat sat on the mat"]
    scored = await post(served, "/score", text_1="the cat sat on the mat", text_2=others)
    near, far, same = (item["score"] for item in scored["data"])
    assert far < 0.5 < near < same
    assert same == pytest.approx(1)
    ranked = await post(served, "/v1/rerank", query="the cat sat on the mat", documents=others, top_n=2)
    assert [result["index"] for result in ranked["results"]] == [2, 0]
    assert ranked["results"][0]["document"]["text"] == others[2]
    assert ranked["results"][0]["relevance_score"] == pytest.approx(1)


async def test_pairs_are_scored_each_with_its_own(served: Served) -> None:
    body = await post(served, "/v1/score", text_1=["a", "b"], text_2=["a", "b"])
    assert [item["score"] for item in body["data"]] == [pytest.approx(1), pytest.approx(1)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "dimensions": 9_999}, "dimensions"),
        ("/v1/embeddings", {"input": "x " * 9_000}, "input"),
        ("/rerank", {"query": "x"}, "documents"),
        ("/rerank", {"query": "x", "documents": []}, "documents"),
        ("/rerank", {"query": 3, "documents": ["x"]}, "query"),
        ("/score", {"text_1": "x"}, "text_2"),
        ("/score", {"text_1": ["x", "y"], "text_2": "x"}, "text_1"),
        ("/tokenize", {}, "messages"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_what_they_refuse(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    response = await served.post(path, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", {"input": "x"}), ("/score", {"text_1": "x", "text_2": "x"}), ("/tokenize", {"prompt": "x"})],
)
async def test_the_model_is_that_which_is_served(served: Served, path: str, body: dict[str, Any]) -> None:
    assert (await served.post(path, **body, model="other")).status_code == 404
    assert (await served.http.post(path, json=body)).status_code == 200
    assert (await served.post(path, **body, model="default")).status_code == 200


def test_a_vector_has_a_length_in_few_dimensions_too() -> None:
    for token in range(200):
        assert isclose(sum(value**2 for value in embedding([token], 1)), 1)


# Tokens.


async def test_tokens_of_a_prompt_and_back(served: Served) -> None:
    body = await post(served, "/tokenize", prompt="a cat", return_token_strs=True)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert "".join(body["token_strs"]) == "a cat"
    assert body["max_model_len"] == 4_000
    assert await post(served, "/detokenize", tokens=body["tokens"]) == {"prompt": "a cat"}


async def test_tokens_of_a_chat_are_those_of_its_prompt(served: Served) -> None:
    messages = [{"role": "user", "content": "a cat"}]
    body = await post(served, "/tokenize", messages=messages)
    answered = await served.chat("a cat", max_tokens=1)
    assert body["count"] == answered["usage"]["prompt_tokens"]
    assert body["token_strs"] is None


# JSON and pictures in completions.


async def test_json_fits_its_schema(served: Served) -> None:
    wish: Any = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
    chat = await served.chat(**wish)
    assert json.loads(chat["choices"][0]["message"]["content"]) == {"a": 1}
    assert chat["choices"][0]["finish_reason"] == "stop"
    text = await served.complete(**wish)
    assert json.loads(text["choices"][0]["text"]) == {"a": 1}


async def test_any_json_object_and_any_text(served: Served) -> None:
    chat = await served.chat(response_format={"type": "json_object"})
    assert isinstance(json.loads(chat["choices"][0]["message"]["content"]), dict)
    chat = await served.chat(response_format={"type": "text"})
    assert chat["choices"][0]["message"]["content"].startswith("This is emulated text.")


@pytest.mark.parametrize(
    "form", [{"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "n"}}, {"type": "x"}, "json"]
)
async def test_a_malformed_format_is_refused(served: Served, form: Any) -> None:
    response = await served.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], response_format=form
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


async def test_a_picture_takes_its_tokens_and_shares_no_prefix_with_another(served: Served) -> None:
    async def usage(picture: Any) -> Any:
        content = [{"type": "text", "text": "this"}, picture]
        answer = await post(
            served, "/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=1
        )
        return answer["usage"]

    first, again = await usage(PICTURE), await usage(PICTURE)
    assert PICTURE_TOKENS < first["prompt_tokens"] < PICTURE_TOKENS + 30
    assert again["prompt_tokens_details"]["cached_tokens"] > PICTURE_TOKENS - 16
    other = await usage({"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}})
    assert other["prompt_tokens"] == first["prompt_tokens"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


async def test_what_is_neither_text_nor_picture_is_refused(served: Served) -> None:
    content = [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]
    response = await served.post("/v1/chat/completions", messages=[{"role": "user", "content": content}])
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "messages[0].content", None)


# Classes, images, audio.


async def test_each_input_has_a_class_and_a_vector(served: Served) -> None:
    classes = await post(served, "/classify", input=["a cat", "a dog"])
    assert [sum(item["probs"]) for item in classes["data"]] == [pytest.approx(1)] * 2
    vectors = await post(served, "/pooling", input=["a cat", "a dog"])
    assert [item["data"] for item in vectors["data"]] != [vectors["data"][0]["data"]] * 2
    assert vectors["usage"]["total_tokens"] == classes["usage"]["total_tokens"]


async def test_media_through_openais_client(served: Served) -> None:
    async with sdk_transport(served) as http:
        client = AsyncOpenAI(api_key="none", base_url="http://engine/v1", http_client=http)
        judged = await client.moderations.create(model="m", input=["a", "b"])
        images = await client.images.generate(model="m", prompt="a cat", n=2)
        edited = await client.images.edit(model="m", prompt="a dog", image=b"\x89PNG")
        speech = await client.audio.speech.create(model="m", voice="alloy", input="hello")
        heard = await client.audio.transcriptions.create(model="m", file=("a.wav", speech.content))
    assert [result.flagged for result in judged.results] == [False, False]
    assert [len(found.data or []) for found in (images, edited)] == [2, 1]
    assert speech.content.startswith(b"RIFF")
    assert heard.text == transcript(speech.content)


@pytest.mark.parametrize("count", [0, 11])
async def test_so_many_images_are_refused(served: Served, count: int) -> None:
    response = await served.post("/v1/images/generations", prompt="a cat", n=count)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


async def test_a_transcript_needs_a_file(served: Served) -> None:
    response = await served.http.post("/v1/audio/transcriptions", data={"model": "m", "file": "text"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "file")


# What describes the engine.


async def test_what_describes_the_engine(served: Served) -> None:
    assert (await served.http.get("/version")).json() == {"version": version("plait")}
    assert (await served.http.get("/load")).json() == {"server_load": 0}
    assert (await served.http.get("/ping")).status_code == (await served.http.post("/ping")).status_code == 200


async def test_the_list_of_its_routes(served: Served) -> None:
    body = (await served.http.get("/openapi.json")).json()
    paths = {path: set(methods) for path, methods in body["paths"].items()}
    posts = {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/tokenize", "/detokenize",
        "/call_objectives", "/classify", "/v1/classify", "/pooling", "/v1/moderations", "/v1/images/generations",
        "/v1/images/edits", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations",
    }  # fmt: skip
    gets = {"/v1/models", "/cache_state", "/plait/tokenizer", "/version", "/load", "/health", "/metrics"}
    assert paths == {path: {"post"} for path in posts} | {path: {"get"} for path in gets} | {"/ping": {"get", "post"}}
    assert body["openapi"].startswith("3.")
