"""What the gateway knows of tiers below the accelerator, against what embedded engines hold there."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.backends.profiles import load_profile
from plait.backends.protocol.cache_state import CacheState, KvState, LowerTier, StoredRun
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.router import Router
from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.embedded.kv_blocks import KvBlocks, Load
from plait.lab.embedded.lower_tiers import TierSettings
from plait.lab.simulation.compare import MODEL
from plait.lab.simulation.simulate import Prompt, SimulatedCall, Simulation
from plait.policy.costs.tier_link import BYTES_PER_TOKEN, TierLink
from plait.policy.costs.tier_views import TierViews
from plait.policy.prefix.block_hash import root_hash
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.prefix.residency import Residency
from plait.policy.types import Placement
from tests.gateway.fleet.lettered_prompts import call, hashes, new_router, report
from tests.invariants import check

COSTS = load_profile("a6000-mistral-7b").cost_model()
HOST, DISK = TierLink("host", 5e-6, 0.0005), TierLink("disk", 2e-5, 0.001)
TREE_BLOCK = 64
AddedS = Callable[[int, int], tuple[float, float]]


def prompt(family: int, shared: int, own: int, tokens: int) -> Prompt:
    ids = [family] * shared + [own] * (tokens - shared)
    root = root_hash(MODEL)
    return Prompt(tokens, HashChain(16, root, ids), HashChain(TREE_BLOCK, root, ids))


def fleet(kv_tokens: int, tiers: Sequence[tuple[TierLink, int]]) -> tuple[Router, dict[str, Engine]]:
    router = Router("plait", block_tokens=TREE_BLOCK)
    made = {}
    for number in range(2):
        name = f"engine-{number}"
        lower = tuple(TierSettings(link, tokens) for link, tokens in tiers)
        made[name] = Engine(EngineSettings(name=name, model=MODEL, kv_tokens=kv_tokens, lower=lower), COSTS)
        router.add_engine(name, COSTS)
    return router, made


def blocks_of(residency: Residency, router: Router) -> set[int]:
    return {block for node in router.tree.nodes() for block in node.hashes[: residency.resident.of(node)]}


def told(engine: Engine) -> list[set[int]]:
    """The tree blocks on the accelerator, then those there or in the first tier, and so on."""
    state, found = engine.cache_state(), list[set[int]]()
    for runs in (state.stored, *(tier.stored for tier in state.tiers)):
        found.append({block for run in runs for block in run.hashes} | (found[-1] if found else set()))
    return found


def draw_calls(seed: int, count: int, rate: float) -> list[SimulatedCall]:
    dice, now_s, calls = random.Random(seed), 0.0, []
    for number in range(count):
        now_s += dice.expovariate(rate)
        asked = prompt(dice.randrange(6), dice.choice((64, 640, 1280)), 100 + number, dice.choice((700, 1300, 1500)))
        calls.append(SimulatedCall(now_s, asked, dice.choice((1, 20, 60))))
    return calls


@settings(max_examples=25, deadline=None)
@pytest.mark.no_cover
@example(676, 4_096, [(HOST, 2_048), (DISK, 32_768)])  # blocks that reach host memory between two reports
@given(
    st.integers(0, 1000),
    st.sampled_from((4_096, 8_192)),
    st.sampled_from(([(HOST, 4_096)], [(HOST, 16_384)], [(HOST, 2_048), (DISK, 32_768)], [])),
)
def test_each_tier_is_known_as_it_is(seed: int, kv_tokens: int, tiers: list[tuple[TierLink, int]]) -> None:
    router, engines = fleet(kv_tokens, tiers)
    simulation = Simulation(router, engines, MODEL)
    records = simulation.run(draw_calls(seed, 60, 3.0))
    for name, engine in engines.items():
        cursor = router.engines[name].cache.cursor
        router.report(name, engine.cache_state(cursor, router.gateway_id), simulation.now_s + 1.0)
        view = router.engines[name].view
        known = [blocks_of(one, router) for one in (view.residency, *view.residency.tiers)]
        assert known == told(engine)
        assert view.tiers.total_tokens == sum(tokens for _, tokens in tiers)
        later = Router("plait", block_tokens=TREE_BLOCK)  # a gateway that comes later gets a snapshot
        later.add_engine(name, COSTS)
        later.report(name, engine.cache_state(), simulation.now_s + 1.0)
        found = later.engines[name].view.residency
        assert [blocks_of(one, later) for one in (found, *found.tiers)] == known
    check(router)
    assert len(records) == 60


def test_predictions_say_what_comes_from_host_memory() -> None:
    router, engines = fleet(8_192, [(HOST, 65_536)])
    simulation = Simulation(router, engines, MODEL)
    records = simulation.run(draw_calls(5, 400, 4.0))
    within = [abs(one.predicted_cached_tokens - one.cached_tokens) <= TREE_BLOCK for one in records]
    assert sum(within) >= 0.97 * len(within)
    assert sum(engine.counters.loaded_tokens for engine in engines.values()) > 0


@pytest.mark.parametrize("gbps", [2.0, 5.0, 25.0])
def test_loads_take_as_long_as_predicted_whatever_the_profile_says(
    gbps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile says 25 GB/s. The engines tell how long loads really take; with what waits for the link."""
    router, engines = fleet(8_192, [(TierLink.of("host", BYTES_PER_TOKEN, gbps, 0.0005), 65_536)])
    predicted_s, took_s = list[float](), list[float]()
    send, load = TierViews.send, KvBlocks.load

    def sent(tiers: TierViews, placement: Placement, now_s: float) -> Placement:
        send(tiers, placement, now_s)
        if placement.loaded:
            predicted_s.append(tiers.views[0].queue.wait_s(now_s))
        return placement

    def began(blocks: KvBlocks, call: EmbeddedCall, now_s: float, added_s: AddedS) -> Load | None:
        found = load(blocks, call, now_s, added_s)
        if found is not None and found.blocks:
            took_s.append(found.ends_s - now_s)
        return found

    monkeypatch.setattr(TierViews, "send", sent)
    monkeypatch.setattr(KvBlocks, "load", began)
    Simulation(router, engines, MODEL).run(draw_calls(5, 400, 4.0))
    assert len(took_s) > 50
    assert fmean(predicted_s[10:]) == pytest.approx(fmean(took_s[10:]), rel=0.1)


# By hand. A letter is a tree block.


def told_by(state: CacheState, host: LowerTier) -> CacheState:
    return msgspec.structs.replace(state, tiers=[host])


def held(router: Router, text: str) -> tuple[int, int]:
    """Tree blocks of a prompt on the accelerator, and with what is in host memory."""
    device, path = router.engines["a"].view.residency, router.tree.match(hashes(text))
    return device.cached_blocks(path), device.widest.cached_blocks(path)


def run_of(text: str, begin: int) -> StoredRun:
    """The letters from one on, stored behind the others."""
    return StoredRun(hashes(text)[begin - 1] if begin else None, hashes(text)[begin:])


def test_blocks_that_move_stay_in_all_tiers_together() -> None:
    router = new_router("a")
    router.report("a", told_by(report("abcd", snapshot=True), LowerTier("host", 100)), 0.0)
    assert held(router, "abcd") == (4, 4)
    moved = msgspec.structs.replace(report(), removed=hashes("abcd")[2:])
    router.report("a", told_by(moved, LowerTier("host", 100, stored=[run_of("abcd", 2)])), 1.0)
    assert held(router, "abcd") == (2, 4)
    back = msgspec.structs.replace(report(), stored=[run_of("abcd", 2)])
    router.report("a", told_by(back, LowerTier("host", 100, removed=hashes("abcd")[2:])), 2.0)
    assert held(router, "abcd") == (4, 4)
    gone = msgspec.structs.replace(report(), removed=hashes("abcd")[3:])
    router.report("a", told_by(gone, LowerTier("host", 100)), 3.0)
    assert held(router, "abcd") == (3, 3)
    check(router)


def test_a_tier_that_an_engine_has_from_now_on_knows_the_booked_calls() -> None:
    router = new_router("a")
    router.report("a", report("ab", snapshot=True), 0.0)
    booking = router.book(call("abx"), router.select(call("abx"), 0.0), 0.0)
    router.report("a", told_by(report("ab", snapshot=True), LowerTier("host", 100, stored=[run_of("abcd", 2)])), 1.0)
    assert held(router, "abx") == (3, 3)
    assert held(router, "abcd") == (2, 4)
    router.release(booking, 2.0, delivered=False)
    assert held(router, "abx") == (2, 2)
    check(router)
    router.report("a", report("ab", snapshot=True), 3.0)
    assert held(router, "abcd") == (2, 2)
    check(router)


def test_an_engine_that_leaves_takes_its_tiers_along() -> None:
    router = new_router("a", "b")
    router.report("a", told_by(report("ab", snapshot=True), LowerTier("host", 100, stored=[run_of("abcd", 2)])), 1.0)
    router.health.drain("a", draining=True)
    router.remove_engine("a")
    assert len(router.tree) == 0
    check(router)


def test_an_estimated_cache_keeps_in_host_memory_what_it_evicts() -> None:
    router = Router("plait")
    router.add_engine("a", COSTS, kv_tokens=4 * TREE_BLOCK, host_kv_tokens=3 * TREE_BLOCK)
    router.health.answered("a", {"m": None})
    router.no_reports("a")
    for at, text in enumerate(("abc", "def", "gh")):
        booking = router.book(call(text), router.select(call(text), float(at)), float(at))
        router.first_token(booking, at + 0.5)
        router.settle(booking, CallUsage(booking.call.prompt_tokens, 1), at + 0.6)
    assert held(router, "gh") == (2, 2)
    assert held(router, "def") == (2, 3)
    assert held(router, "abc") == (0, 2)
    placed = router.book(call("abc"), router.select(call("abc"), 9.0), 9.0).placement
    assert (placed.cached_tokens, placed.missed_tokens, placed.loaded) == (128, 65, (("host", 128),))
    check(router)


def test_a_load_that_is_slow_makes_an_engine_dearer_and_the_report_says_how_slow() -> None:
    router = new_router("a", "b", policy="plait")
    for engine in ("a", "b"):
        on_device = "abcd" if engine == "b" else ""
        stored = [run_of("abcd", 0)] if engine == "a" else []
        state = report(*filter(None, [on_device]), snapshot=True)
        router.report(engine, told_by(state, LowerTier("host", 100, stored=stored)), 0.0)
    placement = router.select(call("abcd"), 0.0)
    assert placement.engine_id == "b", "nothing has to be brought back there"
    view = router.engines["a"].view.tiers.views[0]
    before_s = view.load_s(1e6)
    slow = LowerTier("host", 100, loaded_tokens=10_000_000, loading_s=3 * view.link.token_s * 10_000_000)
    router.report("a", told_by(report(), slow), 1.0)
    assert view.load_s(1e6) == pytest.approx(3 * before_s, rel=0.05)


def test_what_is_brought_back_in_time_for_its_turn_costs_nothing() -> None:
    tree = PrefixTree()
    device = Residency("a", tree)
    tiers = TierViews(device, (TierLink("host", 1e-4),))
    tiers.use(["host"])
    tiers.views[0].residency.resident.store(None, hashes("abcd"))
    path = tree.match(hashes("abcd"))
    costs = replace(COSTS, context_s=0.0)

    def cached_blocks(one: Residency) -> int:
        return one.cached_blocks(path)

    loads = tiers.loads(cached_blocks, 4, 64, costs, 0.0)
    assert loads.blocks == 4
    assert loads.ready_s == pytest.approx(256e-4)
    tiers.views[0].queue.load(0.0, 1.0)
    assert tiers.loads(cached_blocks, 4, 64, costs, 0.0) == (0, 0.0), (
        "computing is sooner done than what waits for the link"
    )
    assert tiers.loads(cached_blocks, 4, 64, costs, 0.999).blocks == 4


def test_a_tier_that_appears_has_what_the_accelerator_has() -> None:
    router = Router("plait")
    router.add_engine("a", COSTS, kv_tokens=8 * TREE_BLOCK, host_kv_tokens=8 * TREE_BLOCK)
    router.health.answered("a", {"m": None})
    router.report("a", report("abcd", snapshot=True), 0.0)
    assert held(router, "abcd") == (4, 4)
    router.no_reports("a")
    check(router)
    booking = router.book(call("ab"), router.select(call("ab"), 1.0), 1.0)
    router.settle(booking, CallUsage(booking.call.prompt_tokens, 1), 1.5)
    assert held(router, "ab") == (2, 2)
    check(router)


def test_expected_evictions_end_with_the_tiers_that_they_were_expected_of() -> None:
    router = new_router("a")
    state = msgspec.structs.replace(report("abcd", snapshot=True), kv=KvState(16, 0, 16))
    router.report("a", told_by(state, LowerTier("host", 100, 100)), 0.0)
    booking = router.book(call("xyz"), router.select(call("xyz"), 0.5), 0.5)
    router.report(
        "a", told_by(msgspec.structs.replace(state, snapshot=False, stored=[]), LowerTier("host", 100, 100)), 1.0
    )
    assert held(router, "abcd") == (1, 4), "it will be in host memory"
    router.no_reports("a")
    router.release(booking, 2.0, delivered=False)
    assert held(router, "abcd") == (4, 4)


def test_a_call_that_is_not_to_wait_for_a_slow_link_computes_also_after_it_has_waited() -> None:
    router = new_router("a", policy="plait")
    router.report("a", told_by(report(snapshot=True), LowerTier("host", 100, stored=[run_of("abcd", 0)])), 0.0)
    router.engines["a"].view.tiers.views[0].queue.load(0.0, 100.0)
    placement = router.select(call("abcd"), 0.0)
    assert placement.cached_tokens == 0
    booking = router.book(call("abcd"), placement, 0.0, waits=True)
    router.send(booking, 1.0)
    assert (booking.placement.cached_tokens, booking.placement.loaded) == (0, ())
    check(router)


def test_another_process_begins_with_its_profiles_link() -> None:
    router = new_router("a")
    slow = LowerTier("host", 100, loaded_tokens=1_000_000, loading_s=1e6)
    router.report("a", told_by(report(snapshot=True), slow), 0.0)
    view = router.engines["a"].view.tiers.views[0]
    assert view.load_s(1000) == pytest.approx(64 * 1000 * view.link.token_s, rel=0.01)
    router.report("a", told_by(report(epoch="2", snapshot=True), LowerTier("host", 100)), 1.0)
    assert view.load_s(1000) == view.link.load_s(1000)


@pytest.mark.parametrize("tiers", [["host", "host"], ["host\r\nset-cookie: x"], [""], ["a=b"]])
def test_tiers_have_names_of_their_own_that_fit_a_header(tiers: list[str]) -> None:
    router = new_router("a")
    state = msgspec.structs.replace(report(snapshot=True), tiers=[LowerTier(tier) for tier in tiers])
    with pytest.raises(ValueError, match="its tiers cannot be"):
        router.report("a", state, 0.0)


def test_room_that_a_call_took_is_given_back_in_each_tier() -> None:
    router = new_router("a")
    router.report("a", told_by(report(snapshot=True), LowerTier("host", 100, 50)), 0.0)
    view = router.engines["a"].view
    before = view.free_tokens, view.tiers.views[0].free_tokens
    booking = router.book(call("abcd"), router.select(call("abcd"), 0.0), 0.0)
    assert view.free_tokens != before[0]
    assert view.tiers.views[0].free_tokens != before[1]
    router.release(booking, 1.0, delivered=False)
    assert (view.free_tokens, view.tiers.views[0].free_tokens) == before
    router.no_reports("a")
    assert view.free_tokens is None
