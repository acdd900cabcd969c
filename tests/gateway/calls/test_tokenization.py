"""What is refused before it is tokenized."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from plait.backends.errors import CallerError, ContextLengthError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.backends.tokenization.file_tokenizer import FileTokenizer
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.calls.call_reader import PromptReader
from plait.gateway.config.sections import Config, ModelConfig
from plait.gateway.config.server import ServerConfig
from plait.policy.prefix.block_hash import chain, root_hash
from tests.gateway.calls.tokenizing import read

MODELS = (ModelConfig(name="m", tokenizer="embedded"), ModelConfig(name="bytes", tokenizer="bytes"))
READER = PromptReader(Config(models=MODELS), 64)
LONGEST = load_tokenizer("embedded").longest_token_bytes
CHAT = [{"role": "user", "content": "hello"}]


def text(prompt: str, model: str = "m") -> CompletionRequest:
    return CompletionRequest(model=model, prompt=prompt)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that were tokenized."""
    lengths: list[int] = []
    tokenizer = READER.tokenizers.encoder("m").tokenizer
    encode = tokenizer.encode_array

    def counting(text: str, *, add_special_tokens: bool = True) -> array[int]:
        lengths.append(len(text))
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_array", counting)
    return lengths


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the parts that were tokenized."""
    lengths: list[int] = []
    encode_array, encode_parts = FileTokenizer.encode_array, FileTokenizer.encode_parts

    def counting(tokenizer: FileTokenizer, text: str, **options: bool) -> array[int]:
        lengths.append(len(text))
        return encode_array(tokenizer, text, **options)

    def counting_parts(tokenizer: FileTokenizer, texts: Sequence[str]) -> list[array[int]]:
        lengths.append(sum(map(len, texts)))
        return encode_parts(tokenizer, texts)

    monkeypatch.setattr(FileTokenizer, "encode_array", counting)
    monkeypatch.setattr(FileTokenizer, "encode_parts", counting_parts)
    return lengths


@pytest.mark.parametrize("character", ["a", "é", "☔"])
def test_a_prompt_whose_bytes_cannot_fit_is_not_tokenized(character: str, encoded: list[int]) -> None:
    assert LONGEST is not None
    fits = 10 * LONGEST // len(character.encode())
    assert read(READER, text(character * fits), None, 10).tokens
    encoded.clear()
    with pytest.raises(ContextLengthError, match=f"{10 * LONGEST} bytes fit at most") as caught:
        read(READER, text(character * (fits + 1)), None, 10)
    assert (caught.value.param, caught.value.code, encoded) == ("prompt", "context_length_exceeded", [])


def test_the_template_counts_too(encoded: list[int]) -> None:
    chat = ChatRequest(model="m", messages=[{"role": "user", "content": "a" * 1_000}])
    with pytest.raises(ContextLengthError) as caught:
        read(READER, chat, None, 10)
    assert (caught.value.param, encoded) == ("messages", [])


def test_nothing_is_refused_by_bytes_if_the_engine_counts_otherwise() -> None:
    assert read(READER, text("a" * 1_000, "bytes"), None, 10).tokens == 1_000
    assert read(READER, text("a" * 100_000), None, None).tokens


def test_a_long_prompt_is_tokenized_in_turns() -> None:
    prompt = "A line of text.\n" * 40_000
    turns = list(READER.steps(text(prompt), None))
    assert len(turns) >= len(prompt) // (128 * 1024)
    tokenizer: Tokenizer = READER.tokenizers.encoder("m").tokenizer
    assert list(read(READER, text(prompt), None).prompts[0]) == tokenizer.encode(prompt)


DOCUMENT = "A line of a document that two tenants have.\n" * 2_000


@pytest.mark.parametrize(("salts", "again"), [((None, None), False), (("one", "one"), False), (("one", "two"), True)])
def test_a_shared_document_is_tokenized_once_for_each_salt(
    salts: tuple[str | None, str | None], again: bool, parts: list[int]
) -> None:
    reader = PromptReader(Config(models=MODELS), 64)
    for number, salt in enumerate(salts):
        parts.clear()
        request = ChatRequest(model="m", messages=[{"role": "user", "content": f"{DOCUMENT}Question {number}"}])
        prompt = read(reader, request, salt)
        ids = load_tokenizer("embedded").encode_chat(request.messages)
        assert list(prompt.prompts[0]) == ids
        assert prompt.block_hashes == chain(ids, 64, root_hash("m", salt or ""))
    assert (sum(parts) > len(DOCUMENT)) == again


def test_the_hashes_of_several_prompts_are_those_of_the_first() -> None:
    request = CompletionRequest(model="m", prompt=[f"One. {DOCUMENT}", f"Two. {DOCUMENT}"])
    prompt = read(READER, request, None)
    ids = [load_tokenizer("embedded").encode(text) for text in request.prompts() if isinstance(text, str)]
    assert [list(prompt) for prompt in prompt.prompts] == ids
    assert prompt.block_hashes == chain(ids[0], 64, root_hash("m"))


def test_a_template_of_the_requests_own_needs_trust() -> None:
    request = ChatRequest(model="m", messages=CHAT, chat_template="{{ messages[0].content }}")
    with pytest.raises(CallerError, match="trust_request_chat_template") as caught:
        read(READER, request, None)
    assert caught.value.param == "chat_template"
    trusting = PromptReader(Config(server=ServerConfig(trust_request_chat_template=True), models=MODELS), 64)
    trusting.tokenizers.open()
    try:
        assert list(read(trusting, request, None).prompts[0]) == load_tokenizer("embedded").encode("hello")
    finally:
        trusting.tokenizers.close()


def test_an_adapter_has_the_tokenizer_of_its_base_model_and_prefixes_of_its_own() -> None:
    reader = PromptReader(Config(models=MODELS), 64, lambda name: "m" if name == "adapter" else name)
    ids = list(range(64))
    text = "a word " * 40
    base, adapted = (read(reader, CompletionRequest(model=name, prompt=text), None) for name in ("m", "adapter"))
    assert adapted.exact
    assert (adapted.prompts, adapted.tokens) == (base.prompts, base.tokens)
    assert list(adapted.block_hashes) != list(base.block_hashes)
    assert list(read(reader, CompletionRequest(model="adapter", prompt=ids), None).block_hashes) == list(
        chain(ids, 64, root_hash("adapter"))
    )


def test_what_is_known_of_a_models_tokenizer() -> None:
    tokenizers = PromptReader(Config(models=(*MODELS, ModelConfig(name="later"))), 64).tokenizers
    known = tokenizers.exact("m")
    assert known is not None
    assert (tokenizers.fingerprint("m"), tokenizers.lacks("m"), tokenizers.chat_template("m")) == (
        known.fingerprint,
        False,
        None,
    )
    assert (tokenizers.exact("later"), tokenizers.lacks("later")) == (None, True)
    assert tokenizers.fingerprint("later") not in (None, known.fingerprint), "it agrees with no engine's"
    tokenizers.learn("later", "embedded", load_tokenizer("embedded"), None)
    assert (tokenizers.lacks("later"), tokenizers.fingerprint("later")) == (False, known.fingerprint)
    tokenizers.close()


def test_the_tokenizer_of_a_model_renders_its_requests_templates() -> None:
    config = Config(models=MODELS[:1], server=ServerConfig(trust_request_chat_template=True))
    tokenizers = PromptReader(config, 64).tokenizers
    first = tokenizers.worker("m")
    assert tokenizers.worker("m") is first
    tokenizers.learn("m", "embedded", load_tokenizer("embedded"), None)
    assert tokenizers.worker("m") is not first, "the new tokenizer has other templates"
    tokenizers.close()


ODD: list[list[dict[str, object]]] = [
    [{"role": "user", "content": "x"}, {"role": "function", "name": "f", "content": "r"}],
    [{"role": "user", "content": {"a": 1}}],
    [{"role": "assistant", "tool_calls": "none"}],
    [],
]


@pytest.mark.parametrize("messages", ODD)
def test_a_template_that_is_a_guess_refuses_nothing(messages: list[dict[str, object]]) -> None:
    assert (tokens_of("bytes", messages), tokens_of("unknown", messages)) == (0, 0)
    with pytest.raises(CallerError):
        tokens_of("m", messages)


def tokens_of(model: str, messages: list[dict[str, object]]) -> int:
    """The tokens of a chat."""
    return read(READER, ChatRequest(model=model, messages=messages), None).tokens
