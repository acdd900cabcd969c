"""Multi-resource selection: worked examples of AccelGen's algorithm 2."""

from __future__ import annotations

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.chunking import NO_TIMES, Budget
from plait.policy.scheduling.plan import Plan
from plait.policy.scheduling.selection import WINDOW_CALLS, select_by_distance, select_in_order
from tests.policy.scheduling.fake_engine import COSTS, FakeEngine, moment, names, prompt


def candidates(*sizes: int, gap_s: float = 0.0, **more: bool) -> list[Candidate]:
    """Calls of so many tokens, named by their position, each with `gap_s` more remaining time."""
    return [
        Candidate(prompt(str(at), size), size, 0, waits=True, remaining_s=at * gap_s, **more)
        for at, size in enumerate(sizes)
    ]


def batch(engine: FakeEngine) -> Batch:
    return Batch(Budget(engine.max_batch_tokens, NO_TIMES), engine, engine.max_running_calls)


def picked(batch: Batch) -> list[tuple[str, int]]:
    return names(Plan((), tuple(batch.picks.items())))


def test_the_nearest_to_what_is_left_goes_first() -> None:
    engine = FakeEngine(max_batch_tokens=100, free_blocks=25)
    filled = batch(engine)
    # 70 is nearest to (100 tokens, 25 blocks), then 28 to what is left; 20 does not fit whole any more.
    select_by_distance(moment(engine), filled, candidates(40, 70, 20, 28))
    assert picked(filled)[:2] == [("1", 70), ("3", 28)]


def test_both_resources_count() -> None:
    # Of two prompts with 60 tokens to compute the one behind 40 cached tokens needs 25 blocks instead of 15.
    engine = FakeEngine(max_batch_tokens=100, free_blocks=26, cached={"1": 40})
    two = [Candidate(prompt(str(at), 60 + cached), 60, cached, True, 0.0) for at, cached in enumerate((0, 40))]
    filled = batch(engine)
    select_by_distance(moment(engine), filled, two)
    assert picked(filled) == [("1", 60)]


def test_who_fits_nobody_whole_is_cut_where_the_budget_ends() -> None:
    engine = FakeEngine(max_batch_tokens=100)
    filled = batch(engine)
    select_by_distance(moment(engine), filled, candidates(80, 90, 30))
    assert sum(tokens for _, tokens in picked(filled)) == 100
    assert picked(filled) == [("1", 90), ("0", 10)], "the first in line of those left"


def test_a_window_goes_before_the_next() -> None:
    engine = FakeEngine(max_batch_tokens=100)
    filled = batch(engine)
    select_by_distance(moment(engine), filled, candidates(50, 60, 100, gap_s=0.5))
    assert picked(filled) == [("1", 60), ("0", 40)], "the one of 100 is a second behind"


def test_everything_is_taken_where_there_is_room() -> None:
    engine = FakeEngine(max_running_calls=500)
    filled = batch(engine)
    select_by_distance(moment(engine), filled, candidates(*[2] * (3 * WINDOW_CALLS), gap_s=0.1))
    assert len(filled.picks) == 3 * WINDOW_CALLS


def test_a_prompt_starts_only_where_all_of_it_has_blocks() -> None:
    engine = FakeEngine(max_batch_tokens=50, free_blocks=20)
    filled = batch(engine)
    select_in_order(moment(engine), filled, candidates(100, 60))
    assert picked(filled) == [("1", 50)], "100 tokens are 25 blocks, 60 are 15"
    assert (filled.free_blocks, filled.unreserved_blocks) == (20 - 13, 20 - 15)


def test_a_running_long_prompt_is_cut_where_the_blocks_end() -> None:
    engine = FakeEngine(free_blocks=10, running=[prompt("0", 100)])
    filled = batch(engine)
    begun = Candidate(engine.running[0], 100, 0, waits=False, is_long=True)
    select_in_order(moment(engine), filled, [begun])
    assert picked(filled) == [("0", 40)]


def test_slots_limit_the_waiting_only() -> None:
    engine = FakeEngine(max_running_calls=1, running=[prompt("begun", 5)])
    filled = Batch(Budget(100, NO_TIMES), engine, free_slots=0)
    select_in_order(moment(engine), filled, [*candidates(5), Candidate(engine.running[0], 5, 0, waits=False)])
    assert picked(filled) == [("begun", 5)]


def test_who_completes_its_prompt_binds_the_iteration() -> None:
    engine = FakeEngine()
    filled = Batch(Budget(1000, COSTS), engine, free_slots=5)
    first, second = candidates(100, 500)
    first.due_s = 0.04  # 10 ms + 0.1 ms n: 300 tokens
    select_in_order(moment(engine), filled, [first, second])
    assert picked(filled) == [("0", 100), ("1", 200)]


def test_who_is_late_anyway_does_not() -> None:
    engine = FakeEngine()
    filled = Batch(Budget(1000, COSTS), engine, free_slots=5)
    first, second = candidates(100, 500)
    first.due_s = 0.015
    select_in_order(moment(engine), filled, [first, second])
    assert picked(filled) == [("0", 100), ("1", 500)]


def test_the_reserve_is_left_and_can_extend_a_cut_prompt_later() -> None:
    engine = FakeEngine(max_batch_tokens=100)
    filled = batch(engine)
    filled.reserve_tokens = 10
    (only,) = candidates(200)
    select_in_order(moment(engine), filled, [only])
    assert picked(filled) == [("0", 90)]
    filled.reserve_tokens = 0
    filled.extend(only)
    assert picked(filled) == [("0", 100)]
    assert filled.free_blocks == engine.free_blocks - 25


def test_a_cut_prompt_that_is_completed_later_binds_the_iteration() -> None:
    engine = FakeEngine()
    filled = Batch(Budget(1000, COSTS), engine, free_slots=5)
    filled.reserve_tokens = 950
    first, second = candidates(100, 500)
    first.due_s = 0.04  # 10 ms + 0.1 ms n: 300 tokens
    select_in_order(moment(engine), filled, [first])
    assert picked(filled) == [("0", 50)]
    filled.reserve_tokens = 0
    filled.extend(first)
    select_in_order(moment(engine), filled, [second])
    assert picked(filled) == [("0", 100), ("1", 200)]


def test_the_floor_goes_beyond_the_limit_but_not_the_maximum() -> None:
    engine = FakeEngine()
    filled = Batch(Budget(1000, COSTS), engine, free_slots=5)
    filled.budget.take_decodes(990, 0)
    filled.budget.limit_s, filled.floor_tokens = 0.05, 50
    select_in_order(moment(engine), filled, candidates(30))
    assert picked(filled) == [("0", 10)]
