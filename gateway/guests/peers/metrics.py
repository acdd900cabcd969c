"""Metrics of several gateways: the members of a shared store, and the merged metrics of all workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plait.gateway.guests.peers.membership import Membership


class MembershipCollector(Collector):
    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "plait_peer_up", "1 for a gateway that shares the store, 0 for one that has died", labels=["peer"]
        )
        roster = self._membership.roster
        for member in roster.members:
            up.add_metric([member.url], float(not member.is_stale))
        for url in roster.missed:
            up.add_metric([url], 0.0)
        yield up
        strangers = "Rows of the store's gateways that are not signed with our peer_key"
        yield GaugeMetricFamily("plait_peers_not_trusted", strangers, len(roster.strangers))
        taken = self._membership.taken_over
        yield CounterMetricFamily("plait_sessions_taken_over", "Sessions that another gateway had before", taken)


UP: Final = "plait_worker_up"


def merged(texts: Mapping[str, bytes | None]) -> bytes:
    """Merge texts in Prometheus' format, by worker; None for a worker that did not answer.

    The samples of a family have to stay together in this format.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for worker, text in texts.items():
        label, comments, samples = f'worker="{worker}"', list[str](), list[str]()
        for line in (text or b"").decode().split("\n"):  # a label may have other ends of lines
            if line.startswith("# HELP "):
                comments, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
                is_new = not comments
            if line.startswith("#"):
                if is_new:
                    comments.append(line)
            elif line:
                samples.append(_labelled(line, label))
    lines = [line for comments, samples in families.values() for line in (*comments, *samples)]
    lines += [f"# HELP {UP} Whether a worker answers", f"# TYPE {UP} gauge"]
    lines += [f'{UP}{{worker="{worker}"}} {float(text is not None)}' for worker, text in texts.items()]
    return "\n".join([*lines, ""]).encode()


def _labelled(sample: str, label: str) -> str:
    """A sample with one more label. Before a sample's value, only label values can have a brace or a space."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label}{',' if not rest.startswith('}') else ''}{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
