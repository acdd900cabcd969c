"""What this gateway needs of what several gateways share: calls of tenants with limits, and KV of live sessions.

The store shares it out (`SharedKeeper.share`), so a tenant or sessions that one gateway has alone have all of it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Final

from plait.gateway.admission.admission import Admission, caches
from plait.gateway.admission.tenants import TenantTerms, running_of, waiting_of
from plait.gateway.fleet.router import Router
from plait.gateway.store.event_log import Need

LEAST_PART: Final = 0.01
"""Of the engines. Another gateway may have all until it asks again, but what sessions are worth is judged here, too."""


def kv_of(model: str) -> str:
    """The name, among gateways, of the KV that live sessions of a model may fill."""
    return f"kv {model}"


def needs(admission: Admission, terms: TenantTerms, router: Router) -> Mapping[str, Need]:
    """What is used here, and what waits for more."""
    return dict((*_of_calls(admission, terms), *needs_of_sessions(admission, router)))


def needs_of_sessions(admission: Admission, router: Router) -> Iterator[tuple[str, Need]]:
    """The KV of live sessions, and of those that are held."""
    for model, gate in admission.sessions.gates.items():
        whole = caches(router, model)
        if whole is not None and (gate.tokens or gate.held.turns):
            yield kv_of(model), Need(whole.kv_tokens, gate.tokens + sum(turn.tokens for turn in gate.held))


def part_of_engines(model: str, router: Router, parts: Mapping[str, int] | None) -> float | None:
    """The part of a model's engines that sessions may fill here; None if the store does not say."""
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
