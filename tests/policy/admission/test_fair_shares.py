"""Virtual times by hand: who was served how much for its weight, and what a pause or a correction changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.admission.fair_shares import FairShares


def test_what_a_tenant_was_served_counts_for_its_weight() -> None:
    weights = {"a": 4.0}
    shares = FairShares(weights)
    for tenant in "ab":
        shares.waits(tenant)
        shares.serve(tenant, 100)
    assert (shares.weight("a"), shares.weight("b")) == (4.0, 1.0)
    assert (shares.served("a"), shares.served("b")) == (25.0, 125.0), "b begins at 25, where a waits"
    weights["a"] = 1.0
    shares.serve("a", 100)
    assert shares.served("a") == 125.0, "weights may change at any time; what was served keeps its own"


def test_nobody_saves_up_a_share_in_a_pause() -> None:
    shares = FairShares()
    for _ in range(3):
        shares.serve("a", 100)
    assert shares.served("b") == 200.0, "where the call began that was served last"
    shares.waits("b")
    shares.serve("a", 1_000)
    shares.serve("a", 1_000)
    assert shares.served("b") == 200.0, "the time does not pass for one that waits"
    shares.left("b")
    assert shares.served("b") == 1_300.0


def test_a_tenant_that_comes_begins_with_the_one_furthest_behind_of_those_that_wait() -> None:
    shares = FairShares()
    for tenant in "aab":
        shares.waits(tenant)
    shares.serve("b", 800)
    shares.serve("a", 300)
    shares.serve("sent", 50)
    assert [shares.served(tenant) for tenant in ("a", "b", "sent", "new")] == [300.0, 800.0, 350.0, 300.0]
    shares.left("a")
    assert shares.served("new") == 300.0, "another call of a waits"
    shares.left("a")
    assert shares.served("new") == 800.0, "only b waits"
    shares.left("b")
    assert shares.served("new") == 300.0, "nobody waits: where the call began that was sent last"


def test_a_tenant_that_comes_begins_where_a_correction_has_put_one_that_waits() -> None:
    shares = FairShares()
    for tenant in "ab":
        shares.waits(tenant)
        shares.serve(tenant, 600)
    assert shares.served("new") == 600.0
    shares.correct("a", -400)
    assert shares.served("new") == 200.0
    shares.correct("a", 900)
    assert shares.served("new") == 1_100.0


def test_a_tenant_waits_until_its_last_call_has_left() -> None:
    shares = FairShares()
    for _ in range(2):
        shares.waits("b")
    shares.serve("a", 500)
    shares.serve("a", 500)
    shares.left("b")
    assert shares.served("b") == 0.0
    shares.left("b")
    assert shares.served("b") == 500.0


def test_a_call_that_is_sent_at_once_counts_as_one_that_has_waited() -> None:
    shares = FairShares()
    shares.waits("b")
    shares.serve("a", 100)
    shares.serve("b", 100)
    shares.left("b")
    assert shares.served("a") == shares.served("b") == 100.0


@pytest.mark.parametrize(("tokens", "served"), [(0, 100.0), (50, 125.0), (-50, 75.0), (-500, 0.0)])
def test_when_a_call_ends_its_real_tokens_count(tokens: int, served: float) -> None:
    shares = FairShares({"a": 2.0})
    shares.waits("a")
    shares.serve("a", 200)
    shares.correct("a", tokens)
    assert shares.served("a") == served


def test_what_was_given_back_is_not_saved_up() -> None:
    shares = FairShares()
    for tenant in "abab":
        shares.serve(tenant, 100)
    shares.correct("a", -150)
    assert shares.served("a") == 100.0, "not before the call that was served last"
    shares.correct("nobody", -50)
    assert shares.served("nobody") == 100.0


def test_the_lines_hear_of_a_tenant_that_has_gone_back_and_waits() -> None:
    shares, heard = FairShares(), list[str]()
    shares.on_earlier = heard.append
    for tenant in "ab":
        shares.serve(tenant, 100)
    shares.waits("a")
    for tenant, tokens in (("a", 50), ("b", -50), ("a", 0), ("a", -50)):
        shares.correct(tenant, tokens)
    assert heard == ["a"]


class Oracle:
    """All virtual times, looked through at each step."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.times = dict.fromkeys(weights, 0.0)
        self.waiting: list[str] = []
        self.latest = 0.0

    def present(self) -> float:
        return min((self.times[tenant] for tenant in self.waiting), default=self.latest)

    def served(self, tenant: str) -> float:
        own = self.times[tenant]
        return own if tenant in self.waiting else max(own, self.present())

    def do(self, event: str, tenant: str, tokens: int) -> None:
        served, share = self.served(tenant), tokens / self.weights[tenant]
        if event == "waits":
            self.times[tenant] = served
            self.waiting.append(tenant)
        elif event == "left":
            self.waiting.remove(tenant)
        elif event == "serve":
            self.latest = max(self.latest, served)
            self.times[tenant] = served + share
        else:
            time = max(0.0, self.times[tenant] + share * (1 if event == "more" else -1))
            self.times[tenant] = time if tenant in self.waiting or time > self.present() else 0.0


EVENTS = st.tuples(
    st.sampled_from(("waits", "waits", "left", "serve", "serve", "less", "more")),
    st.sampled_from("abcd"),
    st.integers(1, 500),
)


@given(weights=st.tuples(*[st.sampled_from((0.5, 1.0, 4.0))] * 4), events=st.lists(EVENTS, max_size=60))
def test_who_comes_begins_at_the_least_time_of_those_that_wait(
    weights: tuple[float, ...], events: list[tuple[str, str, int]]
) -> None:
    """Only a tenant that was served is corrected, and only one that waits leaves."""
    oracle = Oracle(dict(zip("abcd", weights, strict=True)))
    shares = FairShares(oracle.weights)
    for event, tenant, tokens in events:
        if tenant not in oracle.waiting and (event == "left" or (event == "more" and not oracle.times[tenant])):
            continue
        oracle.do(event, tenant, tokens)
        match event:
            case "waits":
                shares.waits(tenant)
            case "left":
                shares.left(tenant)
            case "serve":
                shares.serve(tenant, tokens)
            case _:
                shares.correct(tenant, tokens if event == "more" else -tokens)
        assert {name: shares.served(name) for name in "abcd"} == {name: oracle.served(name) for name in "abcd"}
