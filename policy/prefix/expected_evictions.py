"""Expected evictions: what an engine will evict for the prompts that it still has to compute.

They are expected anew with each report. It shows which blocks of these prompts the engine has stored already, how much
room is left, and what was really evicted. A prompt that is booked between two reports adds to the expectation.
"""

from __future__ import annotations

from math import ceil

from plait.policy.prefix.node import Node
from plait.policy.prefix.residency import Residency, Victim


class ExpectedEvictions:
    """The prompts that one engine still has to compute, and the blocks that LRU evicts for them.

    Blocks that are expected to be evicted do not count as held.
    """

    def __init__(self, residency: Residency, block_tokens: int) -> None:
        self._residency = residency
        self._block_tokens = block_tokens
        self._prompts: dict[object, tuple[Node, int]] = {}
        self._victims: list[Victim] = []
        self._expected_blocks = 0
        self._free_tokens: float | None = None
        """Room in the engine's empty blocks, less what the prompts need; negative: a shortage. None: not known."""

    def begin(self, call: object, leaf: Node, prompt_tokens: int) -> None:
        """A call was booked. Its prompt has `prompt_tokens`, and its whole blocks end at `leaf`."""
        self._prompts[call] = leaf, prompt_tokens
        if self._free_tokens is not None:
            brought = {node for node in leaf.path() if node.holdings[self._residency.engine_id].bookings > 1}
            self._free_tokens -= self._needed_tokens(leaf, prompt_tokens, brought)
            self._expect()

    def computed(self, call: object) -> None:
        """The prompt is computed. What it evicts stays expected until the next report, or until no prompt is left."""
        if self._prompts.pop(call, None) is not None and not self._prompts:
            self._forget()
            self._free_tokens = self._free_tokens and max(0.0, self._free_tokens)

    def given_up(self, call: object, free_tokens: float | None) -> None:
        """The call has ended, maybe before its prompt was computed. The rest is as in `update`."""
        if self._prompts.pop(call, None) is not None:
            self.update(free_tokens)

    def update(self, free_tokens: float | None) -> None:
        """A report came: `free_tokens` fit into the empty blocks. None: no report is known, so nothing is expected."""
        self._forget()
        self._free_tokens = free_tokens
        if free_tokens is not None:
            seen: set[Node] = set()
            needed = (self._needed_tokens(leaf, tokens, seen) for leaf, tokens in self._prompts.values())
            self._free_tokens = free_tokens - sum(needed)
            self._expect()

    def _expect(self) -> None:
        """Expect the evictions that the shortage takes, besides those that are expected already."""
        assert self._free_tokens is not None
        blocks = ceil(-self._free_tokens / self._block_tokens) - self._expected_blocks
        if blocks > 0:
            self._victims += self._residency.expect_eviction(blocks)
            self._expected_blocks += blocks

    def _forget(self) -> None:
        if self._victims:
            self._residency.end_expectation(self._victims)
        self._victims = []
        self._expected_blocks = 0

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
