"""The ids of words, so that a tokenizer encodes only those that it has not met.

Words repeat: of the words of new prose, most have come before. A word is what stands between two cuts of a text
(`cuts`), so the ids of a text are those of its words in a row. docs/design/incremental-tokenization.md has the reasons.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from re import Pattern
from typing import Final

from plait.backends.tokenization.tokenizer import Tokenizer

KEPT_CHARACTERS: Final = 128
"""Of a word. Longer ones hardly come again."""

DEAREST_SHARE: Final = 3 / 8
"""Of a text's words. If more are new, the whole text takes the tokenizer less time: a word alone takes 4 us, one in a
text 1.5 us (measured)."""

LEARNED_SHARE: Final = 1 / 32
"""Of the words of such a text, so that the next one has fewer new words."""

_ENTRY_BYTES: Final = 70
"""Of a word besides its text and ids: its place in the table (measured: 40 to 100, as the table grows)."""


@dataclass(slots=True)
class _Words:
    """The words of one tokenizer and salt, in two generations. Words of the older one that are met again move."""

    young: dict[str, bytes] = field(default_factory=dict)
    old: dict[str, bytes] = field(default_factory=dict)
    young_bytes: int = 0
    old_bytes: int = 0


class WordMemo:
    """Ids of words in `max_bytes` of memory, apart for each tokenizer and cache salt; safe to call from many threads.

    If it is full, a tokenizer's words of a salt that was not used for longest are forgotten, or the older half of all.
    """

    def __init__(self, max_bytes: int) -> None:
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._words: OrderedDict[Hashable, _Words] = OrderedDict()
        self._common: dict[Tokenizer, Mapping[str, bytes]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        words = sum(len(one.young) + len(one.old) for one in self._words.values())
        return f"WordMemo({words} words, {self.held_bytes} of {self._max_bytes} bytes)"

    def prepare(self, tokenizer: Tokenizer) -> None:
        """Have the ids of a tokenizer's common words. They tell nothing of prompts, so any salt may know them."""
        if tokenizer.cuts is not None and tokenizer.cuts.words is not None:
            self._common[tokenizer] = tokenizer.common_words

    def ids(self, text: str, tokenizer: Tokenizer, pattern: Pattern[str], salt: Hashable) -> array[int]:
        """The ids of a text without special tokens around it. `pattern` is that of the tokenizer's cuts.

        Raises what `Tokenizer.encode` raises.
        """
        key = (tokenizer, salt)
        known = self._words.get(key)
        if known is None:
            with self._lock:
                known = self._words.setdefault(key, _Words())
        words = pattern.findall(text)
        ids = list(map(known.young.get, words))
        if None not in ids:
            return array("I", b"".join(ids))  # type: ignore[arg-type]
        old, common = known.old, self._common.get(tokenizer, {})
        lacking = {
            word: old.get(word) or common.get(word, b"") for word, its in zip(words, ids, strict=True) if its is None
        }
        new = [word for word in lacking if not lacking[word]]
        is_whole = len(new) > max(1, len(words) * DEAREST_SHARE)
        if is_whole:
            step = -(-len(new) // (2 + int(len(words) * LEARNED_SHARE)))
            new = new[::step]  # from all of the text: its begin may be new each time
        lacking.update(zip(new, map(array.tobytes, tokenizer.encode_parts(new)), strict=True))
        self._keep(key, lacking)
        if is_whole:
            return tokenizer.encode_array(text, add_special_tokens=False)
        return array(
            "I", b"".join([lacking[word] if its is None else its for word, its in zip(words, ids, strict=True)])
        )

    def _keep(self, key: Hashable, found: dict[str, bytes]) -> None:
        with self._lock:
            known = self._words.setdefault(key, _Words())
            self._words.move_to_end(key)
            for word, ids in found.items():
                if ids and len(word) <= KEPT_CHARACTERS and word not in known.young:
                    known.young[word] = ids
                    size = sys.getsizeof(word) + sys.getsizeof(ids) + _ENTRY_BYTES
                    known.young_bytes += size
                    self.held_bytes += size
            while known.young_bytes > self._max_bytes / 2 or self.held_bytes > self._max_bytes:
                if known.young_bytes <= self._max_bytes / 2 and len(self._words) > 1:
                    _, forgotten = self._words.popitem(last=False)
                    self.held_bytes -= forgotten.young_bytes + forgotten.old_bytes
                else:
                    self.held_bytes -= known.old_bytes
                    known.old, known.old_bytes = known.young, known.young_bytes
                    known.young, known.young_bytes = {}, 0
