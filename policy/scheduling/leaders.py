"""Leaders: the calls of an iteration that compute prompt blocks which other calls need, too."""

from __future__ import annotations

from collections.abc import Hashable

from plait.policy.scheduling.plan import EngineFacts, LocalCall

MOST_HELD = 64
"""Ours: a search for calls to start ends after this many calls that wait for a leader, so that a plan stays short."""


class Leaders:
    """The leaders of one iteration, by the key of the first block that each computes.

    `followers` are the calls that wait for a leader. A follower waits for the whole iteration.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self.followers: set[LocalCall] = set()
        self._facts = facts
        self._by_key: dict[Hashable, tuple[LocalCall, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def add(self, call: LocalCall, stored_tokens: int, end_tokens: int) -> None:
        """The call computes its prompt up to `end_tokens`. Its first `stored_tokens` are in the cache."""
        if stored_tokens < call.prompt_tokens:
            key = self._facts.block_key(call, stored_tokens)
            if key is not None and (key not in self._by_key or end_tokens > self._by_key[key][1]):
                self._by_key[key] = call, end_tokens

    def remove(self, call: LocalCall) -> None:
        """The call was taken out of the iteration."""
        self._by_key = {key: leader for key, leader in self._by_key.items() if leader[0] is not call}

    def compute_for(self, call: LocalCall, cached_tokens: int) -> bool:
        """Whether a leader computes the block that a waiting call needs next."""
        return self._facts.block_key(call, cached_tokens) in self._by_key

    def cached_tokens(self, call: LocalCall, cached_tokens: int) -> tuple[int, int]:
        """How many tokens of a waiting call are cached, as (in this iteration, in the next iteration).

        `cached_tokens` are cached already. The blocks of this iteration count if the engine can share them at once and
        a leader computes all that the call shares with it.
        """
        facts, by_key = self._facts, self._by_key
        while (found := by_key.get(facts.block_key(call, cached_tokens))) is not None:
            leader, end_tokens = found
            shared_tokens = facts.shared_tokens(call, leader)
            if shared_tokens <= cached_tokens:
                break
            if end_tokens < shared_tokens or not facts.shares_in_iteration:
                return cached_tokens, max(cached_tokens, min(shared_tokens, end_tokens))
            cached_tokens = shared_tokens
        return cached_tokens, cached_tokens
