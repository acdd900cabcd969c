"""Chained block hashes against their definition, written out with hashlib and struct."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.lab.embedded.hash_chain import HashChain
from plait.policy.prefix.block_hash import chain, extend_chain, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def by_definition(tokens: Sequence[int], block_tokens: int, root: int) -> list[int]:
    hashes, previous = [], struct.pack(">Q", root)
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = struct.pack(f"<{block_tokens}I", *tokens[start : start + block_tokens])
        previous = hashlib.sha256(previous + block).digest()[:8]
        hashes.append(struct.unpack(">Q", previous)[0])
    return hashes


def test_known_values() -> None:
    """Computed once by `by_definition`: what engines and gateways of this format version must agree on."""
    assert root_hash("m") == 0x441D50936AA8DC70
    assert list(chain([1, 2, 3, 4, 5], 2, 0)) == [0x8FC9F3B191DBB36D, 0xA597542A7153D917]


def test_the_root_depends_on_model_and_salt() -> None:
    seed = hashlib.sha256(b"plait-1\0model\0salt").digest()[:8]
    assert root_hash("model", "salt") == int.from_bytes(seed, "big")
    roots = {root_hash(*parts) for parts in (("a",), ("b",), ("a", "b"), ("b", "a"), ("ab",), ("ab", "c"))}
    assert len(roots) == 6


@settings(deadline=None)
@given(tokens=TOKENS, block_tokens=st.integers(1, 9), root=st.integers(0, 2**64 - 1))
def test_a_chain_is_its_definition(tokens: list[int], block_tokens: int, root: int) -> None:
    assert list(chain(tokens, block_tokens, root)) == by_definition(tokens, block_tokens, root)


@settings(deadline=None)
@given(pieces=st.lists(TOKENS, max_size=6), block_tokens=st.integers(1, 9))
def test_a_chain_grown_piecewise_is_the_chain_of_the_whole(pieces: list[list[int]], block_tokens: int) -> None:
    grown = HashChain(block_tokens, 7)
    for piece in pieces:
        grown.extend(piece)
    whole = [token for piece in pieces for token in piece]
    assert list(grown.hashes) == by_definition(whole, block_tokens, 7)
    assert grown.hashes == HashChain(block_tokens, 7, whole).hashes


@settings(deadline=None)
@given(tokens=TOKENS, block_tokens=st.integers(1, 9), root=st.integers(0, 2**64 - 1), known=st.integers(0, 9))
def test_a_chain_is_extended_from_wherever_it_ends(tokens: list[int], block_tokens: int, root: int, known: int) -> None:
    whole = by_definition(tokens, block_tokens, root)
    hashes = array("Q", whole[:known])
    extend_chain(hashes, array("I", tokens), block_tokens, root)
    assert list(hashes) == whole


@settings(deadline=None)
@given(left=TOKENS, right=TOKENS, block_tokens=st.integers(1, 5))
def test_hashes_agree_exactly_as_far_as_the_prompts_do(left: list[int], right: list[int], block_tokens: int) -> None:
    pairs = zip(chain(left, block_tokens, 0), chain(right, block_tokens, 0), strict=False)
    for index, (a, b) in enumerate(pairs):
        end = (index + 1) * block_tokens
        assert (a == b) == (left[:end] == right[:end])


def test_a_copy_grows_on_its_own() -> None:
    original = HashChain(2, 0, [1, 2, 3])
    copy = original.copy()
    copy.extend([4, 5, 6])
    original.extend([9])
    assert list(copy.hashes) == by_definition([1, 2, 3, 4, 5, 6], 2, 0)
    assert list(original.hashes) == by_definition([1, 2, 3, 9], 2, 0)


def test_the_parent_of_a_block_is_the_hash_before_it() -> None:
    grown = HashChain(1, 0, [5, 6])
    assert (grown.parent(0), grown.parent(1), grown.parent(2)) == (None, grown.hashes[0], grown.hashes[1])
