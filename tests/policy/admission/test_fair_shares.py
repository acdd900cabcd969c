"""Virtual times by hand: who was served how much for its weight, and what a pause or a correction changes."""

from __future__ import annotations

import pytest

from plait.policy.admission.fair_shares import FairShares


def test_what_a_tenant_was_served_counts_for_its_weight() -> None:
    weights = {"a": 4.0}
    shares = FairShares(weights)
    for tenant in "ab":
        shares.waits(tenant)
        shares.serve(tenant, 100)
    assert (shares.weight("a"), shares.weight("b")) == (4.0, 1.0)
    assert (shares.served("a"), shares.served("b")) == (25.0, 100.0)
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
