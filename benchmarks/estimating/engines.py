"""Engines that a gateway estimates wrongly."""

from __future__ import annotations

from array import array
from typing import Final

from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.engine import Engine
from plait.lab.embedded.hash_chain import HashChain

_SPREAD: Final = 0x9E3779B97F4A7C15
"""The golden ratio times 2 ** 64: its multiples have little in common."""


def renamed(chain: HashChain, number: int) -> HashChain:
    """A chain of the same shape, as of other tokens. Chains that had a prefix in common still do if `number` is equal.

    A name is only compared, so that a different one stands for a different text.
    """
    other, mask = chain.copy(), _SPREAD * number % 2**64
    other.hashes = array("Q", (name ^ mask for name in chain.hashes))
    return other


class ForgetfulEngine(Engine):
    """An engine that may lose its cache."""

    def lose_cache(self) -> None:
        """As after a restart. Running calls keep their blocks: their clients would send them again at once."""
        cache = self._blocks.cache
        cache.release(cache.allocate(cache.free_blocks))


class UncachedEngine(Engine):
    """An engine whose prefix caching is off: no call finds the blocks of another."""

    def add(self, call: EmbeddedCall) -> None:
        call.chain = renamed(call.chain, 1 + self.counters.calls)
        super().add(call)
