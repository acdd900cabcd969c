"""Allocates places for all calls of a task group in one decision, at the least marginal cost (Parrot, 5.4).

Only the prompt of the group's first call is known then. The other calls are assumed to be as long, and to share
`TaskGroup.shared_tokens` with the first. The policy supplies the costs of such calls on each engine (`Part`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import inf


@dataclass(frozen=True, slots=True)
class Part:
    """The costs of a group's calls on one engine.

    `load_s` is the placement cost without the prefill. The first call's prefill takes `first_s`. Each other prefill
    takes `next_s`, since the shared prefix is cached by then. `decode_s(n)` is the time in which n calls decode
    together. The first call takes `first_tokens` of the KV cache, each other call `next_tokens`. `room_tokens` of the
    KV cache are left.
    """

    engine_id: str
    load_s: float
    first_s: float
    next_s: float
    decode_s: Callable[[int], float]
    first_tokens: float = 0.0
    next_tokens: float = 0.0
    room_tokens: float = inf

    def work_s(self, calls: int) -> float:
        """The time that `calls` calls of the group take on this engine."""
        return self.first_s + (calls - 1) * self.next_s + self.decode_s(calls) if calls else 0.0

    def has_room(self, calls: int) -> bool:
        """Whether `calls` calls of the group fit into the KV cache at once."""
        return self.first_tokens + (calls - 1) * self.next_tokens <= self.room_tokens

    def marginal_cost_s(self, calls: int) -> float:
        """The cost of one call more than `calls`: the completion time of them all here, plus the added prefill.

        The group waits for the completion. The added prefill delays all other calls on the engine. It is short if the
        shared prefix is cached, and long if the prefix is computed again. One more decode in a batch delays the others
        by almost nothing.
        """
        return self.load_s + self.work_s(calls + 1) + (self.next_s if calls else self.first_s)


def allocate(parts: Sequence[Part], places: Mapping[str, int], wanted: int) -> dict[str, int]:
    """Returns places for `wanted` calls, by engine. Existing `places` stay. Engines without places are left out.

    Each call gets a place on the engine with the least marginal cost; ties: the first engine. An engine without room
    gets no place while another has room. O((engines + wanted) log engines).
    """
    chosen = {part.engine_id: places.get(part.engine_id, 0) for part in parts}

    def rank(index: int) -> tuple[bool, float, int]:
        part = parts[index]
        calls = chosen[part.engine_id]
        return not part.has_room(calls + 1), part.marginal_cost_s(calls), index

    ranks = [rank(index) for index in range(len(parts))]
    heapify(ranks)
    for _ in range(wanted - sum(chosen.values())):
        index = ranks[0][2]
        chosen[parts[index].engine_id] += 1
        heapreplace(ranks, rank(index))
    return {engine_id: calls for engine_id, calls in chosen.items() if calls}
