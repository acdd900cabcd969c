"""What this gateway needs of amounts that several gateways share: tenants' running and waiting calls, and sessions' KV.

The store divides each amount by need (`SharedKeeper.share`): a tenant with calls in one gateway only has all of it
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple

from plait.gateway.admission.admission import Admission, caches
from plait.gateway.admission.tenants import TenantTerms, running_of, waiting_of
from plait.gateway.fleet.router import Router

REGULAR_S: Final = 1.0
"""The period in which gateways tell the store their needs, at the least; it renews leases of 5 s, so four may fail."""

LEAST_PART: Final = 0.01
"""The least part of the engines: another gateway may have all of the KV, but each one judges the worth of sessions."""


class Need(NamedTuple):
    """A shared limit: its total, and what this gateway asks for."""

    whole: int
    wanted: int


def kv_of(model: str) -> str:
    """The name of the KV for live sessions of a model in the shared store."""
    return f"kv {model}"


def needs(admission: Admission, terms: TenantTerms, router: Router) -> Mapping[str, Need]:
    """By name: the shared amount, and what this gateway uses or waits for."""
    return dict((*_of_calls(admission, terms), *needs_of_sessions(admission, router)))


def needs_of_sessions(admission: Admission, router: Router) -> Iterator[tuple[str, Need]]:
    """The need of KV for live and held sessions."""
    for model, gate in admission.sessions.gates.items():
        whole = caches(router, model)
        if whole is not None and (gate.tokens or gate.held.turns):
            yield kv_of(model), Need(whole.kv_tokens, gate.tokens + sum(turn.tokens for turn in gate.held))


def part_of_engines(model: str, router: Router, parts: Mapping[str, int] | None) -> float | None:
    """The part of a model's engines whose KV this gateway's sessions may fill; None if the store does not say."""
    part, whole = (parts or {}).get(kv_of(model)), caches(router, model)
    return None if part is None or whole is None else min(1.0, max(LEAST_PART, part / max(1, whole.kv_tokens)))


def _of_calls(admission: Admission, terms: TenantTerms) -> Iterator[tuple[str, Need]]:
    if not terms.have_counts:
        return
    for tenant in admission.busy():
        whole = terms.whole(tenant)
        if whole.max_running < inf:
            yield running_of(tenant), Need(int(whole.max_running), admission.queue.wants(tenant))
        if whole.max_waiting < inf:
            yield waiting_of(tenant), Need(int(whole.max_waiting), admission.queue.most_waiting(tenant))


def fair_parts(whole: int, wanted: Sequence[int]) -> list[int]:
    """Divide `whole` by max-min fairness: nobody gets more than it wants while another wants more.

    A rest that nobody wants is divided equally, so the parts always add up to `whole`.
    """
    parts, rest, count = [0] * len(wanted), whole, len(wanted)
    for served, number in enumerate(sorted(range(count), key=wanted.__getitem__)):
        parts[number] = min(wanted[number], rest // (count - served))
        rest -= parts[number]
    more, first = divmod(rest, count)
    return [part + more + (number < first) for number, part in enumerate(parts)]
