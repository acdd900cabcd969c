"""Expected evictions: what an engine will evict for the prompts that it still has to compute.

They are expected anew with each report. It shows which blocks of these prompts the engine has stored already, how much
room is left, and what was really evicted. A prompt that is booked after a report counts from the next one on. Engines
report between iterations, and often begin such a prompt together with the calls that come soon after it.
"""

from __future__ import annotations

from plait.policy.prefix.prefix_tree import Node
from plait.policy.prefix.residency import Residency, Victim

Prompt = tuple[Node, int]
"""The node that a prompt's whole blocks end at, and the prompt's tokens."""


class ExpectedEvictions:
    """The prompts that one engine still has to compute, and the blocks that LRU evicts for them.

    Blocks that are expected to be evicted do not count as held.
    """

    def __init__(self, residency: Residency, block_tokens: int) -> None:
        self._residency = residency
        self._block_tokens = block_tokens
        self._prompts: dict[object, Prompt] = {}
        self._booked_since: dict[object, Prompt] = {}
        self._victims: list[Victim] = []
        self._free_tokens: float | None = None
        """Room in the engine's empty blocks at the latest report; None: not known."""

    def begin(self, call: object, leaf: Node, prompt_tokens: int) -> None:
        """A call was booked. Its prompt has `prompt_tokens`, and its whole blocks end at `leaf`."""
        self._booked_since[call] = leaf, prompt_tokens

    def computed(self, call: object) -> None:
        """The prompt is computed. What it evicts stays expected until the next report, or until no prompt is left."""
        self._booked_since.pop(call, None)
        if self._prompts.pop(call, None) is not None and not self._prompts:
            self._forget()

    def given_up(self, call: object) -> None:
        """The call has ended, maybe before its prompt was computed. It evicts nothing any more."""
        self._booked_since.pop(call, None)
        if self._prompts.pop(call, None) is not None:
            self._expect()

    def update(self, free_tokens: float | None) -> None:
        """A report came: `free_tokens` fit into the empty blocks. None: no report is known, so nothing is expected."""
        self._prompts |= self._booked_since
        self._booked_since.clear()
        self._free_tokens = free_tokens
        self._expect()

    def _expect(self) -> None:
        """Expect what LRU evicts for the shortage. The rest that fills no block finds room where other calls end."""
        self._forget()
        if self._free_tokens is None or not self._prompts:
            return
        seen: set[Node] = set()
        needed = sum(self._needed_tokens(leaf, tokens, seen) for leaf, tokens in self._prompts.values())
        blocks = int(needed - self._free_tokens) // self._block_tokens
        if blocks > 0:
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
