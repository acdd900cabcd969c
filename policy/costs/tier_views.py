"""The tiers of an engine below its accelerator: what each has cached, and how long a load takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Final, NamedTuple

from plait.policy.costs.cost_model import CostModel
from plait.policy.costs.tier_link import LinkQueue, TierLink, link_of
from plait.policy.prefix.prefix_tree import Node
from plait.policy.prefix.residency import Residency
from plait.policy.types import Call, Placement

MOST: Final = 64.0
"""The largest factor by which reports correct a profile's link. A report beyond it is taken to be wrong."""

TELLING_TOKENS: Final = 4_000
"""The decay constant of a link's speed, in loaded tokens: the latest 4,000 tokens weigh 1 - 1/e. Without loads, the
speed stays.
"""


@dataclass(slots=True, eq=False)
class TierView:
    """One lower tier."""

    residency: Residency
    """What is in this tier or a faster one."""
    link: TierLink
    total_tokens: int = 0
    """The tier's size; 0: not known."""
    free_tokens: float | None = None
    """What fits into this tier and the faster ones without an eviction; None: not known."""
    queue: LinkQueue = field(default_factory=LinkQueue)
    """The loads of calls that were sent."""
    token_s: float | None = None
    """Seconds of each loaded token, latency included, from recent reports; None: not known."""
    loaded_tokens: int = 0
    """As the engine reported last, since its start."""
    loading_s: float = 0.0
    """The time of those loads."""

    def took(self, loaded_tokens: int, loading_s: float) -> None:
        """The engine has reported its loads since its start: their tokens and seconds, latencies included."""
        tokens, took_s = loaded_tokens - self.loaded_tokens, loading_s - self.loading_s
        self.loaded_tokens, self.loading_s = loaded_tokens, loading_s
        if tokens > 0 and took_s > 0:
            before_s = self.link.token_s if self.token_s is None else self.token_s
            token_s = before_s + (1 - exp(-tokens / TELLING_TOKENS)) * (took_s / tokens - before_s)
            self.token_s = min(MOST * self.link.token_s, max(self.link.token_s / MOST, token_s))

    def load_s(self, tokens: float) -> float:
        return self.link.load_s(tokens) if self.token_s is None else tokens * self.token_s


class Loads(NamedTuple):
    """The first `blocks` of a prompt need no prefill. Those of lower tiers are loaded after `ready_s` seconds."""

    blocks: int
    ready_s: float = 0.0


class TierViews:
    """All lower tiers of one engine: the `views`, the fastest first. The accelerator's residency is `device`.

    `lowest` is the residency of the last tier, which includes all faster ones.
    """

    def __init__(self, device: Residency, links: Sequence[TierLink]) -> None:
        self.device = self.lowest = device
        self.views: list[TierView] = []
        self._links = links

    @property
    def names(self) -> list[str]:
        return [view.residency.tier for view in self.views]

    @property
    def total_tokens(self) -> int:
        """The sum of the known sizes."""
        return sum(view.total_tokens for view in self.views)

    def use(self, names: Sequence[str]) -> None:
        """The engine has reported the names of its lower tiers, the fastest first."""
        if self.names != list(names):
            self.device.use_tiers(names)
            self.views = [TierView(one, link_of(one.tier, self._links)) for one in self.device.tiers]
            self.lowest = self.device.widest

    def forget_loads(self) -> None:
        """The engine has restarted, so its counters of loads start at 0."""
        for view in self.views:
            view.queue, view.token_s, view.loaded_tokens, view.loading_s = LinkQueue(), None, 0, 0.0

    def take(self, tokens: float) -> None:
        """A call takes room for `tokens`; a negative number gives room back."""
        for view in self.views:
            if view.free_tokens is not None:
                view.free_tokens = max(0.0, view.free_tokens - tokens)

    def loads(
        self, cached: Callable[[Residency], int], most_blocks: int, block_tokens: int, costs: CostModel, now_s: float
    ) -> Loads:
        """The blocks of a prompt that need no prefill, at most `most_blocks`; `cached` gives a residency's blocks.

        A tier's blocks count if waiting for its link and loading them takes less time than computing them.
        """
        blocks, ready_s = min(most_blocks, cached(self.device)), 0.0
        for view in self.views:
            reached = min(most_blocks, cached(view.residency))
            if reached > blocks:
                tokens = (reached - blocks) * block_tokens
                load_s = view.queue.wait_s(now_s) + view.load_s(tokens)
                if load_s > costs.added_s(tokens, blocks * block_tokens)[0]:
                    break
                blocks, ready_s = reached, max(ready_s, load_s)
        return Loads(blocks, ready_s)

    def ready_blocks(self, call: Call, leaf: Node, costs: CostModel, now_s: float) -> int:
        """The blocks of a waiting call's prompt that will need no prefill once the prompts before it are computed."""
        if not self.views:
            return min(call.cacheable_blocks, self.device.ready_blocks(leaf))
        return self.loads(
            lambda one: one.ready_blocks(leaf), call.cacheable_blocks, call.block_tokens, costs, now_s
        ).blocks

    def expect(self, placement: Placement, leaf: Node, block_tokens: int, *, is_booked: bool) -> Placement:
        """The placement with `loaded` filled in: what comes from each lower tier. The prompt ends at `leaf`."""
        path = [] if is_booked else leaf.segments()
        loaded, blocks, cached_blocks = [], 0, placement.cached_tokens // block_tokens
        for one in (self.device, *(view.residency for view in self.views)):
            reached = min(cached_blocks, one.ready_blocks(leaf) if is_booked else one.cached_blocks(path))
            if one is not self.device and reached > blocks:
                loaded.append((one.tier, (reached - blocks) * block_tokens))
            blocks = max(blocks, reached)
        return placement._replace(loaded=tuple(loaded))

    def send(self, placement: Placement, now_s: float) -> Placement:
        """The engine was sent the call: queues its loads."""
        for view in self.views:
            for tier, tokens in placement.loaded:
                if tier == view.residency.tier:
                    view.queue.load(now_s, view.load_s(tokens))
        return placement
