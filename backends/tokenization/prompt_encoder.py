"""Encodes prompts to token ids and chained hashes of tree blocks. The known beginning of a prompt is not encoded again.

A `PartCache` keeps ids and hashes part by part. A part ends at a cut of the text (`cuts`), so a text's ids are the
concatenated ids of its parts. docs/design/incremental-tokenization.md has the reasons.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple

from plait.backends.errors import CallerError
from plait.backends.tokenization.cuts import Cuts
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.policy.prefix.block_hash import extend_chain

_PART_BYTES: Final = 570
"""The memory of a part besides text, ids and hashes: its objects and its place in the table (measured)."""

_CHARACTERS_PER_BYTE: Final = 1 / 16
"""The longest prompt that is kept, per byte of cache: at 2.5 bytes a character, a sixth of the cache."""

Key = tuple[Hashable, str]
"""A part in its place: the number of the part before it (or, for a first part, the scope), and the part's text."""


class Part(NamedTuple):
    """The ids of a part's text, and the hashes of the tree blocks that end in the part."""

    key: Key
    number: int
    ids: array[int]
    hashes: array[int]
    size_bytes: int


class PartCache:
    """Parts in `max_bytes` of memory, evicted in LRU order; safe to call from several threads.

    Keys have the texts themselves, so there are no collisions. A part's number is never reused, so the followers of an
    evicted part cannot be found any more.
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
        """The most recently used part whose key begins with `before`: after a part, or the first of a scope."""
        return self._followers.get(before)

    def put(self, key: Key, ids: array[int], hashes: array[int]) -> Part:
        """Keep a part. Returns the part of this key, which may be an older one."""
        size = sys.getsizeof(key[1]) + 4 * len(ids) + 8 * len(hashes) + _PART_BYTES
        with self._lock:
            part = self._parts.get(key)
            if part is None:
                part = Part(key, next(self._numbers), ids, hashes, size)
                self._keep(part)
        return part

    def used(self, path: Sequence[Part]) -> None:
        """Mark a prompt's parts, from the first on, as used, so that a part is evicted before the part before it."""
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


PART_CHARACTERS: Final = 4096
"""The usual length of a part. Each part costs a look-up."""

SMALL_PARTS: Final = 8
"""Where a prompt branches off the known parts, the next part is split into this many. The next prompt that branches
there encodes at most one small part again. Even smaller ones cost more to find and keep than they save (measured)."""

TURN_CHARACTERS: Final = 128 * 1024
"""How much is encoded in one turn: some 30 ms at 1 to 5 MB/s."""

MAX_PART_CHARACTERS: Final = 2**20
"""The longest part. A longer text without a cut, which no language has, takes over 100 MiB and half a second."""

Span = tuple[int, int]
"""Where a part begins and ends."""


@dataclass(slots=True)
class EncodedPrompt:
    """A prompt's ids, and the hashes of its blocks or of the first ones. Lists would take nine times the memory."""

    ids: array[int]
    hashes: array[int] = field(default_factory=lambda: array("Q"))


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Encodes prompts with one tokenizer, for tree blocks of `block_tokens` tokens."""

    tokenizer: Tokenizer
    block_tokens: int
    cache: PartCache
    part_characters: int = PART_CHARACTERS

    def steps(
        self, text: str, scope: Hashable, root: int, *, add_special_tokens: bool
    ) -> Generator[int, None, EncodedPrompt]:
        """The encoded prompt, with the ids of `Tokenizer.encode`, made in turns. Raises the errors of `encode`.

        Before each turn, yields how many characters are left to encode; at first, all that the cache does not have.
        Prompts of one `scope` share parts, so they need the same `root`, the hash before the first block. Raises
        `CallerError` for more than MAX_PART_CHARACTERS without a cut.
        """
        tokenizer, cuts = self.tokenizer, self.tokenizer.cuts
        if cuts is None or len(text) < self.part_characters:
            yield len(text)
            return EncodedPrompt(tokenizer.encode_array(text, add_special_tokens=add_special_tokens))
        before, after = tokenizer.ids_around if add_special_tokens else ((), ())
        known_as = (scope, add_special_tokens, tokenizer.differences)  # ids from before a difference may be wrong
        parts = _Parts(self, text, cuts, root, known_as, EncodedPrompt(array("I", before)))
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
    """The parts of a prompt, encoded up to the character `begin`. Parts are small up to `small_until`.

    `path` has the prompt's parts in the cache. `before` is the first half of the next part's key.
    """

    encoder: PromptEncoder
    text: str
    cuts: Cuts
    root: int
    before: Hashable
    prompt: EncodedPrompt
    begin: int = 0
    small_until: int = 0
    path: list[Part] = field(default_factory=list)

    def take_known(self) -> None:
        """Take parts from the cache, up to the first one that it lacks.

        The part used last at a place is tried first, because comparing is faster than a look-up, which hashes the text.
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
        parts = self.encoder.tokenizer.encode_parts(texts)
        known = len(self.prompt.ids)
        for ids in parts:
            self.prompt.ids.extend(ids)
        extend_chain(self.prompt.hashes, self.prompt.ids, self.encoder.block_tokens, self.root)
        if keeps:
            self._keep(spans, parts, known)
        self.begin = end

    def _keep(self, spans: Sequence[Span], parts: Sequence[array[int]], known: int) -> None:
        """Put parts into the cache, after `known` tokens. The text's last part is left out: another text may go on."""
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
        """The end of a part that begins at `begin`: the first cut after at least `characters`."""
        end = self.cuts.after(self.text, begin + characters)
        if end - begin > MAX_PART_CHARACTERS:
            raise CallerError(
                f"The prompt has {end - begin} characters without a space or another place to cut it. At most "
                f"{MAX_PART_CHARACTERS} are allowed. Shorten them, or put spaces between them.",
                code="prompt_without_spaces",
            )
        return end
