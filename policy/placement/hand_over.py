"""How an engine that drains hands its prefixes over to the others, one by one, while it still answers.

The draining engine still gets calls of which it has a longer cached prefix than every other engine. Such a call goes to
another engine, which computes the prefix, if that engine has spent less than `SHARE` of its time on such prefills. So
no burst of prefills follows a drain, and the prefixes that calls ask for most often move first.
"""

from __future__ import annotations

from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.situation import Situation, cached_prefix
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.types import Call, Placement

SHARE = 0.1
"""The most of its time that an engine spends on computing prefixes that it takes over."""


class HandOver:
    """The draining engines, `leaving`, and the time from which each other engine may take over a prefix again."""

    def __init__(self) -> None:
        self.leaving: dict[str, EngineView] = {}
        self._spent_until_s: dict[str, float] = {}
        self._latest_s: dict[str, float] = {}

    def __contains__(self, engine_id: object) -> bool:
        return engine_id in self.leaving

    def begin(self, engine: EngineView, now_s: float) -> None:
        """The engine drains: from now on it gets only calls of which it has the longest cached prefix."""
        self.leaving[engine.engine_id] = engine
        self._latest_s[engine.engine_id] = now_s

    def end(self, engine_id: str) -> None:
        """The engine hands over no longer. No effect if it did not."""
        self.leaving.pop(engine_id, None)
        self._latest_s.pop(engine_id, None)
        if not self.leaving:
            self._spent_until_s.clear()

    def latest_s(self, engine_id: str) -> float:
        """When a draining engine got its latest call; without one, when it began to drain."""
        return self._latest_s[engine_id]

    def narrow(self, call: Call, situation: Situation) -> Situation:
        """The situation with only the engines that may take the call; unchanged if all engines drain."""
        others = [engine for engine in situation.engines if engine.engine_id not in self.leaving]
        if not others:
            return situation
        most = max(cached_prefix(call, situation, engine) for engine in others)
        keepers = [
            engine
            for engine in situation.engines
            if engine.engine_id in self.leaving and cached_prefix(call, situation, engine) > most
        ]
        if not keepers:
            return situation._replace(engines=others)
        now_s = situation.now_s
        takers = [one for one in others if self._spent_until_s.get(one.engine_id, now_s) <= now_s]
        return situation._replace(engines=takers or keepers)

    def placed(self, call: Call, tree: PrefixTree, placement: Placement, now_s: float) -> None:
        """Charge the call's engine for the prefix that it computes and a draining engine has."""
        if placement.engine_id in self.leaving:
            self._latest_s[placement.engine_id] = now_s
            return
        path, engine_id, cached_tokens = tree.match(call.block_hashes), placement.engine_id, placement.cached_tokens
        for leaving in self.leaving.values():
            found_tokens = min(call.cacheable_blocks, leaving.tiers.lowest.cached_blocks(path)) * call.block_tokens
            if found_tokens > cached_tokens:
                took_s = leaving.cost_model.prefill_time_s(found_tokens - cached_tokens, cached_tokens)
                begins_s = max(now_s, self._spent_until_s.get(engine_id, now_s))
                self._spent_until_s[engine_id] = begins_s + took_s / SHARE
                cached_tokens = found_tokens
