"""The answers that estimated caches hold: what engines without reports have generated, where the next turn shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.engine import FleetEngine
from plait.policy.prefix.answered_prompts import AnsweredPrompts
from plait.policy.prefix.prefix_tree import PrefixTree


class EstimatedAnswers:
    """Part of the router's state. Engines that report their caches report what they have generated too."""

    def __init__(self, engines: Mapping[str, FleetEngine], tree: PrefixTree, block_tokens: int) -> None:
        self._engines = engines
        self._tree = tree
        self._block_tokens = block_tokens
        self._prompts = AnsweredPrompts(block_tokens)

    def ended(self, engine: FleetEngine, booking: Booking, usage: CallUsage) -> None:
        """A call was answered. Nothing is learnt of a prompt that the engine has counted differently."""
        call = booking.call
        if engine.cache.reports or call.prompt_hash is None or usage.prompt_tokens != call.prompt_tokens:
            return
        before = call.block_hashes[-1] if call.block_hashes else None
        self._prompts.add(engine.view.engine_id, call.prompt_hash, before, call.prompt_tokens, usage.output_tokens)

    def arrived(
        self, tokens: Sequence[int], hashes: Sequence[int], root: int, turn_ends: AbstractSet[int] | None
    ) -> None:
        """A prompt arrived. If it continues an answered one, the engines that still have that one have the answer too.

        The arguments are those of `AnsweredPrompts.continued`.
        """
        if not self._prompts:
            return
        blocks, stored = self._prompts.continued(tokens, hashes, root, turn_ends)
        for engine_id, stored_tokens in stored.items():
            self._store(self._engines[engine_id], hashes[: stored_tokens // self._block_tokens], blocks)

    def forget(self, engine_id: str) -> None:
        """Nothing is known of an engine's cache any more."""
        self._prompts.forget(engine_id)

    def _store(self, engine: FleetEngine, hashes: Sequence[int], known_blocks: int) -> None:
        """Assume that the blocks behind the first `known_blocks` are stored, if these are."""
        residency = engine.view.residency
        held_blocks = residency.held_blocks(self._tree.match(hashes))
        if engine.cache.reports or not known_blocks <= held_blocks < len(hashes):
            return
        residency.resident.store_path(self._tree.insert(hashes))
        if engine.cache.estimated_tokens is not None:
            residency.evict(len(residency.resident) - engine.cache.estimated_tokens // self._block_tokens)
