"""What a tokenizer's files say of every text: how long a token can be, and where a text may be cut."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any, Final

NFC_SHRINKS: Final = 3
"""NFC makes at most three bytes one: a Hangul syllable of three letters, 9 bytes, has 3."""

PIECE_CHARACTERS: Final = 128 * 1024
"""Some 30 ms of a tokenizer's work, at 1 to 5 MB/s."""

# Patterns that begin a new word at each letter behind a line break. Llama 3 and tiktoken's encodings count digits in
# threes, Qwen singly.
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
KNOWN_PATTERNS: Final = frozenset({_WORDS, _WORDS.replace(r"\p{N}{1,3}", r"\p{N}")})

_CUT: Final = re.compile(r"(?<=[!-~]\n)(?=[A-Za-z])")
"""A single line break between ASCII: the known patterns end a word behind it, whatever comes later."""

Files = Mapping[str, Any]
"""`tokenizer.json`, decoded."""


def longest_token_bytes(files: Files) -> int | None:
    """The most bytes of text that one token can stand for; None if there is no bound.

    There is none if the tokenizer drops text, or has one token for all that it does not know.
    """
    model, shrinks = files["model"], _shrinks(files.get("normalizer"))
    if (
        model.get("type") != "BPE"
        or shrinks is None
        or any(token["lstrip"] or token["rstrip"] for token in _added(files))
    ):
        return None
    byte_level = _is_byte_level(files.get("pre_tokenizer"))
    if not byte_level and (not model.get("byte_fallback") or files.get("pre_tokenizer") is not None):
        return None
    if not _knows_all_bytes(model["vocab"], byte_level=byte_level):
        return None
    added = max((len(token["content"].encode()) for token in _added(files)), default=0)
    size = len if byte_level else _utf8_length  # byte-level tokens have one character for each byte
    return shrinks * max(added, max(map(size, model["vocab"]), default=0))


def may_cut(files: Files) -> bool:
    """Whether a text has the same ids if it is encoded in `pieces`."""
    normalizer = files.get("normalizer")
    return (
        files["model"].get("type") == "BPE"
        and (normalizer is None or normalizer.get("type") == "NFC")
        and _has_known_words(files.get("pre_tokenizer"))
        and not any("\n" in token["content"] or token["lstrip"] for token in _added(files))
    )


def pieces(text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """The text in pieces of at most `size` characters, cut where a known pattern cuts.

    A piece is longer if the text has no such place there.
    """
    begin = 0
    while len(text) - begin > size:
        cuts = [match.start() for match in _CUT.finditer(text, begin + size // 2, begin + size)]
        cut = cuts[-1] if cuts else None
        if cut is None:
            found = _CUT.search(text, begin + size)
            cut = found.start() if found else len(text)
        yield text[begin:cut]
        begin = cut
    if begin < len(text):
        yield text[begin:]


def _shrinks(normalizer: Files | None) -> int | None:
    """By how much a normalizer can shorten a text; None: without a bound."""
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
    parts = _parts(pre_tokenizer)
    keeps = all(part["type"] != "Split" or part["behavior"] != "Removed" for part in parts)
    known = all(part["type"] in {"Split", "Digits", "Punctuation", "ByteLevel"} for part in parts)
    return keeps and known and any(part["type"] == "ByteLevel" for part in parts)


def _has_known_words(pre_tokenizer: Files | None) -> bool:
    parts = _parts(pre_tokenizer)
    if not parts or parts[-1]["type"] != "ByteLevel" or parts[-1]["add_prefix_space"]:
        return False
    if len(parts) == 1:
        return bool(parts[0]["use_regex"])  # GPT-2's pattern
    split = parts[0]
    return (
        len(parts) == 2
        and not parts[1]["use_regex"]
        and split["type"] == "Split"
        and split["behavior"] == "Isolated"
        and not split["invert"]
        and split["pattern"].get("Regex") in KNOWN_PATTERNS
    )


def _parts(pre_tokenizer: Files | None) -> list[Files]:
    if pre_tokenizer is None:
        return []
    return list(pre_tokenizer["pretokenizers"]) if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]


def _added(files: Files) -> list[Files]:
    return list(files.get("added_tokens") or ())


def _utf8_length(token: str) -> int:
    return len(token.encode())
