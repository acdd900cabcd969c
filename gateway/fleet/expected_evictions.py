"""Evictions that one tier of an engine is expected to make between reports, for prompts still to be computed."""

from __future__ import annotations

from plait.policy.prefix.prefix_tree import Node
from plait.policy.prefix.residency import Residency, Victim

Prompt = tuple[Node, int]
"""(the node at which a prompt's whole blocks end, the prompt's tokens)."""


class ExpectedEvictions:
    """The prompts that one engine still has to compute, and the blocks that LRU will evict for them.

    Blocks that are expected to be evicted do not count as cached. Each report starts the expectation anew: it shows
    which blocks of these prompts are stored already, how much room is left, and what was really evicted.

    A prompt that was sent after a report counts from the next report on: engines report between iterations, and often
    begin such a prompt together with the calls that come soon after it.
    """

    def __init__(self, residency: Residency, block_tokens: int) -> None:
        self._residency = residency
        self._block_tokens = block_tokens
        self._prompts: dict[object, Prompt] = {}
        self._victims: list[Victim] = []
        self._free_tokens = 0.0  # room in the engine's empty blocks at the latest report

    def computed(self, call: object) -> None:
        """The prompt is computed. Its evictions stay expected until the next report, or until no prompt is left."""
        if self._prompts.pop(call, None) is not None and not self._prompts:
            self._forget()

    def given_up(self, call: object) -> None:
        """The call has ended, and evicts no further blocks."""
        if self._prompts.pop(call, None) is not None:
            self._expect()

    def update(self, free_tokens: float, prompts: dict[object, Prompt]) -> None:
        """A report arrived: `free_tokens` fit into the empty blocks. The engine still has to compute the `prompts`."""
        self._prompts, self._free_tokens = prompts, free_tokens
        self._expect()

    def end(self) -> None:
        """The engine no longer reports, so no eviction is expected."""
        self._prompts = {}
        self._forget()

    def _expect(self) -> None:
        """Expect what LRU evicts for the shortage, in whole blocks. A rest finds room in the blocks of ended calls."""
        self._forget()
        if not self._prompts:
            return
        seen: set[Node] = set()
        needed = sum(self._needed_tokens(leaf, tokens, seen) for leaf, tokens in self._prompts.values())
        if needed > self._free_tokens:
            blocks = int(needed - self._free_tokens) // self._block_tokens
            self._victims = self._residency.expect_eviction(blocks)

    def _forget(self) -> None:
        if self._victims:
            self._residency.end_expectation(self._victims)
            self._victims = []

    def _needed_tokens(self, leaf: Node, prompt_tokens: int, seen: set[Node]) -> int:
        """Tokens of a prompt that the engine has not stored, without nodes in `seen`, to which the counted are added.

        The last tokens, which fill no block, count until the block before them is stored.
        """
        resident, blocks = self._residency.resident, 0
        rest_tokens = 0 if resident.of(leaf) == len(leaf) else prompt_tokens - leaf.end_blocks * self._block_tokens
        for node in leaf.path():
            missing = len(node) - resident.of(node)
            if not missing or node in seen:  # its ancestors are stored, or were counted
                break
            seen.add(node)
            blocks += missing
        return blocks * self._block_tokens + rest_tokens
