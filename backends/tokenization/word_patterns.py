"""The regular expressions by which byte-level tokenizers split a text into words.

None of them looks behind a word's begin. Each ends a word before a space that follows another character than white
space, and behind a letter or digit that comes before punctuation other than an apostrophe, or before a line break.
`cuts` relies on this, and its tests try every short text.
"""

from __future__ import annotations

from typing import Final

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
"""DeepSeek's third. Its file has the line breaks themselves, not their escapes."""

WORDS: Final = frozenset({GPT2, R50K, LLAMA_3, CL100K, QWEN_2, QWEN_3_5, O200K, TEKKEN, DEEPSEEK})
RUNS: Final = frozenset({r"\p{N}", r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"})
"""Runs of digits, and of Chinese and Japanese, that some tokenizers split off first."""
