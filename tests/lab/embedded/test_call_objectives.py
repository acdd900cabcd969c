"""`POST /call_objectives` of the embedded engine: a call that waits or runs is served by its newest objectives."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plait.backends.profiles import load_profile
from plait.backends.protocol.call_annotations import EngineAnnotations
from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.policy.prefix.block_hash import root_hash
from plait.policy.types import Objective, Slo
from tests.invariants import check
from tests.lab.embedded.served_engine import Served, serving
from tests.lab.embedded.test_server import served
from tests.policy.scheduling.fake_engine import slos

__all__ = ["served"]

COSTS = load_profile("a6000-mistral-7b").cost_model()


def embedded_call(number: int, tokens: int = 500, output: int = 20, slo: Slo | None = None) -> EmbeddedCall:
    chain = HashChain(64, root_hash("m"), [number] * tokens)
    return EmbeddedCall(
        str(number), 0.0, tokens, slo=slo, chain=chain, tree_chain=chain, final_output_tokens=output, handle=str(number)
    )


def new_engine(**more: Any) -> Engine:
    return Engine(EngineSettings(**{"name": "e", "model": "m", "kv_tokens": 8000, "block_tokens": 64, **more}), COSTS)


def finished_in_order(engine: Engine, changes: dict[int, EngineAnnotations]) -> list[str]:
    """Run the engine until it is idle. `changes` come after so many iterations."""
    finished, iteration, now_s = [], 0, 0.0
    ends_s = engine.step(now_s).ends_s
    while ends_s is not None:
        iteration, now_s = iteration + 1, ends_s
        if iteration in changes:
            engine.refinable.refine([changes[iteration]])
        step = engine.step(now_s)
        finished += [output.call.call_id for output in step.outputs if output.finished]
        ends_s = step.ends_s
        check(engine.refinable)
        assert iteration < 5000
    assert not engine.waiting
    assert not engine.running
    return finished


def test_the_last_of_many_waiting_calls_goes_first_once_somebody_waits_for_it() -> None:
    latency = EngineAnnotations(slo=Slo(ttft_s=1.0, tpot_s=0.04), objective=Objective.LATENCY, handle="15")
    orders = []
    for changes in ({}, {3: latency}):
        engine = new_engine(max_running_calls=4)
        for number in range(16):
            engine.add(embedded_call(number))
        orders.append(finished_in_order(engine, changes))
    assert orders[0][-1] == "15"
    assert "15" in orders[1][:5], "it is behind those that ran already"
    assert sorted(orders[1]) == sorted(orders[0])


def test_a_promise_of_a_running_call_limits_its_iterations() -> None:
    gaps_s = []
    for tpot_s in (None, 0.05):
        engine = new_engine(kv_tokens=64_000)
        engine.add(embedded_call(0, tokens=64, output=200))
        now_s = engine.step(0.0).ends_s
        assert now_s is not None
        for number in range(1, 20):
            engine.add(embedded_call(number, tokens=2000))
        if tpot_s is not None:
            assert engine.refinable.refine([EngineAnnotations(slo=Slo(tpot_s=tpot_s), handle="0")]) == 1
        times_s = []
        for _ in range(8):
            times_s.append(now_s)
            now_s = engine.step(now_s).ends_s
            assert now_s is not None
        gaps_s.append(fmean(late - soon for soon, late in pairwise(times_s)))
    free_s, limited_s = gaps_s
    assert limited_s < 0.055
    assert free_s > 0.1


def test_attainment_counts_the_newest_objectives() -> None:
    engine = new_engine()
    for number in range(2):
        engine.add(embedded_call(number, slo=Slo(ttft_s=1e-6) if number else None))
    changes = {
        2: EngineAnnotations(slo=Slo(jct_s=60.0), handle="0"),
        3: EngineAnnotations(slo=Slo(jct_s=60.0), handle="1"),
    }
    finished_in_order(engine, changes)
    assert engine.cache_state().scheduler.slo_attainment == 1.0


@given(
    calls=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 20), slos), min_size=1, max_size=8),
    changes=st.dictionaries(st.integers(1, 40), st.tuples(st.integers(0, 8), slos), max_size=10),
)
def test_whatever_changes_every_call_finishes(
    calls: list[tuple[int, int, Slo | None]], changes: dict[int, tuple[int, Slo | None]]
) -> None:
    engine = new_engine(kv_tokens=640, max_batch_tokens=64, max_running_calls=4)
    for number, (tokens, output, slo) in enumerate(calls):
        engine.add(embedded_call(number, tokens, output, slo))
    said = {at: EngineAnnotations(slo=slo, handle=str(number)) for at, (number, slo) in changes.items()}
    assert sorted(finished_in_order(engine, said)) == [str(number) for number in range(len(calls))]


async def test_the_route_says_how_many_calls_are_known(served: Served) -> None:
    call = embedded_call(0)
    served.server.engines[0].add(call)
    changes = [
        {"plait_handle": "0", "plait_ttft_ms": 1000, "plait_objective": "latency"},
        {"plait_handle": "gone", "plait_tpot_ms": 40},
    ]
    answer = await served.http.post("/call_objectives", json=changes)
    assert (answer.status_code, answer.json()) == (200, {"known": 1})
    assert call.slo == Slo(ttft_s=10_000.0), "in emulated time"
    assert call.objective is Objective.LATENCY
    assert served.server.engines[0].cache_state().scheduler.takes_objectives
    served.server.engines[0].remove(call)


async def test_a_body_that_is_none_is_refused(served: Served) -> None:
    answer = await served.http.post("/call_objectives", json={"plait_handle": "0"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_it_needs_the_engines_key() -> None:
    async with serving("secret") as served:
        assert (await served.http.post("/call_objectives", json=[])).status_code == 401
        keyed = await served.http.post("/call_objectives", json=[], headers={"authorization": "Bearer secret"})
        assert keyed.json() == {"known": 0}


async def test_a_request_carries_its_handle(served: Served) -> None:
    await served.http.post("/call_objectives", json=[{"plait_handle": "h", "plait_jct_ms": 60_000}])
    await served.complete(max_tokens=2, n=2, vllm_xargs={"plait_handle": "h"})
    assert served.server.engines[0].cache_state().scheduler.slo_attainment == 1.0, "the change came before the call"
