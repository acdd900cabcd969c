"""Mistral's tekken.json, held against mistral-common's own encoding."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.tokenizer import Tokenizer

WORDS = ["he", "ll", "hell", "hello", " w", "or", " wor", "ld", " world", "th", "the", " the", "in", "\n\n"]
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL_TOKENS = 100

Theirs = MistralTokenizer[Any, Any, Any, Any, Any]


def _ranked(rank: int, token: bytes) -> dict[str, Any]:
    return {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as Mistral publishes them, with few words."""
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
    special = [
        {"rank": token["rank"], "token_str": str(getattr(token["token_str"], "value", token["token_str"]))}
        for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS
    ]
    content: dict[str, Any] = {
        "config": {
            "pattern": PATTERN, "num_vocab_tokens": len(tokens), "default_vocab_size": len(tokens) + SPECIAL_TOKENS,
            "default_num_special_tokens": SPECIAL_TOKENS, "version": "v7",
        },
        "vocab": [_ranked(i, token) for i, token in enumerate(tokens)],
        "special_tokens": [{**token, "is_control": True} for token in special],
    }  # fmt: skip
    path = tmp_path_factory.mktemp("model") / "tekken.json"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def ours(file: Path) -> Tokenizer:
    return load_tokenizer(str(file))


@pytest.fixture(scope="module")
def theirs(file: Path) -> Theirs:
    return MistralTokenizer.from_file(str(file))


TEXTS = st.text(st.sampled_from("helo wrdtin\n .,7é✓"), min_size=1, max_size=60)


@given(text=TEXTS)
def test_plain_prompts_have_mistrals_ids(ours: Tokenizer, theirs: Theirs, text: str) -> None:
    assert ours.encode(text) == theirs.instruct_tokenizer.tokenizer.encode(text, bos=True, eos=False)
    assert ours.decode(ours.encode(text, add_special_tokens=False)) == text


@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_chats_have_mistrals_ids(ours: Tokenizer, theirs: Theirs, texts: list[str]) -> None:
    roles = ["system", "user", "assistant", "user"] if len(texts) % 2 == 0 else ["user", "assistant", "user"]
    # mistral-common takes away the spaces at the end of an assistant's message; its template does not.
    messages: list[Any] = [{"role": role, "content": f"{text}."} for role, text in zip(roles, texts, strict=False)]
    wanted = theirs.encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens
    assert ours.encode_chat(messages) == wanted


def test_a_folder_with_both_files_is_read_as_engines_do(file: Path, tmp_path: Path) -> None:
    shipped = load_tokenizer("embedded")
    for name, content in shipped.files().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / file.name).write_bytes(file.read_bytes())
    assert load_tokenizer(str(tmp_path)).encode("hello") == shipped.encode("hello")


def test_a_broken_file_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"pip install 'plait\[mistral\]'"):
        load_tokenizer(str(tmp_path / "tekken.json"))
