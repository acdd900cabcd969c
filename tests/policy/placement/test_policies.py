"""Placement, case by case, with numbers to check by hand.

A prompt is written with one letter a block, a block has 10 tokens, computing a token takes 1 ms and attention nothing:
a letter costs 10 ms. Engines are called a, b, c; all times are milliseconds. A case says what is where and what the
window remembers, which call comes, and what Algorithm 1 (choice) and Algorithm 2 (L, M and P of the chosen) make of it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.load import LoadLedger
from plait.policy.costs.situation import Situation
from plait.policy.placement.e2 import LoadCost, e2
from plait.policy.placement.policies import POLICIES, Policy, least_outstanding, round_robin
from plait.policy.prefix.block_hash import chain
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.prefix.residency import Residency
from plait.policy.types import Call, PlacementReason
from tests.invariants import check

BLOCK_TOKENS = 10
COSTS = CostModel(PiecewiseLinear(((0, 0.0),), 0.001), 0.0, 0.0, 0.0, LongAttention())
EXPLOIT, EXPLORE = PlacementReason.EXPLOIT, PlacementReason.EXPLORE


@dataclass(frozen=True)
class Past:
    """A call of the window: `missed` and `output` tokens make its part of L, its prompt shares nodes."""

    prompt: str = ""
    missed: int = 0
    output: int = 0
    running: bool = False


@dataclass(frozen=True)
class Engine:
    """An engine: its window, the prefixes its cache stored (least lately used first), then what it evicted (the last
    block of each). `runs` are stored blocks reported behind a parent. `free` tokens: None is not known.
    """

    past: tuple[Past, ...] = ()
    resident: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    runs: tuple[tuple[str, str], ...] = ()
    free: float | None = None
    outstanding: int = 0
    up: bool = True


@dataclass(frozen=True)
class Case:
    """`cost` is (L, M, P) of the chosen engine; `extra_tokens` of the prompt fill no block."""

    name: str
    engines: dict[str, Engine]
    call: str
    engine: str
    reason: PlacementReason
    cached: int
    cost: tuple[float, float, float]
    extra_tokens: int = 0


def busy(load_ms: int) -> tuple[Past, ...]:
    """A window with one call that cost so much and shares nothing."""
    return (Past("", load_ms),)


def hashes(prompt: str) -> array[int]:
    return chain([ord(letter) for letter in prompt], 1, 0)


def call_of(prompt: str, extra_tokens: int = 0) -> Call:
    tokens = len(prompt) * BLOCK_TOKENS + extra_tokens
    return Call("call", "model", tokens, BLOCK_TOKENS, hashes(prompt))


def build(engines: dict[str, Engine], call: Call, turn: int = 0) -> Situation:
    tree = PrefixTree()
    views = {engine_id: _view(engine_id, engine, tree) for engine_id, engine in engines.items()}
    check(tree)
    for view in views.values():
        check(view.residency)
    eligible = [views[engine_id] for engine_id, engine in engines.items() if engine.up]
    return Situation(tree.match(call.block_hashes), eligible, turn)


def _view(engine_id: str, engine: Engine, tree: PrefixTree) -> EngineView:
    ledger, residency = LoadLedger(COSTS, prior_output_tokens=0), Residency(engine_id, tree)
    ended = []
    for past in engine.past:
        leaf = tree.insert(hashes(past.prompt))
        entry = ledger.book(leaf, past.missed, len(past.prompt) * BLOCK_TOKENS, 0.0)
        residency.book(leaf)
        if not past.running:
            ledger.settle(entry, past.missed, past.output)
            ended.append(leaf)
    for prefix in engine.resident:
        residency.resident.store(None, hashes(prefix))
    for parent, run in engine.runs:
        residency.resident.store(hashes(parent)[-1], hashes(parent + run)[len(parent) :])
    for prefix in engine.evicted:
        residency.resident.remove(hashes(prefix)[-1])
    for leaf in ended:
        residency.unbook(leaf)
    return EngineView(engine_id, COSTS, ledger, residency, engine.free, engine.outstanding)


ALGORITHM_1 = [
    Case(
        "nothing is cached: explore, and of equal engines the first",
        {"a": Engine(), "b": Engine()},
        *("sqq", "a", EXPLORE, 0, (0, 0, 30)),
    ),
    Case(
        "a fleet of one takes every call",
        {"a": Engine(busy(5000))},
        *("sqq", "a", EXPLORE, 0, (5000, 0, 30)),
    ),
    Case(
        "30 saved against 10 to compute: exploit, though b is idle (510 against 40)",
        {"a": Engine(busy(500), resident=("sss",)), "b": Engine()},
        *("sssq", "a", EXPLOIT, 30, (500, 0, 10)),
    ),
    Case(
        "exactly half is cached: explore, where what is cached still makes a cheaper (30 against 40)",
        {"a": Engine(busy(10), resident=("ss",)), "b": Engine()},
        *("ssqq", "a", EXPLORE, 20, (10, 0, 20)),
    ),
    Case(
        "exactly half is cached, and the load outweighs it (50 against 40)",
        {"a": Engine(busy(30), resident=("ss",)), "b": Engine()},
        *("ssqq", "b", EXPLORE, 0, (0, 0, 40)),
    ),
    Case(
        "a token less than half to compute is enough to exploit",
        {"a": Engine(busy(500), resident=("ss",)), "b": Engine()},
        *("ssq", "a", EXPLOIT, 20, (500, 0, 19)),
        extra_tokens=9,
    ),
    Case(
        "of equal engines the one with the fewest outstanding calls",
        {"a": Engine(outstanding=2), "b": Engine(outstanding=1), "c": Engine(outstanding=1)},
        *("q", "b", EXPLORE, 0, (0, 0, 10)),
    ),
    Case(
        "a lower cost beats fewer outstanding calls",
        {"a": Engine(busy(1)), "b": Engine(outstanding=9)},
        *("q", "b", EXPLORE, 0, (0, 0, 10)),
    ),
    Case(
        "two holders: the lower load wins, an idle engine without the prefix does not count",
        {"a": Engine(busy(100), ("sss",)), "b": Engine(busy(50), ("sss",)), "c": Engine()},
        *("sssq", "b", EXPLOIT, 30, (50, 0, 10)),
    ),
    Case(
        "the last token is always computed: 4 blocks of 4 are cached, 3 count",
        {"a": Engine(resident=("ssss",))},
        *("ssss", "a", EXPLOIT, 30, (0, 0, 10)),
    ),
    Case(
        "with a token behind them all 4 count",
        {"a": Engine(resident=("ssss",))},
        *("ssss", "a", EXPLOIT, 40, (0, 0, 1)),
        extra_tokens=1,
    ),
    Case(
        "what a call on its way will leave there is expected",
        {"a": Engine((Past("sssr", 40, running=True),)), "b": Engine()},
        *("sssq", "a", EXPLOIT, 30, (40, 0, 10)),
    ),
    Case(
        "what only the window remembers is not cached",
        {"a": Engine((Past("sssr", 40),)), "b": Engine()},
        *("sssq", "b", EXPLORE, 0, (0, 0, 40)),
    ),
    Case(
        "cached by an engine that is not eligible counts as missed",
        {"a": Engine(resident=("sss",), up=False), "b": Engine(busy(5)), "c": Engine()},
        *("sssq", "c", EXPLORE, 0, (0, 0, 40)),
    ),
]

KEY_PORTION = [
    Case(
        "the longest node (dddddd, on a and b) decides, not the deepest (qq, on a): 30 to compute beat 110",
        {"a": Engine(busy(100), ("ddddddqq",)), "b": Engine(resident=("ddddddzz",))},
        *("ddddddqqx", "b", EXPLOIT, 60, (0, 0, 30)),
    ),
    Case(
        "the longest node is the deepest: only its holder is a candidate",
        {"a": Engine(busy(500), ("ssdddddd",)), "b": Engine(resident=("sszz",))},
        *("ssddddddq", "a", EXPLOIT, 80, (500, 0, 10)),
    ),
    Case(
        "of nodes of one length the deepest is the key portion",
        {"a": Engine(busy(500), ("ssdd",)), "b": Engine(resident=("sszz",))},
        *("ssddq", "a", EXPLOIT, 40, (500, 0, 10)),
    ),
    Case(
        "a holder that lost the tail pays for it in P: 30 against 40 + 10",
        {"a": Engine(busy(40), ("dddddd",)), "b": Engine(resident=("dddd",))},
        *("ddddddq", "b", EXPLOIT, 40, (0, 0, 30)),
    ),
    Case(
        "a holder that lost the tail pays for it in P: 30 against 10 + 10",
        {"a": Engine(busy(10), ("dddddd",)), "b": Engine(resident=("dddd",))},
        *("ddddddq", "a", EXPLOIT, 60, (10, 0, 10)),
    ),
    Case(
        "half of the node still makes a holder: 40 against 60 + 10",
        {"a": Engine(busy(60), ("dddddd",)), "b": Engine(resident=("dddddd",), evicted=("dddd",))},
        *("ddddddq", "b", EXPLOIT, 30, (0, 0, 40)),
    ),
    Case(
        "less than half does not",
        {"a": Engine(busy(60), ("dddddd",)), "b": Engine(resident=("dddddd",), evicted=("ddd",))},
        *("ddddddq", "a", EXPLOIT, 60, (60, 0, 10)),
    ),
    Case(
        "blocks reported behind a parent that the engine does not have count nothing",
        {"a": Engine(resident=("dddd",)), "b": Engine(runs=(("dddd", "qqqqqqqq"),))},
        *("ddddqqx", "a", EXPLOIT, 40, (0, 0, 30)),
    ),
    Case(
        "a later node whose prefix was evicted counts nothing",
        {"a": Engine(busy(90), ("ddddz",)), "b": Engine(resident=("ddddqqqqqq",), evicted=("dd",))},
        *("ddddqqx", "a", EXPLOIT, 40, (90, 0, 30)),
    ),
    Case(
        "a part that no eligible engine has is not matched and cannot be the key portion",
        {
            "a": Engine(busy(90), ("sss",)),
            "b": Engine(busy(10), ("sss",)),
            "c": Engine(resident=("sssddddd",), up=False),
        },
        *("sssdd", "b", EXPLOIT, 30, (10, 0, 20)),
    ),
]

# Two calls in the window cost 10 each (L = 20) and generate nothing; the call misses 30 of 30 and nothing is free, so
# three blocks have to go.
ALGORITHM_2 = [
    Case(
        "L is every call's prefill and a decode of the mean output: 200 + 100 + 2 x (30 + 10) / 2",
        {"a": Engine((Past("", 200, 30), Past("", 100, 10)))},
        *("q", "a", EXPLORE, 0, (340, 0, 10)),
    ),
    Case(
        "a call on its way counts with the mean output of those that ended: 200 + 100 + 2 x 30",
        {"a": Engine((Past("", 200, 30), Past("", 100, running=True)))},
        *("q", "a", EXPLORE, 0, (360, 0, 10)),
    ),
    Case(
        "evicting what both calls share costs a 30 x 2/2; b evicts what nobody shares",
        {
            "a": Engine((Past("vvvv", 10), Past("vvvv", 10)), ("vvvv",), free=0),
            "b": Engine((Past("", 20), Past("", 20)), ("wwww",), free=0),
        },
        *("qqq", "b", EXPLORE, 0, (40, 0, 30)),
    ),
    Case(
        "until b's load outweighs that: 20 + 30 + 30 against 60 + 30",
        {
            "a": Engine((Past("vvvv", 10), Past("vvvv", 10)), ("vvvv",), free=0),
            "b": Engine((Past("", 30), Past("", 30)), ("wwww",), free=0),
        },
        *("qqq", "a", EXPLORE, 0, (20, 30, 30)),
    ),
    Case(
        "half of the calls share it: 30 x 1/2",
        {"a": Engine((Past("vvvv", 10), Past("", 10)), ("vvvv",), free=0)},
        *("qqq", "a", EXPLORE, 0, (20, 15, 30)),
    ),
    Case(
        "no more goes than is there",
        {"a": Engine((Past("vv", 10), Past("vv", 10)), ("vv",), free=0)},
        *("qqq", "a", EXPLORE, 0, (20, 20, 30)),
    ),
    Case(
        "the least lately used goes first: uuu, which nobody shares",
        {"a": Engine((Past("vvv", 10), Past("vvv", 10)), ("uuu", "vvv"), free=0)},
        *("qqq", "a", EXPLORE, 0, (20, 0, 30)),
    ),
    Case(
        "the least lately used goes first: vvv, which both share",
        {"a": Engine((Past("vvv", 10), Past("vvv", 10)), ("vvv", "uuu"), free=0)},
        *("qqq", "a", EXPLORE, 0, (20, 30, 30)),
    ),
    Case(
        "a whole node and a part of the next: uuu at 30 x 1/2, then two blocks of vvv at 20 x 1/2",
        {"a": Engine((Past("uuu", 10), Past("vvv", 10)), ("uuu", "vvv"), free=0)},
        *("qqqqq", "a", EXPLORE, 0, (20, 25, 50)),
    ),
    Case(
        "free tokens are used first: 30 - 20, so one block at 10 x 2/2",
        {"a": Engine((Past("vvv", 10), Past("vvv", 10)), ("vvv",), free=20)},
        *("qqq", "a", EXPLORE, 0, (20, 10, 30)),
    ),
    Case(
        "a token too few takes a whole block",
        {"a": Engine((Past("vvv", 10), Past("vvv", 10)), ("vvv",), free=29.5)},
        *("qqq", "a", EXPLORE, 0, (20, 10, 30)),
    ),
    Case(
        "with room for all nothing goes",
        {"a": Engine((Past("vvv", 10), Past("vvv", 10)), ("vvv",), free=30)},
        *("qqq", "a", EXPLORE, 0, (20, 0, 30)),
    ),
    Case(
        "where free room is not known no eviction is foreseen",
        {"a": Engine((Past("vvv", 10), Past("vvv", 10)), ("vvv",))},
        *("qqq", "a", EXPLORE, 0, (20, 0, 30)),
    ),
    Case(
        "the output needs room too: 30 + (20 + 0) / 2 - 20 is two blocks; L = 20 + 2 x 10",
        {"a": Engine((Past("vvv", 10, 20), Past("vvv", 10)), ("vvv",), free=20)},
        *("qqq", "a", EXPLORE, 0, (40, 20, 30)),
    ),
    Case(
        "the call's own matched path is not a victim: only zz goes, 20 x 1/2",
        {"a": Engine((Past("ss", 10), Past("zz", 10)), ("ss", "zz"), free=0)},
        *("ssqq", "a", EXPLORE, 20, (20, 10, 20)),
    ),
    Case(
        "nor is what a running call uses: vvv of the ended call goes",
        {"a": Engine((Past("uuu", 10, running=True), Past("vvv", 10)), ("uuu", "vvv"), free=0)},
        *("qqq", "a", EXPLORE, 0, (20, 15, 30)),
    ),
    Case(
        "leaves before what they hang from: of ss and its tails, tt and uu go (20 x 1/3 each)",
        {"a": Engine((Past("sstt", 10), Past("ssuu", 10), Past("ss", 10)), ("sstt", "ssuu"), free=0)},
        *("qqqq", "a", EXPLORE, 0, (30, 20 / 3 + 20 / 3, 40)),
    ),
    Case(
        "exploiting evicts as well: 5 + 10 x 1/1 + 10 on the holder that is full against 10 + 10",
        {
            "a": Engine((Past("vv", 5),), ("vv", "sss"), free=0),
            "b": Engine(busy(10), ("sss",), free=10),
        },
        *("sssq", "b", EXPLOIT, 30, (10, 0, 10)),
    ),
]


@pytest.mark.parametrize("case", ALGORITHM_1 + KEY_PORTION + ALGORITHM_2, ids=lambda case: case.name)
def test_e2(case: Case) -> None:
    call = call_of(case.call, case.extra_tokens)
    placement = e2(call, build(case.engines, call))
    assert (placement.engine_id, placement.reason) == (case.engine, case.reason)
    assert placement.cached_tokens == case.cached
    assert placement.missed_tokens == call.prompt_tokens - case.cached
    assert isinstance(placement.cost, LoadCost)
    seconds = (placement.cost.window_s, placement.cost.eviction_s, placement.cost.prefill_s)
    assert [second * 1000 for second in seconds] == pytest.approx(case.cost)
    assert placement.cost.total_s == pytest.approx(sum(case.cost) / 1000)


@pytest.mark.parametrize(("turn", "engine"), [(0, "a"), (1, "b"), (2, "c"), (3, "a")])
def test_round_robin_takes_each_engine_in_turn(turn: int, engine: str) -> None:
    call = call_of("sssq")
    engines = {"a": Engine(outstanding=5), "b": Engine(resident=("sss",)), "c": Engine(busy(9))}
    placement = round_robin(call, build(engines, call, turn))
    assert (placement.engine_id, placement.reason) == (engine, PlacementReason.ROUND_ROBIN)
    assert placement.cached_tokens == (30 if engine == "b" else 0), "expected where it goes, though not asked for"
    assert placement.cost is None


@pytest.mark.parametrize(
    ("outstanding", "turn", "engine"),
    [((3, 1, 2), 0, "b"), ((3, 1, 2), 1, "b"), ((1, 2, 1), 0, "a"), ((1, 2, 1), 1, "c"), ((1, 2, 1), 2, "a")],
)
def test_least_outstanding_takes_equals_in_turn(outstanding: tuple[int, ...], turn: int, engine: str) -> None:
    call = call_of("sssq")
    engines = {name: Engine(resident=("sss",), outstanding=n) for name, n in zip("abc", outstanding, strict=True)}
    placement = least_outstanding(call, build(engines, call, turn))
    assert (placement.engine_id, placement.reason) == (engine, PlacementReason.LEAST_OUTSTANDING)
    assert (placement.cached_tokens, placement.missed_tokens) == (30, 10)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_prompt_shorter_than_a_block_goes_somewhere(policy: Policy) -> None:
    call = call_of("", extra_tokens=7)
    placement = policy.place(call, build({"a": Engine(), "b": Engine()}, call))
    assert (placement.engine_id, placement.cached_tokens, placement.missed_tokens) == ("a", 0, 7)
