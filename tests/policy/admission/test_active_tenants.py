"""Who uses a model at present, and which part each may take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.admission.fair_shares import ACTIVE_S, ActiveTenants


def new_tenants(weights: dict[str, float] | None = None) -> ActiveTenants:
    """No tenant is active. Without a weight it is 1."""
    return ActiveTenants(weights)


def shares(active: ActiveTenants, now_s: float, tenants: str = "ab") -> list[float]:
    return [active.share(tenant, now_s) for tenant in tenants]


def test_a_tenant_alone_may_take_everything() -> None:
    active = new_tenants({"a": 0.25})
    assert not active.are_several(0.0)
    active.came("a", 0.0)
    active.came("a", 1.0)
    assert not active.are_several(1.0)
    assert active.share("a", 1.0) == 1.0


def test_tenants_share_by_weight() -> None:
    active = new_tenants({"a": 3.0})
    for tenant in "abab":
        active.came(tenant, 0.0)
    assert active.are_several(0.0)
    assert shares(active, 0.0) == [0.75, 0.25]


def test_a_tenant_counts_for_a_minute_after_its_last_call() -> None:
    active = new_tenants()
    for tenant, now_s in (("a", 0.0), ("b", 5.0), ("a", 10.0)):
        active.came(tenant, now_s)
    assert active.are_several(5.0 + ACTIVE_S)
    assert not active.are_several(5.1 + ACTIVE_S), "b has gone; a came again"
    assert shares(active, 5.1 + ACTIVE_S) == [1.0, 0.5]
    assert shares(active, 10.1 + ACTIVE_S) == [1.0, 1.0], "nobody is there"


def test_a_tenant_that_is_not_there_has_the_share_that_it_would_have() -> None:
    active = new_tenants({"new": 2.0})
    assert active.share("new", 0.0) == 1.0
    for tenant in "ab":
        active.came(tenant, 0.0)
    assert active.share("new", 0.0) == 0.5
    assert shares(active, 0.0) == [0.5, 0.5], "to ask does not make it count"


def test_a_weight_that_changes_counts_from_the_next_call_on() -> None:
    weights = {"a": 1.0}
    active = new_tenants(weights)
    for tenant in "ab":
        active.came(tenant, 0.0)
    weights["a"] = 3.0
    assert shares(active, 0.0) == [0.5, 0.5]
    active.came("a", 1.0)
    assert shares(active, 1.0) == [0.75, 0.25]
    weights["a"] = 1.0
    assert shares(active, 2.0 + ACTIVE_S) == [1.0, 1.0], "what is forgotten is what was counted"


def test_rounding_ends_with_the_tenants() -> None:
    active = new_tenants({"a": 0.1, "b": 0.2, "c": 0.3})
    for tenant in "abc":
        active.came(tenant, 0.0)
    assert not active.are_several(1.0 + ACTIVE_S)
    active.came("a", 1.0 + ACTIVE_S)
    assert active.share("a", 1.0 + ACTIVE_S) == 1.0, "0.1 + 0.2 + 0.3 less the same is not 0"


WEIGHTS = st.sampled_from((0.1, 0.25, 1.0, 3.0, 7.5))
CALLS = st.lists(st.tuples(st.sampled_from("abcd"), WEIGHTS, st.floats(0, 40)), min_size=1, max_size=40)


@given(calls=CALLS, pause_s=st.floats(0, 80))
def test_the_shares_are_those_of_the_calls_of_the_last_minute(
    calls: list[tuple[str, float, float]], pause_s: float
) -> None:
    weights, now_s = dict.fromkeys("abcd", 1.0), 0.0
    active, latest = new_tenants(weights), dict[str, tuple[float, float]]()
    for tenant, weight, after_s in [*calls, ("", 1.0, pause_s)]:
        now_s += after_s
        counted = {name: of for name, (came_s, of) in latest.items() if now_s - came_s <= ACTIVE_S}
        assert active.are_several(now_s) == (len(counted) > 1)
        for name in "abcd":
            mine = counted.get(name, weights[name])
            assert active.share(name, now_s) == pytest.approx(mine / sum(({name: mine} | counted).values()))
        if tenant:
            weights[tenant] = weight
            active.came(tenant, now_s)
            latest[tenant] = now_s, weight
