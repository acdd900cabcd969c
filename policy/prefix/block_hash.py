"""Chained block hashes: gateway and engines compute the same 64-bit number for the same prompt prefix.

    h_0 = the first 8 bytes of SHA-256(format version, model, cache salt)
    h_i = the first 8 bytes of SHA-256(h_{i-1} || the tokens of block i as uint32, little endian)

Bytes are read as a big-endian integer. Equal hashes mean equal prefixes, so engines and gateway need not exchange
prompts. If block i is known, so is every block before it, so a match along a chain is a bisection.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from sys import byteorder
from typing import Final

FORMAT_VERSION = 1
"""Part of h_0, so hashes of another format version never match."""

TREE_BLOCK_TOKENS: Final = 64
"""The tree's block, whatever the engines' blocks are: measures a shared prefix to 1 % of a typical prompt, which is
hashed in 0.2 ms (docs/design/prefix-tree.md).
"""

if array("I").itemsize != 4 or byteorder != "little":  # pragma: no cover - no such machine is supported
    raise RuntimeError("chained block hashes need a little-endian machine with 32-bit unsigned ints")


@lru_cache(maxsize=1024)
def root_hash(model: str, cache_salt: str = "") -> int:
    """h_0 of a chain; NUL joins its parts. `model` is the name that calls use: each LoRA adapter has its own chains."""
    seed = "\0".join((f"plait-{FORMAT_VERSION}", model, cache_salt))
    return int.from_bytes(sha256(seed.encode()).digest()[:8], "big")


def chain(tokens: Sequence[int], block_tokens: int, parent: int) -> array[int]:
    """The chained hash of each whole block of `tokens`; `parent` is the hash before the first block."""
    hashes = array("Q")
    extend_chain(hashes, tokens, block_tokens, parent)
    return hashes


def extend_chain(hashes: array[int], tokens: Sequence[int], block_tokens: int, root: int) -> int:
    """Appends the hashes of the whole blocks of `tokens` that `hashes` lacks; the chain begins at `root`.

    Returns the hash of all tokens (`whole_hash`).
    """
    known = len(hashes)
    previous = (hashes[-1] if known else root).to_bytes(8, "big")
    data, width = array("I", tokens[known * block_tokens :] if known else tokens).tobytes(), 4 * block_tokens
    blocks_end = len(data) // width * width
    digests = []
    for start in range(0, blocks_end, width):
        previous = sha256(previous + data[start : start + width]).digest()[:8]
        digests.append(previous)
    new = array("Q", b"".join(digests))
    new.byteswap()
    hashes.extend(new)
    if blocks_end < len(data):
        previous = sha256(previous + data[blocks_end:]).digest()[:8]
    return int.from_bytes(previous, "big")


def whole_hash(rest: Sequence[int], before: int) -> int:
    """The hash of a whole prompt: `before` is the hash of its whole blocks, `rest` the tokens after them."""
    if not len(rest):
        return before
    return int.from_bytes(sha256(before.to_bytes(8, "big") + array("I", rest).tobytes()).digest()[:8], "big")
