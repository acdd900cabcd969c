"""The prompts that wait in an engine: their sums, what has been computed, and how long a new one waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.policy.placement.prefill_queue import MOST_PROGRESS, Prefill, PrefillQueue


def prefill(tokens: int, booked_s: float = 0.0, *, is_streamed: bool = True) -> Prefill:
    return Prefill(tokens, tokens / 1000, tokens / 10_000, booked_s, is_streamed)


def test_the_oldest_prompt_makes_progress_but_is_never_done_before_its_first_byte() -> None:
    queue = PrefillQueue()
    first, second = prefill(100), prefill(200, 0.01)
    queue.add(first)
    queue.add(second)
    assert (queue.progress_s(0.04), queue.progress_s(9.0)) == (0.04, MOST_PROGRESS * 0.1)
    queue.computed(first, 0.11)
    assert (queue.tokens, len(queue), round(queue.progress_s(0.15), 6)) == (200, 1, 0.04)
    queue.computed(second, 0.4)
    assert (queue.tokens, queue.attention_s, queue.progress_s(1.0), queue.wait_s(1.0)) == (0, 0.0, 0.0, 0.0)


def test_a_prefill_whose_end_nothing_shows_ends_as_predicted() -> None:
    queue = PrefillQueue()
    for tokens in (100, 200):
        queue.add(prefill(tokens, is_streamed=False))
    assert [round(queue.wait_s(now_s), 6) for now_s in (0.0, 0.2, 0.31)] == [0.3, 0.2, 0.0]


def test_the_pace_of_first_bytes_tells_how_long_the_queue_is() -> None:
    queue = PrefillQueue()
    calls = [prefill(10) for _ in range(6)]
    for call in calls:
        queue.add(call)
    for number, call in enumerate(calls[:3]):
        queue.computed(call, 2.0 * number)
    assert queue.wait_s(4.0) == 3 * 2.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 500), st.booleans(), st.floats(0, 1)), max_size=60))
def test_the_sums_are_those_of_what_waits(events: list[tuple[int, int, bool, float]]) -> None:
    queue, there, now_s = PrefillQueue(), list[Prefill](), 0.0
    for what, tokens, is_streamed, passed_s in events:
        now_s += passed_s
        if what < 2:
            there.append(prefill(tokens, now_s, is_streamed=is_streamed))
            queue.add(there[-1])
        elif there:
            one = there.pop(tokens % len(there))
            queue.computed(one, now_s) if one.is_streamed and what == 2 else queue.leave(one, now_s)
        queue.expire(now_s)
        queue.check()
    for one in there:
        queue.leave(one, now_s)
    assert (queue.tokens, len(queue)) == (0, 0)
