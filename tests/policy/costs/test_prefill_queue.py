"""The prompts that an engine was sent or will be sent: their sums, what has been computed, and what ends by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from plait.policy.costs.prefill_queue import MOST_PROGRESS, Prefill, PrefillQueue
from tests.invariants import check


def prefill(
    tokens: int,
    *,
    is_streamed: bool = True,
    due_s: float = inf,
    is_small: bool = False,
    tenant: str = "",
    is_own: bool = True,
) -> Prefill:
    """Its times have few binary digits, so all sums are exact."""
    times = tokens / 1024, tokens / 8192, 0.0
    return Prefill(tokens, *times, is_streamed, due_s < inf, due_s, is_small, tenant, is_own)


def new_queue(*sent: Prefill, held: tuple[Prefill, ...] = ()) -> PrefillQueue:
    """All were sent at 0."""
    queue = PrefillQueue()
    for one in (*sent, *held):
        queue.add(one)
    for one in sent:
        queue.send(one, 0.0)
    check(queue)
    return queue


# What is computed.


def test_the_oldest_prompt_makes_progress_but_is_never_done_before_its_first_byte() -> None:
    first, second = prefill(1024), prefill(2048)
    queue = new_queue(first, second)
    assert (queue.progress_s(0.5), queue.progress_s(9.0)) == (0.5, MOST_PROGRESS * 1.0)
    queue.leave(first, 1.25)
    assert (queue.tokens, len(queue), queue.progress_s(1.75)) == (2048, 1, 0.5)
    queue.leave(second, 4.0)
    assert (queue.tokens, queue.attention_s, queue.progress_s(9.0), len(queue)) == (0, 0.0, 0.0, 0)


def test_what_waits_in_the_gateway_makes_no_progress() -> None:
    waiting = prefill(1024)
    queue = new_queue(held=(waiting,))
    assert (queue.progress_s(9.0), queue.most_progress_s, len(queue)) == (0.0, 0.0, 1)
    queue.send(waiting, 9.0)
    assert (waiting.sent_s, queue.progress_s(9.25)) == (9.0, 0.25)


def test_what_was_sent_is_a_part_of_what_was_placed() -> None:
    first, second = prefill(1024), prefill(2048)
    queue = new_queue(first, held=(second,))
    assert (queue.unsent, queue.sent, len(queue)) == (1, 1, 2)
    assert (queue.tokens, queue.sent_tokens) == (3072, 1024)
    assert (queue.attention_s, queue.sent_attention_s) == (0.375, 0.125)
    queue.send(second, 0.5)
    assert (queue.unsent, queue.sent, queue.sent_tokens, queue.sent_attention_s) == (0, 2, 3072, 0.375)
    assert queue.progress_s(0.75) == 0.75, "the first one goes on"


def test_a_call_that_does_not_wait_any_more_leaves_once() -> None:
    first, second, third = prefill(1024), prefill(512), prefill(256)
    queue = new_queue(first, second, held=(third,))
    for _ in range(2):
        queue.leave(third, 0.5)
        assert (queue.tokens, queue.unsent, queue.progress_s(0.5)) == (1536, 0, 0.5)
    for _ in range(2):
        queue.leave(first, 0.75)
        assert (queue.tokens, queue.sent_tokens, queue.progress_s(1.0)) == (512, 512, 0.25)
    check(queue)


# What ends without an event.


def test_a_prefill_whose_end_nothing_shows_ends_as_predicted() -> None:
    queue = new_queue(*(prefill(tokens, is_streamed=False) for tokens in (1024, 2048)))
    assert queue.expires_s == 1.0
    left = []
    for now_s in (0.75, 1.0, 2.75, 3.0):
        queue.expire(now_s)
        left.append((queue.sent_tokens, queue.expires_s))
    assert left == [(3072, 1.0), (2048, 3.0), (2048, 3.0), (0, inf)]
    assert (queue.expires_s, len(queue)) == (inf, 0)


def test_its_time_begins_when_it_is_sent_and_comes_after_what_was_sent_before() -> None:
    streamed, whole = prefill(1024), prefill(512, is_streamed=False)
    queue = new_queue(held=(whole, streamed))
    queue.expire(100.0)
    assert (queue.tokens, queue.expires_s) == (1536, inf), "in the gateway nothing ends by itself"
    queue.send(streamed, 100.0)
    queue.send(whole, 100.25)
    assert queue.expires_s == 101.75
    queue.leave(streamed, 100.5)
    queue.expire(101.5)
    assert queue.sent == 1, "what was predicted stays"
    queue.expire(101.75)
    assert not len(queue)


def test_a_prefill_that_was_given_up_does_not_keep_later_ones() -> None:
    long, short = prefill(10_240, is_streamed=False), prefill(1024, is_streamed=False)
    queue = new_queue(long)
    queue.leave(long, 1.0)
    queue.add(short)
    queue.send(short, 1.0)
    assert queue.expires_s == 2.0
    queue.expire(2.0)
    assert not len(queue)


# Whose they are.


def test_what_others_have_sent_leaves_the_gateway_its_part_of_the_time() -> None:
    own, others = prefill(1024), prefill(3072, is_own=False)
    queue = new_queue(own, others, held=(prefill(512),))
    assert queue.own_share == 0.25
    queue.leave(own, 1.0)
    assert queue.own_share == 0.0
    queue.leave(others, 4.0)
    assert queue.own_share == 1.0, "of nothing it has all"
    check(queue)


# What is served first.


def test_a_call_that_gets_or_loses_a_promise_counts_anew_wherever_it_is() -> None:
    sent, held = prefill(1024, due_s=8.0), prefill(512)
    queue = new_queue(sent, held=(held,))
    assert (queue.on_time_tokens, queue.tokens_of) == (1024, [1024, 0, 0])
    queue.mark(held, 8.0)
    queue.mark(held, 8.0)
    queue.mark(sent, inf)
    assert (queue.on_time_tokens, queue.tokens_of) == (512, [0, 0, 1024])
    queue.send(held, 1.0)
    assert (queue.on_time_tokens, queue.tokens_of) == (512, [512, 0, 1024])
    queue.leave(held, 2.0)
    queue.mark(held, inf)
    assert (queue.on_time_tokens, held.is_on_time) == (0, False)
    check(queue)


def test_a_prompt_that_cannot_be_computed_in_time_any_more_is_late() -> None:
    large, small, held = prefill(2048, due_s=5.0), prefill(512, due_s=4.0, is_small=True), prefill(1024, due_s=3.0)
    queue = new_queue(large, small, held=(held,))
    found = []
    for now_s in (1.5, 2.0, 3.0, 3.5):
        assert queue.late_s >= now_s
        queue.find_late(now_s)
        found.append((queue.on_time_tokens, list(queue.tokens_of)))
        check(queue)
    assert found == [(3584, [2560, 0, 0]), (2560, [2560, 0, 0]), (512, [512, 0, 2048]), (0, [0, 512, 2048])]
    assert queue.late_s == inf


def test_a_later_promise_replaces_the_one_that_was_missed() -> None:
    one = prefill(1024, due_s=2.0)
    queue = new_queue(one)
    queue.mark(one, 6.0)
    queue.find_late(1.5)
    assert (queue.on_time_tokens, queue.late_s) == (1024, 5.0)
    queue.find_late(5.0)
    assert (queue.on_time_tokens, queue.tokens_of) == (0, [0, 0, 1024])


def test_what_others_promised_is_on_time_as_long_as_it_is_there() -> None:
    one = Prefill(1024, 1.0, 0.0, 0.0, is_on_time=True, is_own=False)
    queue = new_queue(one)
    queue.find_late(100.0)
    assert (queue.on_time_tokens, queue.late_s) == (1024, inf)


def test_what_waits_in_the_engine_is_behind_the_oldest_prompt_that_nothing_goes_before() -> None:
    small, first, second = prefill(64, is_small=True), prefill(2048), prefill(1024)
    queue = new_queue(small, first, second)
    assert queue.behind() == (1088, 0.1328125)
    queue.leave(first, 1.0)
    assert queue.behind() == (64, 0.0078125)
    queue.leave(second, 2.0)
    assert queue.behind() == (64, 0.0078125), "it may not have begun"


def test_prompts_in_the_engine_are_counted_by_tenant() -> None:
    first, second, held = prefill(1, tenant="a"), prefill(1, tenant="b"), prefill(1, tenant="c")
    queue = new_queue(first, second, held=(held,))
    assert set(queue.tenants) == {"a", "b"}
    queue.leave(second, 1.0)
    assert set(queue.tenants) == {"a"}


# At random.


@dataclass
class Oracle:
    """The prefills by where they are, those that were sent in this order. `ends` are those that nothing shows."""

    held: list[Prefill] = field(default_factory=list)
    sent: list[Prefill] = field(default_factory=list)
    ends: dict[Prefill, float] = field(default_factory=dict)

    @property
    def all(self) -> list[Prefill]:
        return [*self.held, *self.sent]

    def send(self, one: Prefill, now_s: float) -> None:
        self.held.remove(one)
        self.sent.append(one)
        if not one.is_streamed:
            self.ends[one] = now_s + sum(prefill.time_s for prefill in self.sent)

    def leave(self, one: Prefill) -> None:
        (self.held if one in self.held else self.sent).remove(one)

    def expire(self, found: set[Prefill], now_s: float) -> None:
        """`found` have not ended. None ends before its time; each ends then if those sent before it have ended."""
        latest_s = -inf
        for one, end_s in self.ends.items():
            latest_s = max(latest_s, end_s)
            assert one in found or one not in self.sent or end_s <= now_s
            assert one not in found or latest_s > now_s
        self.sent = [one for one in self.sent if one in found or one not in self.ends]
        assert found == set(self.sent)


EVENTS = st.tuples(
    st.sampled_from(("add", "add", "send", "send", "leave", "mark", "wait")),
    st.integers(0, 2000),
    st.booleans(),
    st.sampled_from((inf, 0.5, 1.0, 2.0)),
    st.integers(0, 64),
)
"""What happens, a number, whether it is streamed, by when it is due, and the 64ths of a second that pass before."""


@given(st.lists(EVENTS, max_size=80))
def test_the_sums_are_those_of_what_waits(events: list[tuple[str, int, bool, float, int]]) -> None:
    queue, oracle, now_s = PrefillQueue(), Oracle(), 0.0
    for what, number, is_streamed, due_s, passed in events:
        now_s += passed / 64
        queue.expire(now_s)
        oracle.expire(set(queue._sent), now_s)
        if what == "add":
            one = prefill(
                number,
                is_streamed=is_streamed,
                due_s=now_s + due_s,
                is_small=number < 500,
                tenant="ab"[number % 2],
                is_own=number % 3 > 0,
            )
            oracle.held.append(one)
            queue.add(one)
        elif what == "send" and oracle.held:
            one = oracle.held[number % len(oracle.held)]
            queue.send(one, now_s)
            oracle.send(one, now_s)
        elif what in {"leave", "mark"} and oracle.all:
            one = oracle.all[number % len(oracle.all)]
            if what == "leave":
                queue.leave(one, now_s)
                oracle.leave(one)
            else:
                queue.mark(one, now_s + due_s)
        queue.find_late(now_s)
        check(queue)
        check_sums(queue, oracle, now_s)
    for one in oracle.all:
        queue.leave(one, now_s)
    assert (queue.tokens, queue.attention_s, queue.sent_attention_s, len(queue)) == (0, 0.0, 0.0, 0)


def check_sums(queue: PrefillQueue, oracle: Oracle, now_s: float) -> None:
    assert (queue.unsent, queue.sent, len(queue)) == (len(oracle.held), len(oracle.sent), len(oracle.all))
    assert queue.tokens == sum(one.tokens for one in oracle.all)
    assert queue.attention_s == sum(one.attention_s for one in oracle.all)
    assert queue.sent_tokens == sum(one.tokens for one in oracle.sent)
    assert queue.sent_attention_s == sum(one.attention_s for one in oracle.sent)
    on_time = {one for one in oracle.all if one.due_s < inf and now_s < one.due_s - one.time_s}
    assert queue.on_time_tokens == sum(one.tokens for one in on_time)
    assert queue.tokens_of[0] == sum(one.tokens for one in on_time.intersection(oracle.sent))
    own_s, sent_s = (sum(one.time_s for one in oracle.sent if one.is_own or is_all) for is_all in (False, True))
    assert queue.own_share == (own_s / sent_s if sent_s else 1.0)
    assert queue.expires_s < inf or not any(one in oracle.ends for one in oracle.sent)
    most_s = MOST_PROGRESS * oracle.sent[0].time_s if oracle.sent else 0.0
    assert 0.0 <= queue.progress_s(now_s) <= queue.most_progress_s == most_s
    assert not oracle.sent or queue.progress_s(now_s) <= now_s - oracle.sent[0].sent_s
