"""The chained block hashes of a call whose tokens come one after the other, as in the embedded engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from plait.policy.prefix.block_hash import chain


class HashChain:
    """A growing chain: `hashes` of its whole blocks, and the last tokens until they fill a block."""

    __slots__ = ("_rest", "_root", "block_tokens", "hashes")

    def __init__(self, block_tokens: int, root: int, tokens: Sequence[int] = ()) -> None:
        self.block_tokens = block_tokens
        self.hashes = array("Q")
        self._root = root
        self._rest: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, and the hash of each block that they fill."""
        rest = self._rest
        rest.extend(tokens)
        whole = len(rest) // self.block_tokens * self.block_tokens
        if whole:
            previous = self.hashes[-1] if self.hashes else self._root
            self.hashes.extend(chain(rest[:whole], self.block_tokens, previous))
            del rest[:whole]

    def append(self, token: int) -> bool:
        """Append a token. Returns whether it has filled a block."""
        self._rest.append(token)
        if len(self._rest) < self.block_tokens:
            return False
        self.extend(())
        return True

    def parent(self, index: int) -> int | None:
        """The hash before block `index`; None for the first."""
        return self.hashes[index - 1] if index else None

    def copy(self) -> HashChain:
        other = HashChain(self.block_tokens, self._root)
        other.hashes = self.hashes[:]
        other._rest = self._rest[:]
        return other
