"""Lines of batches in an engine: after all other calls, and hardly any time beside them."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.order import ONLINE_S
from plait.policy.scheduling.lines import SLOWDOWN, LinesLast
from plait.policy.scheduling.plan import LocalCall, Plan
from tests.policy.scheduling.fake_engine import FakeEngine, decode, names, prompt, slo_scheduler
from tests.policy.scheduling.real_engine import CallSpec, call_specs, check_every_call_finishes

COSTS = CostModel(PiecewiseLinear(((0, 0.01),), 1e-5), 0.0, 0.0, 0.0, LongAttention())
"""An iteration of n tokens takes 10 ms + 0.01 ms n."""

DECODE_S = COSTS.decode_iteration_s(1, 0)


def scheduler() -> LinesLast:
    made = LinesLast(slo_scheduler(costs=None))
    made.expect(COSTS)
    return made


def line(name: str, tokens: int, computed: int = 0) -> LocalCall:
    return LocalCall(name, 0.0, tokens, computed, is_line=True)


def planned(engine: FakeEngine, now_s: float = 0.0, made: LinesLast | None = None) -> Plan:
    return (made or scheduler()).plan(now_s, engine.waiting, engine.running, engine)


def test_lines_alone_run_as_other_calls() -> None:
    engine = FakeEngine(waiting=[line("a", 600), line("b", 600)])
    assert names(planned(engine)) == [("a", 600), ("b", 400)]


def test_beside_a_decode_a_prompt_takes_little_time() -> None:
    engine = FakeEngine(running=[decode("online")], waiting=[line("a", 600)])
    made = scheduler()
    made.plan(0.0, [prompt("online", 10)], [], FakeEngine())
    (first, one), (second, tokens) = names(planned(engine, 1.0, made))
    assert (first, one, second) == ("online", 1, "a")
    assert COSTS.iteration_time_s([(1, 100), (tokens, 0)]) <= SLOWDOWN * COSTS.iteration_time_s([(1, 100)])


def test_beside_a_prompt_a_line_computes_nothing() -> None:
    engine = FakeEngine(waiting=[line("a", 600), prompt("online", 300)])
    assert names(planned(engine)) == [("online", 300)]


def test_a_line_that_was_begun_goes_on_after_all_others() -> None:
    begun, made = line("begun", 600), scheduler()
    made.plan(0.0, [begun], [], FakeEngine())
    begun.computed_tokens = 64
    engine = FakeEngine(running=[begun, decode("online")], waiting=[line("a", 600), prompt("next", 900)])
    assert names(planned(engine, 1.0, made)) == [("online", 1), ("next", 900)]
    engine.waiting.pop()
    assert [name for name, _ in names(planned(engine, 2.0, made))] == ["online", "begun"]


def test_decodes_of_lines_count_in_what_they_may_take() -> None:
    own = replace(decode("own"), is_line=True)
    made = scheduler()
    engine = FakeEngine(running=[decode("online"), own], waiting=[line("a", 600)])
    made.plan(0.0, [own, prompt("online", 10)], [], FakeEngine())
    alone = dict(names(planned(FakeEngine(running=[decode("online")], waiting=[line("a", 600)]), 1.0)))["a"]
    assert dict(names(planned(engine, 1.0, made)))["a"] < alone


def test_while_others_may_follow_a_line_alone_is_cut() -> None:
    made = scheduler()
    made.plan(0.0, [prompt("online", 10)], [], FakeEngine())
    engine = FakeEngine(waiting=[line("a", 600)])
    assert 0 < dict(names(planned(engine, 1.0, made)))["a"] < 600
    assert names(planned(engine, 2 * ONLINE_S, made)) == [("a", 600)]


def test_where_a_prompt_takes_long_whatever_its_size_the_time_for_it_is_saved() -> None:
    costs = replace(COSTS, step_s=3 * DECODE_S)
    made = LinesLast(slo_scheduler(costs=None))
    made.expect(costs)
    engine = FakeEngine(running=[decode("online")], waiting=[line("a", 600)])
    times_s = [number * DECODE_S for number in range(200)]
    began_s = [now_s for now_s in times_s if len(names(planned(engine, now_s, made))) == 2]
    assert 3 <= len(began_s) <= 200 * (SLOWDOWN - 1) / 2 + 2
    assert names(planned(engine, began_s[-1], made)) == [("online", 1), ("a", 600)], "the same again"


def test_lines_wait_while_others_lack_blocks() -> None:
    engine = FakeEngine(running=[decode("online")], waiting=[prompt("large", 900), line("a", 40)], free_blocks=20)
    assert names(planned(engine)) == [("online", 1)]


@given(call_specs, st.sets(st.integers(0, 13)))
def test_every_call_ends(specs: list[CallSpec], lines: set[int]) -> None:
    check_every_call_finishes(scheduler(), specs, lines)
