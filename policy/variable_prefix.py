"""Prefix hashes at variable boundaries: what calls share is visible before their inputs have values (Parrot, 5.3).

A prompt is a sequence of segments, constant texts and semantic variables. Its keys are a chain of 64-bit hashes, one
for each segment, made as block hashes are (see `block_hash`):

    k_0 = the hash that block chains of the same model and cache salt begin with
    k_i = the first 8 bytes of SHA-256(k_{i-1} || content of segment i)

Contents begin with a letter for their kind: `t` and token ids as uint32, little endian; `c` or `v` and the SHA-256 of
a constant text or of a value; `i` and a variable's tenant, session and name, each after its length in 4 bytes.

A variable without a value stands for itself, one with a value for that value. Two prompts that begin with the same
template and the same variables therefore have the same keys up to there, whether they wait or not; and two variables
with the same text are the same, across sessions. When a variable takes a value, the prompts that it is in have new
keys, from there on.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from sys import byteorder
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Constant:
    """All of the text between two variables, before the first or after the last.

    Made from its token ids or its text, whose keys differ: the prompts of one gateway are all given in the same form.
    """

    content: bytes

    @classmethod
    def of_tokens(cls, tokens: Sequence[int]) -> Constant:
        """From its token ids."""
        return cls(b"t" + _token_bytes(tokens))

    @classmethod
    def of_text(cls, text: str) -> Constant:
        """From its text, before tokenization."""
        return cls(b"c" + sha256(text.encode()).digest())


@dataclass(frozen=True, slots=True)
class Reference:
    """A semantic variable in a prompt: `value` is its text, None while it has none."""

    tenant: str
    session: str
    name: str
    value: str | None = None

    @property
    def content(self) -> bytes:
        """What the variable stands for: its value, or while it has none, itself."""
        if self.value is not None:
            return b"v" + sha256(self.value.encode()).digest()
        parts = [part.encode() for part in (self.tenant, self.session, self.name)]
        return b"i" + b"".join(len(part).to_bytes(4, "big") + part for part in parts)


Segment = Constant | Reference


def prefix_keys(segments: Iterable[Segment], root: int) -> tuple[int, ...]:
    """The hash at the end of each segment (Parrot's PrefixHash). `root` is `block_hash.root_hash` of the call's model
    and cache salt: calls whose KV cache cannot be shared have no key in common.
    """
    previous = root.to_bytes(8, "big")
    keys = []
    for segment in segments:
        previous = sha256(previous + segment.content).digest()[:8]
        keys.append(int.from_bytes(previous, "big"))
    return tuple(keys)


class Shared(NamedTuple):
    """The calls that share the first `segments` segments of a prompt, in the order in which they were added."""

    segments: int
    calls: tuple[str, ...]


NOTHING_SHARED = Shared(0, ())


class WaitingPrefixes:
    """From each key to the waiting calls that have it, so that they can be grouped ahead of time (Parrot, 5.3).

    One serves a whole gateway: keys tell tenants, sessions and models apart.
    """

    __slots__ = ("_calls", "_keys")

    def __init__(self) -> None:
        self._calls: dict[int, dict[str, None]] = {}
        self._keys: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        """Calls in the index."""
        return len(self._keys)

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._keys

    def add(self, call_id: str, keys: Sequence[int]) -> None:
        """Enter a call, or give one that is there its new keys. O(boundaries)."""
        self.remove(call_id)
        self._keys[call_id] = tuple(keys)
        for key in keys:
            self._calls.setdefault(key, {})[call_id] = None

    def remove(self, call_id: str) -> None:
        """Take a call out, if it is there. O(boundaries)."""
        for key in self._keys.pop(call_id, ()):
            calls = self._calls[key]
            calls.pop(call_id, None)
            if not calls:
                del self._calls[key]

    def sharing(self, keys: Sequence[int], besides: str | None = None) -> Shared:
        """The calls at the deepest boundary that any call but `besides` shares. O(boundaries and calls returned)."""
        for segments in range(len(keys), 0, -1):
            calls = self._calls.get(keys[segments - 1], {})
            if len(calls) > (besides in calls):
                return Shared(segments, tuple(call_id for call_id in calls if call_id != besides))
        return NOTHING_SHARED

    def check(self) -> None:
        """Assert the invariants; for tests."""
        pairs = {(key, call_id) for call_id, keys in self._keys.items() for key in keys}
        assert {(key, call_id) for key, calls in self._calls.items() for call_id in calls} == pairs
        assert all(self._calls.values()), "an empty key was left behind"


def _token_bytes(tokens: Sequence[int]) -> bytes:
    words = array("I", tokens)
    if byteorder != "little":  # pragma: no cover - block hashes need such a machine too
        words.byteswap()
    return words.tobytes()
