"""How long blocks take from a lower tier of the cache to the accelerator: bytes over bandwidth, in a queue of its own.

A load overlaps with what the engine computes for other calls. Loads of one link follow each other. See
docs/design/tiers.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierLink:
    """The link from a `tier`: a load takes `latency_s`, and `token_s` for each token."""

    tier: str
    token_s: float
    latency_s: float = 0.0

    @classmethod
    def of(cls, tier: str, bytes_per_token: float, gbytes_per_s: float, latency_s: float = 0.0) -> TierLink:
        """A link of so many GB (10^9 bytes) a second, where the KV of a token has `bytes_per_token`."""
        return cls(tier, bytes_per_token / (gbytes_per_s * 1e9), latency_s)

    def load_s(self, tokens: float) -> float:
        """Seconds that the link is busy with a load of `tokens`."""
        return self.latency_s + tokens * self.token_s if tokens > 0 else 0.0


BYTES_PER_TOKEN = 131_072
"""The KV of a token in 16 bits where 32 layers have 8 heads of 128: Mistral 7B, Llama 3 8B."""

DEFAULT_LINKS = (
    TierLink.of("host", BYTES_PER_TOKEN, 25.0, 0.0005),
    TierLink.of("disk", BYTES_PER_TOKEN, 5.0, 0.002),
    TierLink.of("remote", BYTES_PER_TOKEN, 2.5, 0.005),
)
"""Of engines whose profile has none: PCIe 4.0 x16, one NVMe disk, 25 Gbit/s. Engines tell what loads really take."""


def link_of(tier: str, links: Iterable[TierLink]) -> TierLink:
    """The link of a tier among `links`, else the default one; tiers of other names are taken to be remote."""
    for link in (*links, *DEFAULT_LINKS):
        if link.tier == tier:
            return link
    return DEFAULT_LINKS[-1]


class LinkQueue:
    """One link's loads, in the order in which they begin. `free_s` is when the last one is over."""

    __slots__ = ("free_s",)

    def __init__(self) -> None:
        self.free_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """How long a load that comes now waits for those before it."""
        return max(0.0, self.free_s - now_s)

    def load(self, now_s: float, load_s: float) -> float:
        """A load that keeps the link busy for `load_s` comes now. Returns when it is over."""
        self.free_s = max(now_s, self.free_s) + load_s
        return self.free_s
