"""The time to load blocks from a lower tier of the cache to the accelerator: bytes over bandwidth, one load at a time.

Loads overlap with computing. Each link has its own queue. See docs/design/tiers.md.
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
        """A link by its bandwidth in GB (10^9 bytes) a second, and the bytes of a token's KV."""
        return cls(tier, bytes_per_token / (gbytes_per_s * 1e9), latency_s)

    def load_s(self, tokens: float) -> float:
        return self.latency_s + tokens * self.token_s if tokens > 0 else 0.0


BYTES_PER_TOKEN = 131_072
"""The KV of a token in 16 bits where 32 layers have 8 heads of 128: Mistral 7B, Llama 3 8B."""

DEFAULT_LINKS = (
    TierLink.of("host", BYTES_PER_TOKEN, 25.0, 0.0005),
    TierLink.of("disk", BYTES_PER_TOKEN, 5.0, 0.002),
    TierLink.of("remote", BYTES_PER_TOKEN, 2.5, 0.005),
)
"""For engines whose profile has no links: PCIe 4.0 x16, one NVMe disk, 25 Gbit/s. Reported loads correct the speeds."""


def link_of(tier: str, links: Iterable[TierLink]) -> TierLink:
    """The tier's link in `links`, otherwise in `DEFAULT_LINKS`; an unknown tier is taken to be remote."""
    for link in (*links, *DEFAULT_LINKS):
        if link.tier == tier:
            return link
    return DEFAULT_LINKS[-1]


class LinkQueue:
    """The FIFO queue of one link's loads. The last one ends at `free_s`."""

    __slots__ = ("free_s",)

    def __init__(self) -> None:
        self.free_s = 0.0

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self.free_s - now_s)

    def load(self, now_s: float, load_s: float) -> float:
        """Queue a load that takes the link for `load_s`, and return the time at which it ends."""
        self.free_s = max(now_s, self.free_s) + load_s
        return self.free_s
