"""Encodes prompts: the token ids, and the chained hashes of tree blocks. Known beginnings are not encoded again.

Their ids and hashes are kept part by part, and behind them the ids of words: of the words of new prose, most have come
before. A word is what stands between two cuts of a text (`cuts`), so the ids of a text are those of its words in a row.
docs/design/incremental-tokenization.md has the reasons.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from operator import not_
from re import Pattern
from typing import Final, NamedTuple

from plait.backends.errors import CallerError
from plait.backends.tokenization.cuts import Cuts
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.policy.prefix.block_hash import extend_chain

_PART_BYTES: Final = 570
"""Of a part besides its text, ids and hashes: its objects and its place in the table (measured)."""

_CHARACTERS_PER_BYTE: Final = 1 / 16
"""A prompt of that share takes a sixth of the cache, at 2.5 bytes a character. A longer one is not worth all others."""

Key = tuple[Hashable, str]
"""A part in its place: the number of the part before it, or the scope of a prompt's first part; and its text."""


class Part(NamedTuple):
    """`ids` are those of the part's text, `hashes` those of the tree blocks that end in it."""

    key: Key
    number: int
    ids: array[int]
    hashes: array[int]
    size_bytes: int


class PartCache:
    """Parts in `max_bytes` of memory, the least recently used evicted first; safe to call from several threads.

    Keys hold the texts themselves, so no two texts can be taken for each other. A part's number is never given again,
    so nothing is found behind a part that was evicted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: OrderedDict[Key, Part] = OrderedDict()
        self._followers: dict[Hashable, Part] = {}
        self._numbers = count()
        self._lock = threading.Lock()
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"PartCache({len(self._parts)} parts, {self.held_bytes} of {self._max_bytes} bytes)"

    def takes(self, text: str) -> bool:
        """Whether a prompt is short enough to be kept."""
        return len(text) <= self._max_bytes * _CHARACTERS_PER_BYTE

    def get(self, key: Key) -> Part | None:
        """The part, if it is there."""
        return self._parts.get(key)

    def follower(self, before: Hashable) -> Part | None:
        """The part that was used last behind another, or first in a scope. `before` is the first of its key."""
        return self._followers.get(before)

    def put(self, key: Key, ids: array[int], hashes: array[int]) -> Part:
        """Keep a part; the one that is there already stays."""
        size = sys.getsizeof(key[1]) + 4 * len(ids) + 8 * len(hashes) + _PART_BYTES
        with self._lock:
            part = self._parts.get(key)
            if part is None:
                part = Part(key, next(self._numbers), ids, hashes, size)
                self._keep(part)
        return part

    def used(self, path: Sequence[Part]) -> None:
        """Mark a prompt's parts as used, given from its first on. A part is evicted before the part that it follows."""
        with self._lock:
            for part in reversed(path):
                if part.key in self._parts:
                    self._parts.move_to_end(part.key)
                    self._followers[part.key[0]] = part

    def _keep(self, part: Part) -> None:
        self._parts[part.key] = part
        self.held_bytes += part.size_bytes
        while self.held_bytes > self._max_bytes:
            key, evicted = self._parts.popitem(last=False)
            self.held_bytes -= evicted.size_bytes
            if self._followers.get(key[0]) is evicted:
                del self._followers[key[0]]


KEPT_CHARACTERS: Final = 128
"""Of a word. Longer ones hardly come again."""

DEAREST_SHARE: Final = 3 / 8
"""Of a text's words. If more are new, the whole text takes the tokenizer less time: a word alone takes 4 us, one in a
text 1.5 us (measured)."""

LEARNED_SHARE: Final = 1 / 32
"""Of the words of such a text, so that the next one has fewer new words."""

_WORD_BYTES: Final = 70
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
        places = list(compress(range(len(ids)), map(not_, ids)))  # of the words that are not there
        if places and not self._find(key, known, words, ids, places):
            return tokenizer.encode_array(text, add_special_tokens=False)
        return array("I", b"".join(ids))  # type: ignore[arg-type]

    def _find(
        self,
        key: tuple[Tokenizer, Hashable],
        known: _Words,
        words: Sequence[str],
        ids: list[bytes | None],
        places: Sequence[int],
    ) -> bool:
        """Put the ids of the words at `places` there, and keep them. False if the text is better encoded whole.

        Then some of its words are kept all the same.
        """
        tokenizer, old = key[0], known.old
        common = self._common.get(tokenizer, {})
        found: dict[str, bytes] = {}
        new: list[str] = []
        for place in places:
            word = words[place]
            if word not in found:
                found[word] = old.get(word) or common.get(word, b"")
                if not found[word]:
                    new.append(word)
        is_whole = len(new) > max(1, len(words) * DEAREST_SHARE)
        if is_whole:
            step = -(-len(new) // (2 + int(len(words) * LEARNED_SHARE)))
            new = new[::step]  # from all of the text: its begin may be new each time
        for word, encoded in zip(new, tokenizer.encode_parts(new), strict=True):
            found[word] = encoded.tobytes()
        self._keep(key, found)
        if not is_whole:
            for place in places:
                ids[place] = found[words[place]]
        return not is_whole

    def _keep(self, key: Hashable, found: dict[str, bytes]) -> None:
        with self._lock:
            known = self._words.get(key)
            if known is None:  # forgotten meanwhile
                known = self._words[key] = _Words()
            self._words.move_to_end(key)
            for word, ids in found.items():
                if ids and len(word) <= KEPT_CHARACTERS and word not in known.young:
                    known.young[word] = ids
                    size = sys.getsizeof(word) + sys.getsizeof(ids) + _WORD_BYTES
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


PART_CHARACTERS: Final = 4096
"""Of a part. Each part costs a look-up."""

SMALL_PARTS: Final = 8
"""Where a prompt leaves what is known, a part is kept in so many small ones. The next prompt that leaves there encodes
no more than a small one again. Smaller ones cost more to find and to keep than their words do (measured)."""

TURN_CHARACTERS: Final = 128 * 1024
"""Some 30 ms of a tokenizer's work, at 1 to 5 MB/s."""

WORDS_CHARACTERS: Final = 32 * 1024
"""Of a turn that is encoded by its words: they are looked up in some 2 ms, with the interpreter's lock. More is left to
the tokenizer, which takes longer, but frees the lock for the event loop."""

MAX_PART_CHARACTERS: Final = 2**20
"""Of a part: more without a cut takes over 100 MiB of memory and half a second. It is no text of any language."""

Span = tuple[int, int]
"""Where a part begins and ends."""


@dataclass(slots=True)
class EncodedPrompt:
    """A prompt's ids, and the hashes of its blocks or of the first ones. Arrays: a list takes nine times as much."""

    ids: array[int]
    hashes: array[int] = field(default_factory=lambda: array("Q"))


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Encodes prompts with one tokenizer, for tree blocks of `block_tokens` tokens."""

    tokenizer: Tokenizer
    block_tokens: int
    cache: PartCache
    part_characters: int = PART_CHARACTERS
    words: WordMemo | None = None

    def encode(self, text: str, salt: Hashable, *, add_special_tokens: bool = False) -> array[int]:
        """The ids of `Tokenizer.encode`; words that prompts of the same `salt` had are not encoded again."""
        tokenizer, cuts = self.tokenizer, self.tokenizer.cuts
        if cuts is None or cuts.words is None or self.words is None:
            return tokenizer.encode_array(text, add_special_tokens=add_special_tokens)
        ids = self.words.ids(text, tokenizer, cuts.words, salt)
        if add_special_tokens and tokenizer.ids_around != ((), ()):
            before, after = tokenizer.ids_around
            return array("I", [*before, *ids, *after])
        return ids

    def steps(
        self, text: str, scope: Hashable, root: int, *, add_special_tokens: bool, salt: Hashable = None
    ) -> Generator[int, None, EncodedPrompt]:
        """The prompt, with the ids of `Tokenizer.encode`, in turns. Raises what that raises.

        Before each turn it yields how many characters are not encoded yet. The first is the number that is not known.
        Prompts of one `scope` share parts, so they need the same `root`, the hash before the first block. Those of one
        `salt` share words. Raises `CallerError` if more than MAX_PART_CHARACTERS have no cut.
        """
        cuts = self.tokenizer.cuts
        if cuts is None or len(text) < self.part_characters:
            yield len(text)
            return EncodedPrompt(self.encode(text, salt, add_special_tokens=add_special_tokens))
        before, after = self.tokenizer.ids_around if add_special_tokens else ((), ())
        parts = _Parts(self, text, cuts, root, (scope, add_special_tokens), EncodedPrompt(array("I", before)), salt)
        keeps = self.cache.takes(text)
        if keeps:
            parts.take_known()
        while parts.begin < len(text):
            yield len(text) - parts.begin
            parts.encode_turn(keeps=keeps)
        self.cache.used(parts.path)
        parts.prompt.ids.extend(after)
        return parts.prompt


@dataclass(slots=True)
class _Parts:
    """The parts of a prompt, encoded up to the character `begin`. Small parts are used up to `small_until`.

    `path` are the parts that are kept. `before` stands in the key of the next.
    """

    encoder: PromptEncoder
    text: str
    cuts: Cuts
    root: int
    before: Hashable
    prompt: EncodedPrompt
    salt: Hashable
    begin: int = 0
    small_until: int = 0
    path: list[Part] = field(default_factory=list)

    def take_known(self) -> None:
        """Take the parts that are in the cache, up to the first that is not.

        The part that was used last at a place is tried first: comparing it takes less than a look-up by its text.
        """
        cache, text, prompt = self.encoder.cache, self.text, self.prompt
        while True:
            part = cache.follower(self.before)
            end = 0 if part is None else self.begin + len(part.key[1])
            if (
                part is None
                or end >= len(text)
                or not text.startswith(part.key[1], self.begin)
                or not self.cuts.place.match(text, end)
            ):
                for characters in (self.encoder.part_characters, self._small):
                    end = self._end(self.begin, characters)
                    part = cache.get((self.before, text[self.begin : end])) if end < len(text) else None
                    if part is not None:
                        break
            if part is None:
                self.small_until = self.begin + self.encoder.part_characters
                return
            prompt.ids.extend(part.ids)
            prompt.hashes.extend(part.hashes)
            self._follow(part, end)

    def encode_turn(self, *, keeps: bool) -> None:
        """Encode the parts of one turn. Those that end at a cut are kept if `keeps`."""
        spans, end = [], self.begin
        while end < len(self.text) and end - self.begin < TURN_CHARACTERS:
            characters = self._small if end < self.small_until else self.encoder.part_characters
            spans.append((end, self._end(end, characters)))
            end = spans[-1][1]
        texts = [self.cuts.to_encode(self.text, *span) for span in spans]
        if self.encoder.words is None or self.cuts.words is None or end - self.begin > WORDS_CHARACTERS:
            parts = self.encoder.tokenizer.encode_parts(texts)
        else:
            parts = [self.encoder.encode(text, self.salt) for text in texts]
        known = len(self.prompt.ids)
        for ids in parts:
            self.prompt.ids.extend(ids)
        extend_chain(self.prompt.hashes, self.prompt.ids, self.encoder.block_tokens, self.root)
        if keeps:
            self._keep(spans, parts, known)
        self.begin = end

    def _keep(self, spans: Sequence[Span], parts: Sequence[array[int]], known: int) -> None:
        """Put parts into the cache, behind `known` tokens. The text's last is left out, because it may go on."""
        block_tokens = self.encoder.block_tokens
        for (begin, end), ids in zip(spans, parts, strict=True):
            if end == len(self.text):
                return
            hashes = self.prompt.hashes[known // block_tokens : (known + len(ids)) // block_tokens]
            known += len(ids)
            self._follow(self.encoder.cache.put((self.before, self.text[begin:end]), ids, hashes), end)

    def _follow(self, part: Part, end: int) -> None:
        self.path.append(part)
        self.before = part.number
        self.begin = end

    @property
    def _small(self) -> int:
        return max(1, self.encoder.part_characters // SMALL_PARTS)

    def _end(self, begin: int, characters: int) -> int:
        """Where the part of so many characters or a few more ends that begins there."""
        end = self.cuts.after(self.text, begin + characters)
        if end - begin > MAX_PART_CHARACTERS:
            raise CallerError(
                f"The prompt has {end - begin} characters without a space or another place to cut it. At most "
                f"{MAX_PART_CHARACTERS} are allowed. Shorten them, or put spaces between them.",
                code="prompt_without_spaces",
            )
        return end
