"""Small tokenizers of every kind that may be cut, trained here, because no package carries the real ones."""

from __future__ import annotations

import json
from base64 import b64encode
from functools import lru_cache
from pathlib import Path
from pydoc_data import topics
from typing import Any, Final

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from plait.backends.tokenization.cuts import DEEPSEEK, LLAMA_3, O200K, QWEN_2, QWEN_3_5, RUNS, TEKKEN
from plait.backends.tokenization.file_tokenizer import FileTokenizer

Json = dict[str, Any]

SPECIAL: Final = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
VOCABULARY_TOKENS: Final = 1_500
TEXT: Final = [topics.topics[name][:4_000] for name in sorted(topics.topics)[:40]] + [
    "Das Café öffnet um 7:30. Ça va? Здравствуй, мир. 你好\uff0c世界。今天天气很好。 こんにちは、世界。 한국어 문장."
] * 40


@lru_cache(maxsize=1)
def byte_level() -> Json:
    """GPT-2's kind: words by a pattern, merges of their bytes."""
    tokenizer = RawTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _trained(tokenizer, initial_alphabet=alphabet)


@lru_cache(maxsize=1)
def sentence_piece() -> Json:
    """SentencePiece's kind: a mark for each space, bytes for unknown characters."""
    tokenizer = RawTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    return _trained(tokenizer, extra=tuple(f"<0x{byte:02X}>" for byte in range(256)))


def _trained(tokenizer: RawTokenizer, extra: tuple[str, ...] = (), **options: Any) -> Json:
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS, special_tokens=[*SPECIAL, *extra], show_progress=False, **options
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    files: Json = json.loads(tokenizer.to_str())
    files["added_tokens"] = [token for token in files["added_tokens"] if token["content"] in SPECIAL]
    return files


def split_by(*patterns: str, behavior: str = "Isolated") -> Json:
    """A pre-tokenizer that splits by these patterns one after the other, and then maps bytes."""
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": behavior == "Removed"}
        for pattern in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, bytes_of(use_regex=False)]}


def bytes_of(*, use_regex: bool = True, add_prefix_space: bool = False) -> Json:
    """A pre-tokenizer that maps bytes."""
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": use_regex}


def metaspace(scheme: str, *, split: bool) -> Json:
    """SentencePiece's pre-tokenizer."""
    return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": split}


PREPEND: Final = {"type": "Prepend", "prepend": "\u2581"}
REPLACE: Final = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
GEMMA_SPLIT: Final = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}

VARIANTS: Final[dict[str, tuple[bool, Json]]] = {
    "gpt-2": (True, {}),
    "nfc": (True, {"normalizer": {"type": "NFC"}}),
    "prefix space": (True, {"pre_tokenizer": bytes_of(add_prefix_space=True)}),
    "starcoder": (
        True,
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_of()],
            }
        },
    ),
    "llama 3": (True, {"pre_tokenizer": split_by(LLAMA_3)}),
    "removed, inverted": (True, {"pre_tokenizer": split_by(LLAMA_3, behavior="Removed")}),
    "qwen 2": (True, {"pre_tokenizer": split_by(QWEN_2), "normalizer": {"type": "NFC"}}),
    "qwen 3.5": (True, {"pre_tokenizer": split_by(QWEN_3_5), "normalizer": {"type": "NFC"}}),
    "o200k": (True, {"pre_tokenizer": split_by(O200K)}),
    "tekken": (True, {"pre_tokenizer": split_by(TEKKEN)}),
    "deepseek": (
        True,
        {
            "pre_tokenizer": split_by(r"\p{N}{1,3}", *(run for run in RUNS if "\u4e00" in run), DEEPSEEK),
            "normalizer": {"type": "Sequence", "normalizers": []},
        },
    ),
    "llama 2, legacy": (
        False,
        {"normalizer": {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}, "pre_tokenizer": None},
    ),
    "llama 2": (False, {"pre_tokenizer": metaspace("first", split=False)}),
    "metaspace, split": (False, {"pre_tokenizer": metaspace("always", split=True)}),
    "metaspace, never": (False, {"pre_tokenizer": metaspace("never", split=True)}),
    "gemma": (False, {"normalizer": REPLACE, "pre_tokenizer": GEMMA_SPLIT}),
}
"""Whether a kind merges bytes, and what its files change."""


def files_of(variant: str) -> Json:
    """The decoded `tokenizer.json` of a variant."""
    merges_bytes, changes = VARIANTS[variant]
    return (byte_level() if merges_bytes else sentence_piece()) | changes


def raw(files: Json) -> RawTokenizer:
    """The library's own tokenizer."""
    return RawTokenizer.from_str(json.dumps(files))


def with_added(files: Json, *tokens: AddedToken) -> Json:
    """The files with more added tokens."""
    tokenizer = raw(files)
    tokenizer.add_tokens(list(tokens))
    changed: Json = json.loads(tokenizer.to_str())
    return changed


def rank_file(folder: Path, name: str) -> Path:
    """A file of tiktoken ranks for the encoding `name`, with the merges of `byte_level`."""
    decoder = {character: byte for byte, character in _characters().items()}
    tokens = sorted(byte_level()["model"]["vocab"].items(), key=lambda item: item[1])[len(SPECIAL) :]
    lines = [
        b"%b %d" % (b64encode(bytes(decoder[character] for character in token)), rank)
        for rank, (token, _) in enumerate(tokens)
    ]
    path = folder / f"{name}.tiktoken"
    path.write_bytes(b"\n".join(lines))
    return path


def _characters() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + number) for number, byte in enumerate(hidden)}


class Files(FileTokenizer):
    """A tokenizer without chats, which needs no transformers."""

    def _template(self, chat_template: str | None, tools: Any) -> str:
        raise NotImplementedError

    def _by_transformers(self, messages: Any, **options: Any) -> str:
        raise NotImplementedError
