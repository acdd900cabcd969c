"""The rivals of `plait demo --compare`, case by case. A letter is a block of a prompt, with 10 tokens."""

from __future__ import annotations

from collections import Counter

import pytest

from plait.lab.simulation.rivals import SMG_GAP, llmd, session_hash, smg
from plait.policy.costs.situation import Situation
from plait.policy.types import Call, PlacementReason
from tests.policy.placement.test_policies import Engine, Past, build, call_of


def situation(call: Call, **engines: Engine) -> Situation:
    return build(engines, call)


class TestSessionHash:
    def test_a_session_stays_on_its_engine_whatever_the_prompt_and_the_load(self) -> None:
        first = call_of("xyz")._replace(session="s")
        engine = session_hash(first, situation(first, a=Engine(), b=Engine())).engine_id
        later = call_of("pqrst")._replace(session="s")
        loads = {name: Engine(outstanding=9 * (name == engine)) for name in "ab"}
        assert session_hash(later, situation(later, **loads)).engine_id == engine

    def test_sessions_on_one_document_are_spread(self) -> None:
        calls = [call_of("xyz")._replace(session=f"session {number}") for number in range(400)]
        engines = Counter(session_hash(call, situation(call, a=Engine(), b=Engine())).engine_id for call in calls)
        assert min(engines["a"], engines["b"]) > 150

    def test_without_a_session_the_beginning_decides(self) -> None:
        chosen = set()
        for end in "pqrs":
            call = call_of("xy" + end)
            chosen.add(session_hash(call, situation(call, a=Engine(), b=Engine(), c=Engine())).engine_id)
        assert len(chosen) == 1

    def test_a_lost_engine_moves_only_its_own_sessions(self) -> None:
        for number in range(50):
            call = call_of("xyz")._replace(session=f"session {number}")
            before = session_hash(call, situation(call, a=Engine(), b=Engine(), c=Engine())).engine_id
            after = session_hash(call, situation(call, a=Engine(), b=Engine(), c=Engine(up=False))).engine_id
            assert before in (after, "c")


class TestCacheAware:
    def test_the_longest_prefix_wins_over_load(self) -> None:
        call = call_of("xyz", 1)
        placement = smg(call, situation(call, a=Engine(resident=("xy",), outstanding=30), b=Engine(resident=("x",))))
        assert (placement.engine_id, placement.reason, placement.cached_tokens) == ("a", PlacementReason.EXPLOIT, 20)

    def test_of_equal_prefixes_the_least_loaded(self) -> None:
        call = call_of("xyz", 1)
        engines = {"a": Engine(resident=("x",), outstanding=2), "b": Engine(resident=("x",), outstanding=1)}
        assert smg(call, situation(call, **engines)).engine_id == "b"

    @pytest.mark.parametrize(("more", "engine"), [(SMG_GAP, "a"), (SMG_GAP + 1, "b")])
    def test_out_of_balance_load_alone_decides(self, more: int, engine: str) -> None:
        call = call_of("xyz", 1)
        engines = {"a": Engine(resident=("xy",), outstanding=10 + more), "b": Engine(outstanding=10)}
        assert smg(call, situation(call, **engines)).engine_id == engine

    def test_a_gap_that_is_small_beside_the_load_does_not_count(self) -> None:
        call = call_of("xyz", 1)
        engines = {"a": Engine(resident=("xy",), outstanding=300), "b": Engine(outstanding=210)}
        assert smg(call, situation(call, **engines)).engine_id == "a"


class TestScore:
    def test_the_prefix_weighs_more_than_the_queue_alone(self) -> None:
        call = call_of("xyz", 1)
        queued = Engine((Past("p", 10, running=True),), resident=("xyz",))
        placement = llmd(call, situation(call, a=queued, b=Engine()))
        assert (placement.engine_id, placement.cached_tokens) == ("a", 30)

    def test_a_third_of_the_prompt_weighs_less(self) -> None:
        call = call_of("xyz", 1)
        engines = {"a": Engine(resident=("x",)), "b": Engine()}
        views = situation(call, **engines)
        views.engines[0].context_tokens = 100.0
        assert llmd(call, views).engine_id == "b"

    def test_ties_are_taken_in_turn(self) -> None:
        call = call_of("xyz", 1)
        chosen = [llmd(call, build({"a": Engine(), "b": Engine()}, call, turn)).engine_id for turn in range(4)]
        assert chosen == ["a", "b", "a", "b"]
