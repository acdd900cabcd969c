"""Prefix keys at variable boundaries. They show shared prefixes before the inputs have values (Parrot, 5.3).

A prompt is a sequence of segments: constant texts and semantic variables. Its keys are a chain of 64-bit hashes, one
for each segment, made like block hashes (see `block_hash`):

    k_0 = the root hash of block chains with the same model and cache salt
    k_i = the first 8 bytes of SHA-256(k_{i-1} || content of segment i)

A content is `c` and the bytes of a constant text, or `v` and a variable's name. The name is used even if the variable
has a value, since the value never changes. Prompts of one session have equal keys as long as their segments are equal,
and different keys from the first different segment on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Final, NamedTuple

MOST_SEGMENTS: Final = 64
"""At most this many leading segments of a prompt are compared. This limits the memory of a held prompt. For comparison:
a code review of 16 files by name has 36 segments.
"""


class Constant(NamedTuple):
    """A constant text of a prompt, `tokens` long. Equal `content` means equal text."""

    content: bytes
    tokens: int


Segment = Constant | str
"""A part of a prompt: a constant text, or the name of a variable, whose value goes there."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The part of a prompt that is known before its variables have values.

    `keys[i]` is the hash of the first i + 1 segments. `sizes[i]` is the length of segment i in tokens, or a variable's
    name if the variable's value gives the length. Segments after the first `MOST_SEGMENTS` are left out.
    """

    keys: tuple[int, ...] = ()
    sizes: tuple[int | str, ...] = ()

    @classmethod
    def of(cls, segments: Iterable[Segment], root: int) -> Outline:
        """The outline of a prompt's segments (Parrot's PrefixHash).

        `root` is `block_hash.root_hash` of the call's model and cache salt. So calls with different models or salts,
        which cannot share KV cache, have no key in common.
        """
        previous, keys, sizes = root.to_bytes(8, "big"), list[int](), list[int | str]()
        for segment in islice(segments, MOST_SEGMENTS):
            content = b"v" + segment.encode() if isinstance(segment, str) else b"c" + segment.content
            previous = sha256(previous + content).digest()[:8]
            keys.append(int.from_bytes(previous, "big"))
            sizes.append(segment if isinstance(segment, str) else segment.tokens)
        return cls(tuple(keys), tuple(sizes))

    def tokens(self, segments: int, value_tokens: Callable[[str], int]) -> int:
        """The length in tokens of the first `segments` segments; `value_tokens` gives the length of a value."""
        return sum(value_tokens(size) if isinstance(size, str) else size for size in self.sizes[:segments])


NO_OUTLINE: Final = Outline()
"""The outline of an unknown prompt: it shares nothing."""


def shared_segments(outlines: Iterable[Outline]) -> int:
    """How many leading segments all prompts have in common; 0 without prompts. O(prompts + segments)."""
    prompts = iter(outlines)
    first = next(prompts, NO_OUTLINE).keys
    shared = len(first)
    for prompt in prompts:
        keys = prompt.keys
        shared = min(shared, len(keys))
        while shared and keys[shared - 1] != first[shared - 1]:  # equal keys are equal from the start
            shared -= 1
        if not shared:
            break
    return shared
