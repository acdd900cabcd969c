"""What one tier of an engine is expected to evict for the prompts that the engine still has to compute."""

from __future__ import annotations

from plait.policy.prefix.prefix_tree import Node
from plait.policy.prefix.residency import Residency, Victim

Prompt = tuple[Node, int]
"""The node that a prompt's whole blocks end at, and the prompt's tokens."""


class ExpectedEvictions:
    """The prompts that one engine still has to compute, and the blocks that LRU evicts for them.

    Blocks that are expected to be evicted do not count as held. They are expected anew with each report. It shows which
    blocks of these prompts the engine has stored already, how much room is left, and what was really evicted. A prompt
    that the engine was sent after a report counts from the next one on. Engines report between iterations, and often
    begin such a prompt together with the calls that come soon after it.
    """

    def __init__(self, residency: Residency, block_tokens: int) -> None:
        self._residency = residency
        self._block_tokens = block_tokens
        self._prompts: dict[object, Prompt] = {}
        self._victims: list[Victim] = []
        self._free_tokens = 0.0  # room in the engine's empty blocks at the latest report

    def computed(self, call: object) -> None:
        """The prompt is computed. What it evicts stays expected until the next report, or until no prompt is left."""
        if self._prompts.pop(call, None) is not None and not self._prompts:
            self._forget()

    def given_up(self, call: object) -> None:
        """The call has ended, maybe before its prompt was computed. It evicts nothing any more."""
        if self._prompts.pop(call, None) is not None:
            self._expect()

    def update(self, free_tokens: float, prompts: dict[object, Prompt]) -> None:
        """A report came: `free_tokens` fit into the empty blocks. The engine still has to compute the `prompts`."""
        self._prompts, self._free_tokens = prompts, free_tokens
        self._expect()

    def end(self) -> None:
        """There are no reports any more, so nothing is expected."""
        self._prompts = {}
        self._forget()

    def _expect(self) -> None:
        """Expect what LRU evicts for the shortage. The rest that fills no block finds room where other calls end."""
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
        """Tokens of a prompt that the engine has not stored. Nodes in `seen` do not count; the others are added to it.

        The last tokens, which fill no block, count until the block before them is stored.
        """
        resident, blocks = self._residency.resident, 0
        rest_tokens = 0 if resident.of(leaf) == len(leaf) else prompt_tokens - leaf.end_blocks * self._block_tokens
        for node in leaf.path():
            missing = len(node) - resident.of(node)
            if not missing or node in seen:  # then nothing above is missing, or it counts already
                break
            seen.add(node)
            blocks += missing
        return blocks * self._block_tokens + rest_tokens
