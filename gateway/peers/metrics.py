"""Which gateways share the store, for `/metrics`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plait.gateway.peers.membership import Membership


class MembershipCollector(Collector):
    """The gateways that share a store, and what this one has taken over from those that have died."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def collect(self) -> Iterator[Metric]:
        """One gauge and one counter."""
        up = GaugeMetricFamily(
            "plait_peer_up", "1 for a gateway that shares the store, 0 once its lease is over", labels=["peer"]
        )
        for member in self._membership.members:
            up.add_metric([member.url], float(not member.is_stale))
        yield up
        taken = self._membership.taken_over
        yield CounterMetricFamily("plait_sessions_taken_over", "Sessions that another gateway had before", taken)
