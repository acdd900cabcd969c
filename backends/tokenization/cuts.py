"""Where a text may be cut, so that the ids of its parts make up the ids of the whole.

Whether a place is a cut depends only on the two or three characters around it. So texts with a common beginning have
the same cuts in it. docs/design/incremental-tokenization.md has the reasons.

Byte-level tokenizers split a text into words by the regular expressions below, none of which looks back before a word.
Each ends a word before a space that follows a character other than white space, and after a letter or digit that is
followed by a line break or by punctuation other than an apostrophe. The cuts rely on this, and their tests try every
short text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from plait.backends.tokenization.vocabulary import Files, added_tokens, normalizers, pre_tokenizers

_ENGLISH: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST: Final = r"[^\r\n\p{L}\p{N}]?"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
R50K: Final = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
"""GPT-2's, as tiktoken writes it."""

LLAMA_3: Final = rf"{_ENGLISH}|{_FIRST}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
CL100K: Final = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
QWEN_2: Final = rf"{_ENGLISH}|{_FIRST}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
QWEN_3_5: Final = rf"{_ENGLISH}|{_FIRST}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
O200K: Final = (
    rf"{_FIRST}{_UPPER}*{_LOWER}+{_ENGLISH}?|{_FIRST}{_UPPER}+{_LOWER}*{_ENGLISH}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
TEKKEN: Final = (
    rf"{_FIRST}{_UPPER}*{_LOWER}+|{_FIRST}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
"""Mistral's, since Nemo."""

DEEPSEEK: Final = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
"""The third of DeepSeek's patterns. The file has line breaks, not their escapes."""

WORDS: Final = frozenset({GPT2, R50K, LLAMA_3, CL100K, QWEN_2, QWEN_3_5, O200K, TEKKEN, DEEPSEEK})
RUNS: Final = frozenset({r"\p{N}", r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"})
"""Runs of digits, and of Chinese and Japanese, that some tokenizers split off first."""


BEFORE_SPACES: Final = re.compile(r"(?<=\S)(?= )")
"""Before a space that follows another character than white space."""

BETWEEN_WORDS: Final = re.compile(
    r"(?<=\S)(?= )|(?<=[0-9A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3])"
    r'(?=[\r\n",.;?<)}\u3001\u3002\uff0c\uff0e\uff01\uff1f\uff1a\uff1b\uff09\u300d\u300f\u3011\u300b])'
)
"""As `BEFORE_SPACES`, and after a letter or digit before a line break or some punctuation: marks that no special token
has after a letter.

So a message's last word ends before the `<` of the next token. The letters include those of Chinese, Japanese and
Korean, whose texts may have no spaces.
"""

_WINDOW_CHARACTERS: Final = 16 * 1024
"""How much is searched at a time: some 0.5 ms, during which the search has the GIL."""

_AHEAD_CHARACTERS: Final = 2
"""How far a pattern may look ahead of a place."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cuts of any text for one tokenizer. `place` is a pattern that matches the empty string at a cut.

    With `restores_space`, the tokenizer puts a space before each text, so a part is encoded without its leading space.
    """

    place: re.Pattern[str]
    restores_space: bool = False

    def to_encode(self, text: str, begin: int, end: int) -> str:
        """The text whose ids, by the tokenizer, are those of the part."""
        return text[begin + 1 if self.restores_space and begin else begin : end]

    def after(self, text: str, position: int) -> int:
        """The first cut at or after `position`, which is 1 or more; the end of the text if there is none."""
        while position < len(text):
            found = self.place.search(text, position, position + _WINDOW_CHARACTERS)
            if found:
                return found.start()
            position += _WINDOW_CHARACTERS - _AHEAD_CHARACTERS
        return len(text)


def find_cuts(files: Files) -> Cuts | None:
    """The cuts of a tokenizer's texts; None if none is known to be exact."""
    added = added_tokens(files)
    if files["model"].get("type") != "BPE" or files["model"].get("dropout"):
        return None
    if any(token["rstrip"] or token["single_word"] for token in added):
        return None  # such a token looks at or takes characters beside it, which may be on the other side of a cut
    contents = [token["content"] for token in added]
    return _cuts_of_byte_level(files, contents) or _cuts_of_marked_spaces(files, contents)


def cuts_of_words(pattern: str, added: Collection[str]) -> Cuts | None:
    """The cuts for one of the patterns above and the texts of the added tokens; None for another pattern."""
    if pattern not in WORDS:
        return None
    if not _any_has(BETWEEN_WORDS, added):
        return Cuts(BETWEEN_WORDS)
    return None if _any_has(BEFORE_SPACES, added) else Cuts(BEFORE_SPACES)


def _cuts_of_byte_level(files: Files, added: Collection[str]) -> Cuts | None:
    """The cuts of a tokenizer that splits by a known pattern and then merges bytes."""
    if any(part["type"] != "NFC" for part in normalizers(files)):
        return None
    parts = pre_tokenizers(files)
    if not parts or parts[-1]["type"] != "ByteLevel":
        return None
    *first, last = parts
    if last["add_prefix_space"]:
        # A text gets a space unless it has one, so each part has to begin with one.
        alone = not first and last["use_regex"] and not _any_has(BEFORE_SPACES, added)
        return Cuts(BEFORE_SPACES) if alone else None
    patterns = [_pattern(part) for part in first] + ([GPT2] if last["use_regex"] else [])
    if not all(pattern in WORDS | RUNS for pattern in patterns):
        return None
    words = next((pattern for pattern in patterns if pattern in WORDS), None)
    return None if words is None else cuts_of_words(words, added)


def _pattern(part: Files) -> str | None:
    """The pattern of a pre-tokenizer that splits off its pattern's matches as words; None for any other."""
    if part["type"] == "Digits":
        return r"\p{N}"
    if part["type"] != "Split" or (part["behavior"], part["invert"]) not in {("Isolated", False), ("Removed", True)}:
        return None
    found: str | None = part["pattern"].get("Regex")
    return found


def _cuts_of_marked_spaces(files: Files, added: Collection[str]) -> Cuts | None:
    """The cuts of a tokenizer of SentencePiece's kind, which replaces each space by a mark, usually U+2581."""
    found = _metaspace(files) or _replaced_spaces(files)
    if found is None or len(found.mark) != 1 or not (found.splits or _merges_stay_apart(files["model"], found.mark)):
        return None
    mark = re.escape(found.mark)
    if _any_has(re.compile(rf"[^\s{mark}][ {mark}]"), added):
        return None
    if not found.puts_first:
        return Cuts(re.compile(rf"(?<=[^\s{mark}])(?= )"))
    # A text that begins with an added token gets no space, and a text after an added token gets one more.
    begins, ends = ("".join(sorted({text[at] for text in added})) for at in (0, -1))
    if found.mark in begins or " " in begins:
        return None
    inside = rf"(?<=[^\s{mark}{re.escape(ends)}])(?= [^\s{mark}{re.escape(begins)}])"
    return Cuts(re.compile(inside), restores_space=True)


@dataclass(frozen=True, slots=True)
class _MarkedSpaces:
    """How a tokenizer marks spaces: whether it `splits` at marks, and whether it `puts_first` one before any text."""

    mark: str
    splits: bool
    puts_first: bool


def _metaspace(files: Files) -> _MarkedSpaces | None:
    """For a pre-tokenizer that marks spaces, and puts a mark before a text that does not begin with one."""
    parts = pre_tokenizers(files)
    if normalizers(files) or [part["type"] for part in parts] != ["Metaspace"]:
        return None
    return _MarkedSpaces(parts[0]["replacement"], parts[0]["split"], puts_first=False)


def _replaced_spaces(files: Files) -> _MarkedSpaces | None:
    """For normalizers that mark spaces, so that a pre-tokenizer which splits at spaces finds none."""
    *first, last = normalizers(files) or [{}]
    if last.get("type") != "Replace" or last["pattern"] != {"String": " "}:
        return None
    if not all(part["type"] == "Split" and part["pattern"] == {"String": " "} for part in pre_tokenizers(files)):
        return None
    mark: str = last["content"]
    if first not in ([], [{"type": "Prepend", "prepend": mark}]):
        return None
    return _MarkedSpaces(mark, splits=False, puts_first=bool(first))


def _merges_stay_apart(model: Files, mark: str) -> bool:
    """Whether no merge joins a mark to another character before it, so that words are merged by themselves."""
    if any(model.get(key) for key in ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")):
        return False
    return mark in model["vocab"] and not any(b[0] == mark and a[-1] != mark for a, b in model["merges"])


def _any_has(place: re.Pattern[str], added: Collection[str]) -> bool:
    """Whether an added token's text has such a place in it, as it is or normalized."""
    return any(place.search(form) for text in added for form in (text, unicodedata.normalize("NFC", text)))
