"""The policy `plait` by hand and by a second implementation: the delay that a call causes to itself and to others.

An iteration takes 10 ms, 1 ms for each new token and 10 us for each token of context. A block has 10 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import e, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.costs.delay import CallToPlace, delay_cost, offer
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.load import LoadLedger
from plait.policy.costs.prefill_queue import Prefill
from plait.policy.costs.situation import Coming, Overtaken, OvertakenInLine, Situation, Traffic
from plait.policy.placement.least_delay import least_delay
from plait.policy.prefix.block_hash import chain
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.prefix.residency import Residency
from plait.policy.types import Call, PlacementReason, Slo

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.000_01, 0.0, LongAttention())
OUTPUT_TOKENS = 20
COMING = Coming(0.5, 20.0, COSTS.tokens_per_s)
MOST_WAIT_S = 2.5 * (0.001 * 20 + 0.000_01 * 20)


@dataclass(frozen=True)
class Engine:
    """An engine: which blocks it has cached, the missed tokens of the calls that wait, the contexts of all calls.

    Those that wait were sent, or are `held` in the gateway. It has `computed` a prompt of so many tokens just now.
    """

    cached: str = ""
    waiting: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    batch_tokens: int = 100
    held: tuple[int, ...] = ()
    computed: int = 0

    @property
    def prefill_share(self) -> float:
        """The part of three minutes."""
        return (0.010 + 0.001_01 * self.computed) / 180 if self.computed else 0.0


def hashes(prompt: str) -> list[int]:
    return list(chain([ord(letter) for letter in prompt], 1, 0))


def call_of(prompt: str, extra_tokens: int = 1) -> Call:
    return Call("c", "m", 10 * len(prompt) + extra_tokens, 10, hashes(prompt))


def send(view: EngineView, prefill: Prefill) -> None:
    view.queue.add(prefill)
    view.queue.send(prefill, prefill.sent_s)


def situation(*engines: Engine, prompt: str = "prefix", turn: int = 0) -> Situation:
    tree = PrefixTree()
    views = []
    for number, engine in enumerate(engines):
        view = EngineView(f"{number}", COSTS, LoadLedger(COSTS), Residency(f"{number}", tree))
        view.residency.resident.store(None, hashes(engine.cached))
        view.outstanding = view.calls = len(engine.contexts)
        view.context_tokens = sum(engine.contexts)
        for tokens in engine.waiting:
            send(view, Prefill(tokens, tokens * 0.001, 0.0, 0.0))
        for tokens in engine.held:
            view.queue.add(Prefill(tokens, tokens * 0.001, 0.0, 0.0))
        view.use_report(engine.batch_tokens, urgent_first=False)
        if engine.computed:
            view.ledger.book(tree.root, engine.computed, engine.computed, 0.0)
        views.append(view)
    return Situation(tree.match(hashes(prompt)), views, turn, 0.0, Traffic(60.0, OUTPUT_TOKENS))


CASES = [
    ("an idle engine: prefill and decode", Engine(), (0, 0.071, 20 * (0.011 + 0.00071), 0, 0)),
    ("what is cached is not computed again", Engine("prefix"), (0, 0.011, 20 * (0.011 + 0.00071), 0, 0)),
    (
        "61 tokens wait for 150, in an iteration of 100 and one of 50",
        Engine(waiting=(50, 100), contexts=(50, 100)),
        (0.110 + 0.060, 0.071, 20 * (0.013 + 0.00221), 2 * 0.061 / 2, 2 * 10 * 0.001 + 2 * 10 * 0.00071),
    ),
    (
        "decodes take their tokens from the iterations",
        Engine(contexts=(10,) * 50, batch_tokens=100),
        (0, 0.110 + 0.071, 20 * (0.061 + 0.00571), 50 * 0.061 / 2, 50 * 10 * (0.001 + 0.00071)),
    ),
]


@pytest.mark.parametrize(("name", "engine", "parts"), CASES, ids=[name for name, _, _ in CASES])
def test_the_delay_by_hand(name: str, engine: Engine, parts: tuple[float, ...]) -> None:
    assert name
    (view,) = situation(engine).engines
    cached_blocks = 6 if engine.cached else 0
    cost = delay_cost(CallToPlace(call_of("prefix"), OUTPUT_TOKENS, inf), view, cached_blocks, 0.0)
    attention_s = 0.00061
    stalled = len(engine.contexts) / 2
    got = (cost.queue_s, cost.prefill_s - attention_s, cost.decode_s, cost.stall_s - stalled * attention_s, cost.slow_s)
    assert got == pytest.approx(parts)
    assert cost.total_s == pytest.approx(
        2 * (cost.queue_s + cost.prefill_s) + cost.decode_s + cost.stall_s + cost.slow_s
    )


@pytest.mark.parametrize(("most_wait_s", "wait_s"), [(inf, 0.170 + 0.071_61 / 2), (0.2, 0.2)])
def test_work_delays_the_calls_that_come_later_where_calls_wait(most_wait_s: float, wait_s: float) -> None:
    (view,) = situation(Engine(waiting=(50, 100), contexts=(50, 100))).engines
    none, some = (
        delay_cost(
            CallToPlace(call_of("prefix"), OUTPUT_TOKENS, inf, rate_s / COSTS.tokens_per_s, most_wait_s), view, 0, 0.0
        )
        for rate_s in (0, 2.0)
    )
    assert some.later_s == pytest.approx(1.5 * 2.0 * (0.061 + 0.000_61) * wait_s)
    assert some.total_s == pytest.approx(none.total_s + 2 * some.later_s)


def test_what_is_evicted_counts_as_far_as_it_is_used() -> None:
    """The call misses 61 tokens and decodes, and 11 are free: it takes the blocks of `other`, used least recently."""
    fleet = situation(Engine("other"))
    (view,) = fleet.engines
    view.residency.resident.store(None, hashes("third"))
    view.free_tokens = 11 + view.ledger.mean_output_tokens
    assert offer(CallToPlace.of(call_of("prefix"), fleet), fleet, view).cost.evicted_s == 0.0, "nobody uses it"
    (node,) = [one for one in view.residency._tree.nodes() if one.hashes[0] == hashes("o")[0]]
    node.use(0.0)
    node.use(0.0)
    now = fleet._replace(now_s=60.0)
    lost_s = offer(CallToPlace.of(call_of("prefix"), now), now, view).cost.evicted_s
    assert lost_s == pytest.approx(8 * 0.050 * 2 / e), "each use of a minute ago counts 1 / e"
    view.free_tokens += 50
    assert offer(CallToPlace.of(call_of("prefix"), now), now, view).cost.evicted_s == 0.0, "it has room"


def used(fleet: Situation, uses: int) -> Situation:
    """The fleet with a prompt of which each part has been used so often just now."""
    for _ in range(uses if fleet.path else 0):
        fleet.path[-1].node.use(0.0)
    return fleet


def test_a_copy_is_made_earlier_where_prompts_take_little_time() -> None:
    holder = Engine("prefix", contexts=(60,))
    for other, expected in ((Engine(), "1"), (Engine(computed=30_000), "0")):
        assert least_delay(call_of("prefix"), used(situation(holder, other), 40)).engine_id == expected


def test_a_copy_is_made_earlier_where_nothing_in_use_is_evicted_for_it() -> None:
    for uses, expected in ((0, "1"), (2, "0")):
        fleet = used(situation(Engine("prefix", contexts=(60,)), Engine("other")), 40)
        view = fleet.engines[1]
        view.free_tokens = 11 + view.ledger.mean_output_tokens
        (node,) = [one for one in view.residency._tree.nodes() if one.hashes[0] == hashes("o")[0]]
        for _ in range(uses):
            node.use(0.0)
        offers = [offer(CallToPlace.of(call_of("prefix"), fleet), fleet, one) for one in fleet.engines]
        assert (offers[1].cost.evicted_s > 0.0) == (uses > 0)
        assert least_delay(call_of("prefix"), fleet).engine_id == expected


def test_a_copy_of_a_prefix_is_made_earlier_if_it_is_used_often() -> None:
    engines = [Engine("prefix", contexts=(60,)), Engine()]
    assert place(*engines) == ("0", PlacementReason.EXPLOIT)
    chosen = [least_delay(call_of("prefix"), used(situation(*engines), uses)).engine_id for uses in (3, 300)]
    assert chosen == ["0", "1"]


ALL = OvertakenInLine(1, 1.0)
PASSED = [
    ("it passes nothing", Overtaken({}, 0.0), 2, 150, 0.110 + 0.060),
    ("it passes all that is held, as on the other engines", Overtaken({"0": ALL}, 1.0), 2, 150, 0.060),
    ("it passes half", Overtaken({"0": OvertakenInLine(0.5, 0.5)}, 0.5), 2, 150, 0.110),
    ("it passes half of the prefills, and few calls", Overtaken({"0": OvertakenInLine(0.1, 0.5)}, 0.1), 2, 150, 0.110),
    ("it passes more on the other engines", Overtaken({"0": ALL}, 3.0), 4, 300, 0.060),
    ("it passes calls on the other engines only", Overtaken({"1": ALL}, 2.0), 4, 300, 0.110 + 0.060),
]


@pytest.mark.parametrize(
    ("name", "overtaken", "calls", "context", "queue_s"), PASSED, ids=[name for name, *_ in PASSED]
)
def test_a_call_does_not_wait_for_what_it_passes_but_delays_it_wherever_it_goes(
    name: str, overtaken: Overtaken, calls: int, context: int, queue_s: float
) -> None:
    """50 tokens were sent and 100 are held, in iterations of 100 tokens."""
    assert name
    (view,) = situation(Engine(waiting=(50,), held=(100,), contexts=(50, 100))).engines
    cost = delay_cost(CallToPlace(call_of("prefix"), OUTPUT_TOKENS, inf), view, 0, 0.0, overtaken)
    iteration_s = 0.010 + 0.001 * (calls + 1) + 0.000_01 * (context + 61 + 10)
    assert (cost.queue_s, cost.prefill_s) == pytest.approx((queue_s, 0.071 + 0.000_61))
    assert cost.decode_s == pytest.approx(20 * iteration_s)
    assert cost.stall_s == pytest.approx(calls * (0.061 + 0.000_61) / 2)
    assert cost.slow_s == pytest.approx(calls * 10 * (0.001 + 0.000_71))


def test_the_delay_of_a_call_that_was_sent_counts_by_its_weight() -> None:
    """One was sent, and another one waits in the gateway."""
    (view,) = situation(Engine(waiting=(50,), held=(100,), contexts=(50, 100))).engines
    asked = CallToPlace(call_of("prefix"), OUTPUT_TOKENS, inf)
    whole, part = (delay_cost(replace(asked, sent_weight=weight), view, 0, 0.0) for weight in (1.0, 0.25))
    assert (part.stall_s, part.slow_s) == pytest.approx((whole.stall_s * 1.25 / 2, whole.slow_s * 1.25 / 2))
    assert part == replace(whole, stall_s=part.stall_s, slow_s=part.slow_s)


def place(*engines: Engine, prompt: str = "prefix", turn: int = 0) -> tuple[str, str]:
    placement = least_delay(call_of(prompt), situation(*engines, prompt=prompt, turn=turn))
    return placement.engine_id, placement.reason


def test_a_cached_prefix_attracts_until_using_it_costs_more_than_computing_it_again() -> None:
    busy = [Engine("prefix", contexts=(60,) * calls) for calls in (0, 1, 8)]
    assert [place(one, Engine()) for one in busy] == [
        ("0", PlacementReason.EXPLOIT),
        ("0", PlacementReason.EXPLOIT),
        ("1", PlacementReason.EXPLORE),
    ]


def urgent(*engines: Engine, ttft_s: float) -> tuple[str, bool]:
    placement = least_delay(call_of("prefix")._replace(slo=Slo(ttft_s=ttft_s)), situation(*engines))
    return placement.engine_id, placement.meets_slo is False


def test_a_call_with_a_ttft_goes_where_it_is_met_even_if_that_delays_others_more() -> None:
    """The first engine has the prefix and 300 tokens that wait; the second decodes much."""
    queued, busy = Engine("prefix", waiting=(300,), contexts=(300,)), Engine(contexts=(100,) * 9)
    assert place(queued, busy)[0] == "0"
    assert [urgent(queued, busy, ttft_s=ttft_s) for ttft_s in (1.0, 0.2, 0.01)] == [
        ("0", False),
        ("1", False),
        ("1", True),
    ]


def test_an_engine_that_serves_urgent_calls_first_makes_them_wait_for_urgent_calls_only() -> None:
    fleet = situation(Engine("prefix", waiting=(300,), contexts=(300,)), Engine(contexts=(100,) * 9))
    fleet.engines[0].use_report(100, urgent_first=True)
    call = call_of("prefix")._replace(slo=Slo(ttft_s=0.2))
    assert least_delay(call, fleet).engine_id == "0"
    send(fleet.engines[0], Prefill(300, 0.3, 0.0, 0.0, is_on_time=True))
    assert least_delay(call, fleet).engine_id == "1"


def test_equal_engines_take_turns() -> None:
    assert [place(Engine(), Engine(), Engine(), turn=turn)[0] for turn in range(4)] == ["0", "1", "2", "0"]


def test_an_engine_that_fails_its_calls_at_once_does_not_look_idle() -> None:
    fleet = situation(Engine(), Engine())
    failing = fleet.engines[0]
    for number in range(10):
        prefill = Prefill(61, 0.061, 0.0, float(number) / 100)
        failing.begin(70.0, prefill)
        failing.send(70.0, prefill, float(number) / 100)
        failing.lose(70.0, prefill, float(number) / 100)
    assert (failing.outstanding, failing.calls) == (0, 10)
    assert {least_delay(call_of("prefix"), fleet._replace(turn=turn)).engine_id for turn in range(2)} == {"1"}
    failing.refresh(100.0)
    assert (failing.calls, failing.context_tokens) == (0, 0.0)
    assert {least_delay(call_of("prefix"), fleet._replace(turn=turn)).engine_id for turn in range(2)} == {"0", "1"}


ENGINES = st.builds(
    Engine,
    st.sampled_from(("", "pre", "prefix", "preface")),
    st.lists(st.integers(0, 300), max_size=3).map(tuple),
    st.just(()),
    st.sampled_from((64, 100)),
    computed=st.sampled_from((0, 9_000, 30_000)),
).flatmap(
    lambda engine: st.lists(st.integers(1, 500), min_size=len(engine.waiting), max_size=8).map(
        lambda contexts: replace(engine, contexts=tuple(contexts))
    )
)


def seconds_by_iteration(engine: Engine, tokens: int) -> float:
    """The time in which prompts of `tokens` are computed, iteration by iteration."""
    seconds, decodes = 0.0, len(engine.contexts) - len(engine.waiting)
    while tokens > 0:
        taken = min(tokens, engine.batch_tokens - decodes)
        seconds += 0.010 + 0.001 * (taken + decodes)
        tokens -= taken
    return seconds


def cached_blocks(engine: Engine, prompt: str) -> int:
    common = next((n for n, (a, b) in enumerate(zip(engine.cached, prompt, strict=False)) if a != b), None)
    return min(len(engine.cached), len(prompt)) if common is None else common


def naive(engine: Engine, prompt: str, held: int, rate_s: float = COMING.rate_s) -> tuple[float, float]:
    """The delay on an engine that holds so many blocks, but for copies; and the part of it until the last token."""
    tokens, calls = 10 * len(prompt) + 1, len(engine.contexts)
    missed = tokens - 10 * held
    attention_s = 0.000_01 * tokens
    before_s = 0.010 + 0.001 * calls + 0.000_01 * sum(engine.contexts)
    after_s = 0.010 + 0.001 * (calls + 1) + 0.000_01 * (sum(engine.contexts) + tokens + OUTPUT_TOKENS / 2)
    queue_s, prefill_s = seconds_by_iteration(engine, sum(engine.waiting)), seconds_by_iteration(engine, missed)
    prefill_s += attention_s
    work_s = 0.001 * missed + attention_s
    others_s = calls * (work_s / 2 + OUTPUT_TOKENS / 2 * (after_s - before_s))
    others_s += 3 * rate_s * work_s * min(MOST_WAIT_S, queue_s + prefill_s / 2)
    answered_s = queue_s + prefill_s + OUTPUT_TOKENS * after_s
    return queue_s + prefill_s + answered_s + others_s, answered_s


def naive_of_all(engines: list[Engine], prompt: str, uses: int) -> list[float]:
    held = [cached_blocks(engine, prompt) for engine in engines]
    costs = [naive(engine, prompt, blocks) for engine, blocks in zip(engines, held, strict=True)]
    most = max(held)
    holders = [cost for cost, blocks in zip(costs, held, strict=True) if blocks == most]
    totals = [cost for cost, _ in costs]
    if most:
        best_s, answered_s = min(holders)
        served = uses / 60 * 4 * answered_s / (len(holders) + 1)
        for number, (engine, blocks) in enumerate(zip(engines, held, strict=True)):
            if blocks < most:
                lasting = max(0.0, 1 - 10 / uses) if uses else 0.0
                in_room = 1 + 4 * lasting * max(0.0, 1 - engine.prefill_share / 0.1)
                totals[number] -= served * in_room * max(0.0, best_s - naive(engine, prompt, most)[0])
    return totals


@given(engines=st.lists(ENGINES, min_size=1, max_size=5), turn=st.integers(0, 4), uses=st.sampled_from((0, 1, 50)))
def test_the_least_delay_of_all_engines(engines: list[Engine], turn: int, uses: int) -> None:
    costs = naive_of_all(engines, "prefix", uses)
    fleet = used(situation(*engines, turn=turn), uses)._replace(coming=lambda: COMING, compares_all=True)
    chosen = least_delay(call_of("prefix"), fleet).engine_id
    assert costs[int(chosen)] == pytest.approx(min(costs))
