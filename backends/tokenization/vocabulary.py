"""Bounds that a tokenizer's files give for any text: how long a token can be, and the ids around a prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import Any, Final

NFC_SHRINKS: Final = 3
"""NFC makes at most three bytes one: a Hangul syllable of three letters, 9 bytes, has 3."""

Files = Mapping[str, Any]
"""`tokenizer.json`, decoded."""


def longest_token_bytes(files: Files) -> int | None:
    """The most bytes of text in one token. None (no bound) if the tokenizer drops text or has an unknown token."""
    model, shrinks = files["model"], _shrinks(files.get("normalizer"))
    if (
        model.get("type") != "BPE"
        or shrinks is None
        or any(token["lstrip"] or token["rstrip"] for token in added_tokens(files))
    ):
        return None
    byte_level = _is_byte_level(files.get("pre_tokenizer"))
    if not byte_level and (not model.get("byte_fallback") or files.get("pre_tokenizer") is not None):
        return None
    if not _knows_all_bytes(model["vocab"], byte_level=byte_level):
        return None
    added = max((len(token["content"].encode()) for token in added_tokens(files)), default=0)
    size = len if byte_level else _utf8_length  # byte-level tokens have one character for each byte
    return shrinks * max(added, max(map(size, model["vocab"]), default=0))


def ids_around(files: Files) -> tuple[list[int], list[int]] | None:
    """The ids before and after each prompt, such as a BOS; None if they are not known."""
    before: list[int] = []
    after: list[int] = []
    for processor in _listed(files.get("post_processor"), "processors"):
        if processor["type"] == "TemplateProcessing":
            ids = [_ids_of(part, processor["special_tokens"]) for part in processor["single"]]
            if ids.count(None) != 1:
                return None
            prompt = ids.index(None)
            before = [token for part in ids[:prompt] for token in part or ()] + before
            after += [token for part in ids[prompt + 1 :] for token in part or ()]
        elif processor["type"] != "ByteLevel":
            return None
    return before, after


def _ids_of(part: Files, special_tokens: Files) -> list[int] | None:
    """The ids of a template's part; None for the prompt itself."""
    return list(special_tokens[part["SpecialToken"]["id"]]["ids"]) if "SpecialToken" in part else None


def _shrinks(normalizer: Files | None) -> int | None:
    """The factor by which a normalizer can shorten a text; None: no bound."""
    kind = None if normalizer is None else normalizer["type"]
    if normalizer is None or kind == "Prepend":
        return 1
    if kind == "NFC":
        return NFC_SHRINKS
    if kind == "Sequence":
        factors = [_shrinks(part) for part in normalizer["normalizers"]]
        return None if None in factors else prod(factor for factor in factors if factor is not None)
    replaced = normalizer.get("pattern", {}).get("String") if kind == "Replace" else None
    return 1 if replaced is not None and len(normalizer["content"].encode()) >= len(replaced.encode()) else None


def _knows_all_bytes(vocabulary: Collection[str], *, byte_level: bool) -> bool:
    """Whether any text has tokens, so that none is dropped."""
    if byte_level:
        return sum(len(token) == 1 for token in vocabulary) >= 256
    return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _is_byte_level(pre_tokenizer: Files | None) -> bool:
    """Whether words become bytes, and no text is dropped on the way."""
    parts = _listed(pre_tokenizer, "pretokenizers")
    keeps = all(part["type"] != "Split" or part["behavior"] != "Removed" for part in parts)
    known = all(part["type"] in {"Split", "Digits", "Punctuation", "ByteLevel"} for part in parts)
    return keeps and known and any(part["type"] == "ByteLevel" for part in parts)


def pre_tokenizers(files: Files) -> list[Files]:
    return _listed(files.get("pre_tokenizer"), "pretokenizers")


def normalizers(files: Files) -> list[Files]:
    return _listed(files.get("normalizer"), "normalizers")


def added_tokens(files: Files) -> list[Files]:
    """The tokens that the tokenizer cuts out of a text first, including special tokens."""
    return list(files.get("added_tokens") or ())


def _listed(step: Files | None, key: str) -> list[Files]:
    """A step of the tokenizer as a list: a `Sequence` has its steps under `key`."""
    if step is None:
        return []
    return list(step[key]) if step["type"] == "Sequence" else [step]


def _utf8_length(token: str) -> int:
    return len(token.encode())
