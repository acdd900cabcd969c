"""Engines that offer a model with different contexts: a call goes where it has room."""

from __future__ import annotations

import pytest

from plait.backends.errors import NoEngineError, NotFoundError
from plait.gateway.fleet.booking import Failure
from plait.gateway.fleet.health import HealthState
from plait.gateway.fleet.router import Router
from plait.policy.placement.policies import POLICIES
from plait.policy.types import Call, PlacementReason
from tests.gateway.fleet.lettered_prompts import new_router

CALLS = 12
"""More than there are engines: round robin would come to each."""


def fleet(policy: str = "round_robin", **contexts: int | None) -> Router:
    router = new_router(*contexts, policy=policy)
    for engine, tokens in contexts.items():
        router.health.answered(engine, {"m": tokens})
    return router


def call(tokens: int, limit: int | None = None, *, exact: bool = True) -> Call:
    return Call("c", "m", tokens, 64, [], output_limit=limit, prompt_hash=1 if exact else None)


def engines(router: Router, one: Call, *, avoid: frozenset[str] = frozenset(), route: str | None = None) -> set[str]:
    """Where calls like this one are placed. Each is asked for by `takes`, too."""
    found = set()
    for number in range(CALLS):
        placement = router.select(one, float(number), avoid=avoid, route=route)
        router.book(one, placement, float(number))
        found.add(placement.engine_id)
    assert all(router.models.takes(one, engine, route) for engine in found)
    return found


def fail_until_ejected(router: Router, engine: str) -> None:
    for _ in range(3):
        booking = router.book(call(1), router.select(call(1), 0.0, prefer=engine), 0.0)
        router.fail(booking, Failure("status_500"), 0.0)
    assert router.engines[engine].health.state is HealthState.EJECTED


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_goes_only_where_it_has_room(policy: str) -> None:
    router = fleet(policy, short=2_000, long=32_768, unknown=None)
    assert engines(router, call(5_000)) <= {"long", "unknown"}
    assert router.models.takes(call(5_000), "long")
    assert not router.models.takes(call(5_000), "short")


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("tokens", "limit", "has_room"),
    [(1_999, None, True), (2_000, None, False), (1_500, 500, True), (1_500, 501, False), (0, 2_001, False)],
)
def test_the_output_limit_needs_room_and_a_token_without_one(
    tokens: int, limit: int | None, has_room: bool, exact: bool
) -> None:
    router = fleet(short=2_000, long=32_768)
    assert engines(router, call(tokens, limit, exact=exact)) == ({"short", "long"} if has_room else {"long"})


def test_where_no_context_has_room_the_longest_engines_judge() -> None:
    router = fleet(short=2_000, long=8_192, other=8_192)
    assert engines(router, call(9_000, exact=False)) == {"long", "other"}


@pytest.mark.parametrize("tokens", [2_000, None])
def test_equal_contexts_are_not_looked_at(tokens: int | None) -> None:
    router = fleet(a=tokens, b=tokens)
    assert not router.models.uneven
    assert engines(router, call(9_000)) == {"a", "b"}
    router.health.answered("b", {"m": 4_096})
    assert router.models.uneven
    router.health.answered("b", {"m": tokens})
    assert not router.models.uneven


def test_a_call_continues_only_where_it_has_room() -> None:
    router = fleet(short=2_000, long=32_768)
    assert router.select(call(100), 0.0, prefer="short").reason is PlacementReason.CONTINUE
    assert router.select(call(5_000), 0.0, prefer="short").engine_id == "long"


def test_a_call_avoids_no_engine_for_one_without_room() -> None:
    router = fleet(short=2_000, long=32_768, other=32_768)
    assert engines(router, call(5_000), avoid=frozenset(["long"])) == {"other"}
    assert engines(router, call(5_000), avoid=frozenset(["long", "other"])) == {"long", "other"}


def test_a_sick_engine_with_room_is_better_than_a_refusal() -> None:
    router = fleet(short=2_000, long=32_768)
    fail_until_ejected(router, "long")
    assert engines(router, call(1_000)) == {"short"}
    assert engines(router, call(5_000)) == {"long"}
    assert engines(router, call(5_000, exact=False)) == {"short"}, "an estimate may be too high"
    router.health.unreachable("long")
    assert engines(router, call(5_000)) == {"short"}, "which refuses it"


def test_a_stalled_engine_with_room_is_better_than_a_refusal() -> None:
    router = fleet(short=2_000, long=32_768)
    router.engines["long"].stalled = True
    router.models.refresh()
    assert engines(router, call(1_000)) == {"short"}
    assert engines(router, call(5_000)) == {"long"}


def test_room_counts_among_the_engines_that_have_the_route() -> None:
    router = fleet(short=2_000, long=32_768)
    router.health.answered("long", {"m": 32_768}, routes={"/v1/completions"})
    assert engines(router, call(5_000), route="/v1/messages") == {"short"}
    assert not router.models.takes(call(5_000), "long", "/v1/messages")
    router.health.answered("short", {"m": 2_000}, routes={"/v1/completions"})
    with pytest.raises(NotFoundError):
        router.select(call(5_000), 0.0, route="/v1/messages")
    assert not router.models.takes(call(5_000), "short", "/v1/messages")


def test_a_model_without_engines_takes_no_call() -> None:
    router = fleet(short=2_000, long=32_768)
    for engine in router.engines:
        router.health.unreachable(engine)
    assert not router.models.takes(call(1), "long")


def test_an_engine_that_fills_its_context_needs_room_for_the_prompt_alone() -> None:
    router = fleet(short=2_000, long=32_768)
    router.recognised("short", "llamacpp")
    assert engines(router, call(1_900, 4_000)) == {"short", "long"}
    assert engines(router, call(2_000, 4_000)) == {"long"}


@pytest.mark.parametrize(
    ("tokens", "exact", "is_placed"), [(2_500, True, False), (2_500, False, True), (3_100, False, False)]
)
def test_a_prompt_waits_for_an_engine_that_does_not_cut_it(tokens: int, exact: bool, is_placed: bool) -> None:
    router = fleet(short=2_000, long=32_768)
    router.recognised("short", "ollama")
    assert engines(router, call(tokens, exact=exact)) == {"long"}
    router.health.unreachable("long")
    if is_placed:
        assert engines(router, call(tokens, exact=exact)) == {"short"}, "an estimate may be too high"
    else:
        with pytest.raises(NoEngineError):
            router.select(call(tokens, exact=exact), 100.0)
