"""A placement policy of one's own that fails: its calls go elsewhere, and the log tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from plait.gateway.fleet.guarded_policy import TELL_INTERVAL_S, guarded
from plait.policy.costs.situation import Situation, placed
from plait.policy.placement.policies import Policy
from plait.policy.types import Call
from tests.gateway.fleet.lettered_prompts import call, new_router, report

Place = Callable[[Call, Situation], Any]


def raising(_call: Call, _situation: Situation) -> Any:
    raise ZeroDivisionError


def named(reason: str) -> Place:
    return lambda one, situation: placed(one, situation.engines[-1], reason, 0)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        (raising, "ZeroDivisionError"),
        (lambda _call, _situation: None, "expected a Placement, not NoneType"),
        (lambda one, situation: named("x")(one, situation)._replace(engine_id="none"), "engine 'none'"),
        (named("two\nlines"), r"'two\\nlines'"),
        (named("naïve"), "printable ASCII"),
        (named(""), "printable ASCII"),
    ],
)
def test_a_call_that_is_not_placed_goes_to_the_engine_with_the_fewest(place: Place, error: str) -> None:
    router = new_router("a", "b", policy=guarded(Policy("own", "own", place)))
    with capture_logs() as logs:
        for engine_id in "ab" * 2:
            one = call("x")
            placement = router.select(one, 0.0)
            assert (placement.engine_id, placement.reason) == (engine_id, "least_outstanding")
            router.book(one, placement, 0.0)
        router.select(call("x"), TELL_INTERVAL_S - 1)
        assert [error in entry["error"] for entry in logs] == [True]
        router.select(call("x"), TELL_INTERVAL_S)
        assert len(logs) == 2
    assert {entry["event"] for entry in logs} == {"placement policy failed"}


def test_what_it_places_is_left_as_it_is() -> None:
    policy = guarded(Policy("own", "own", named("mine"), keeps_sessions=True))
    router = new_router("a", "b", policy=policy)
    router.report("a", report("xyz"), 0.0)
    placement = router.select(call("xyz"), 0.0)
    assert (placement.engine_id, placement.reason, placement.cached_tokens) == ("b", "mine", 0)
    assert (policy.name, policy.keeps_sessions, policy.moves_waiting) == ("own", True, False)


def test_the_tree_is_tidied_where_the_policy_fails_to() -> None:
    tidied = []

    class Tree:
        def tidy(self) -> None:
            tidied.append(self)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    tree: Any = Tree()
    with capture_logs() as logs:
        guarded(Policy("own", "own", raising, age=fail)).age(tree, list, 0.0)
    assert tidied == [tree]
    assert [entry["error"] for entry in logs] == ["ZeroDivisionError()"]
