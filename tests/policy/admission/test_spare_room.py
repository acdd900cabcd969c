"""Lines of batches run where calls for which somebody waits leave room."""

from math import inf

from plait.policy.admission.spare_room import AHEAD_S, DECODES, KEPT_S, SLOTS, SpareRoom, spare_lines
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.costs.engine_view import SMALL_S, EngineView
from plait.policy.costs.load import LoadLedger
from plait.policy.costs.prefill_queue import Prefill
from plait.policy.order import ONLINE_S
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.prefix.residency import Residency

COSTS = CostModel(PiecewiseLinear(((0, 0.01),), 1e-4), 0.0, 1e-6, 0.0, LongAttention())
"""An iteration of n new and c context tokens takes 10 ms + 0.1 ms n + 1 us c."""

LATER_S = 2 * ONLINE_S


def engine(slots: int = 8) -> EngineView:
    view = EngineView("engine", COSTS, LoadLedger(COSTS), Residency("engine", PrefixTree()))
    view.use_report(slots=slots, urgent_first=True)
    return view


def online(now_s: float = 0.0) -> Prefill:
    return Prefill(100, 0.01, 0.0, now_s)


def line() -> Prefill:
    return Prefill(100, 0.01, 0.0, 0.0, is_line=True)


def test_an_idle_engine_keeps_one_slot() -> None:
    view = engine()
    assert spare_lines(view, 100, LATER_S) == 7
    for _ in range(7):
        view.begin(100.0, line(), 0.0)
    assert spare_lines(view, 100, LATER_S) == 0
    assert spare_lines(engine(slots=0), 100, LATER_S) == SLOTS - 1


def test_calls_of_a_minute_ago_may_be_followed_by_others() -> None:
    view, prompt = engine(), online()
    view.begin(100.0, prompt, 0.0)
    view.compute(prompt, 0.1)
    view.end(100.0, prompt, 0.2)
    assert spare_lines(view, 10, ONLINE_S / 2) == 1
    assert spare_lines(view, 10, LATER_S) == 7


def test_a_running_call_counts_however_long_ago_it_came() -> None:
    view, prompt = engine(), online()
    view.begin(100.0, prompt, 0.0)
    view.compute(prompt, 0.1)
    assert spare_lines(view, 10, LATER_S) == 1


def test_no_line_joins_a_prompt_that_is_computed() -> None:
    view, prompt = engine(), online()
    view.begin(100.0, prompt, 0.0)
    assert spare_lines(view, 10, 1.0) == 0
    view.compute(prompt, 1.0)
    assert spare_lines(view, 10, 1.0) == 1


def test_iterations_of_other_calls_hardly_get_longer() -> None:
    view, prompt = engine(slots=1000), online()
    view.begin(1000.0, prompt, 0.0)
    view.compute(prompt, 0.1)
    most_s = COSTS.decode_iteration_s(1, 1000) + DECODES * COSTS.decode_iteration_s(1, 0)
    while spare_lines(view, 100, 1.0):
        view.begin(100.0, line(), 1.0)
    assert 0 < view.lines < 10
    more_s = COSTS.decode_iteration_s(2 + view.lines, view.context_tokens + 100)
    assert view.sent_iteration_s <= most_s < more_s
    view.end(100.0, line(), 2.0)
    assert spare_lines(view, 100, 2.0) == 1


def test_an_engine_without_our_scheduler_gets_small_prompts_only() -> None:
    view, prompt = engine(), online()
    view.use_report(slots=8)
    view.begin(100.0, prompt, 0.0)
    view.compute(prompt, 0.1)
    small = int(SMALL_S / 1e-4)
    assert spare_lines(view, small / 100, 1.0) == 1
    assert spare_lines(view, small + 100, 1.0) == 0
    view.end(100.0, prompt, 2.0)
    assert spare_lines(view, small + 100, LATER_S) == 7


def test_lines_count_for_nothing_that_others_are_judged_by() -> None:
    view, own = engine(), line()
    view.begin(100.0, own, 0.0)
    assert (len(view.queue), view.online_s) == (0, -inf)
    assert view.queue_s(1.0) == 0.0
    view.compute(own, 1.0)
    assert view.first_bytes.gap_s == 0.0
    assert view.computed_s(1.0) > 0.0, "decodes beside it took longer"
    view.end(100.0, own, 2.0)
    assert (view.calls, view.lines, view.line_tokens, view.context_tokens) == (0, 0, 0.0, 0.0)


def test_lines_of_other_gateways_are_told_from_their_calls() -> None:
    view = engine()
    view.begin_reported(100.0, None, LATER_S, is_line=True)
    assert spare_lines(view, 100, LATER_S) == 6
    view.begin_reported(100.0, None, LATER_S)
    assert spare_lines(view, 10, LATER_S) < 6
    view.end_reported(100.0, None, LATER_S)
    assert spare_lines(view, 10, LATER_S + 1.0) < 6
    assert spare_lines(view, 100, 2 * LATER_S) == 6
    view.end_reported(100.0, None, 2 * LATER_S, is_line=True)
    assert view.lines == 0


def filled(room: SpareRoom, tokens: float, kv_tokens: int | None, now_s: float = LATER_S) -> int:
    """How many lines may be sent one after the other."""
    first = room.lines
    while room.has(tokens, kv_tokens, now_s) and room.lines < 1_000:
        room.sent(tokens, now_s)
    return room.lines - first


def test_lines_leave_kv_for_calls_that_come() -> None:
    view = engine(slots=200)
    needed = 100 + view.ledger.mean_output_tokens
    assert filled(SpareRoom(view), 100, None) == 199
    assert filled(SpareRoom(view), 100, round(10 * needed)) == 9
    assert filled(SpareRoom(view), 100, 10) == 1, "a line alone always has room"
    others = engine(slots=200)
    for _ in range(4):
        others.begin_reported(needed, None, 0.0, is_line=True)
    assert filled(SpareRoom(others), 100, round(10 * needed)) == 5, "those of other gateways take some, too"


def test_lines_leave_the_kv_that_others_used_lately() -> None:
    view, prompt = engine(slots=200), online()
    room, needed = SpareRoom(view), 100 + view.ledger.mean_output_tokens
    kv_tokens = round(10 * needed)
    view.begin(5 * needed, prompt, 0.0)
    room.has(100, kv_tokens, 0.0)
    view.end(5 * needed, prompt, 1.0)
    assert filled(room, 100, kv_tokens) == 5
    for _ in range(5):
        room.ended(needed)
    assert filled(room, 100, kv_tokens, LATER_S + 2 * KEPT_S) == 9


def test_an_engine_that_serves_as_calls_come_has_few_prompts_to_compute() -> None:
    view = engine(slots=200)
    view.use_report(slots=200, urgent_first=False)
    room, prompt_s = SpareRoom(view), COSTS.added_s(1000, 0)[0]
    first = filled(room, 1000, None)
    assert first == int(AHEAD_S / prompt_s) + 1
    assert filled(room, 1000, None, LATER_S + 10.0) == first
