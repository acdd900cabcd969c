"""Allocating a task group: places for all of its calls in one decision, at the least marginal cost (Parrot, 5.4).

Only the call that comes first is known when its group is allocated; the others are taken to be as long, and to share
with it what `TaskGroup.shared_tokens` says. The policy says what each engine would make of such calls (`Part`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import inf


@dataclass(frozen=True, slots=True)
class Part:
    """What a group's calls would be on one engine.

    Before them come `load_s` seconds of engine time. The prefill of the first of them takes `first_s` there, of each
    other `next_s`, where what they share is cached by then; `decode_s(n)` is how long n of them decode together. They
    take `first_tokens` and `next_tokens` of the KV cache, of which `room_tokens` are left.
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
        """The time that so many calls of the group take here."""
        return self.first_s + (calls - 1) * self.next_s + self.decode_s(calls) if calls else 0.0

    def has_room(self, calls: int) -> bool:
        """Whether so many calls of the group fit into the KV cache at once."""
        return self.first_tokens + (calls - 1) * self.next_tokens <= self.room_tokens

    def marginal_cost_s(self, calls: int) -> float:
        """Of one call more than `calls`: when all of them would have completed here, and the prefill that it adds.

        The first is what the group waits for. The second is the engine time that it takes from everybody else: little
        for a call that joins those it shares a prefix with, all of the prefix where it is computed once more. A decode
        in a batch takes next to nothing from others.
        """
        return self.load_s + self.work_s(calls + 1) + (self.next_s if calls else self.first_s)


def allocate(parts: Sequence[Part], places: Mapping[str, int], wanted: int) -> dict[str, int]:
    """Places for `wanted` calls by engine, those without any left out; `places` that there are already stay.

    Call by call to the engine where it costs least, of equals the first. An engine without room takes none while
    another has some. O((engines + wanted) log engines).
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
