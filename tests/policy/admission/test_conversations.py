"""Conversations of one tenant take turns, and those with most waiting calls are known."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from plait.policy.admission.conversations import MOST_APART, Conversations, InTurn
from tests.policy.admission.asked_calls import Asked, asked, new_line, taken


def spoken(conversation: str, tokens: int = 100, number: int = 0) -> Asked:
    call = asked(tokens=tokens)
    call.conversation, call.number = conversation, number
    return call


def in_turn(*calls: Asked) -> InTurn[Asked]:
    queue = InTurn[Asked]()
    for number, call in enumerate(calls):
        call.number = number
        queue.add(call)
    return queue


def names(calls: list[Asked]) -> list[str]:
    return [call.conversation for call in calls]


# Turns.


def test_a_conversation_with_few_calls_does_not_wait_for_a_hundred_of_another() -> None:
    quiet = spoken("quiet", number=100)
    line = new_line(*(spoken("busy", number=number) for number in range(100)))
    taken(line, 10)
    line.push(quiet)
    assert quiet in taken(line, 2)


def test_turns_go_by_tokens() -> None:
    calls = [spoken(name, tokens) for _ in range(12) for name, tokens in (("long", 300), ("short", 100))]
    assert names(list(in_turn(*calls)))[:12].count("short") == 9


def test_each_of_many_conversations_is_looked_at_although_the_first_ones_are_deferred() -> None:
    calls = [spoken(str(number)) for number in range(20)]
    queue, looked_at = in_turn(*calls), list[str]()
    for _ in range(20):
        first = next(iter(queue))
        looked_at.append(first.conversation)
        queue.defer(first)
    assert looked_at == [str(number) for number in range(20)]


def test_calls_without_a_conversation_are_one() -> None:
    queue = in_turn(*(spoken("") for _ in range(10)), spoken("quiet"))
    assert names(list(queue))[:2] == ["", "quiet"]


def test_of_many_conversations_the_last_ones_go_together() -> None:
    calls = [spoken(str(number % 100)) for number in range(300)]
    queue = in_turn(*calls)
    assert sorted(names(list(queue)[:MOST_APART])) == sorted(str(number) for number in range(MOST_APART))
    for number, call in enumerate(calls):
        (queue.serve if number % 2 else queue.remove)(call)
    assert not queue


def test_conversations_with_a_call_at_a_time_go_in_the_order_in_which_they_came() -> None:
    """However much each was served before: they are agents, each of which waits for its answer."""
    queue, calls = InTurn[Asked](), [spoken(str(number % 5), 100 * (1 + number % 3), number) for number in range(40)]
    for call in calls[:5]:
        queue.add(call)
    for place, call in enumerate(calls):
        assert next(iter(queue)) is call
        queue.serve(call)
        if place + 5 < len(calls):
            queue.add(calls[place + 5])


def test_new_conversations_do_not_hold_up_an_old_one_for_ever() -> None:
    queue = in_turn(*(spoken("busy") for _ in range(10)))
    served = []
    for number in range(10, 110):
        queue.add(spoken(str(number), number=number))
        first = next(iter(queue))
        queue.serve(first)
        served.append(first.conversation)
    assert served.count("busy") == 10


class Oracle:
    """Looks for the next call among all that wait, in the order of joining."""

    def __init__(self) -> None:
        self.calls: list[Asked] = []
        self.times: dict[str, float] = {}
        self.present = 0.0

    def add(self, call: Asked) -> None:
        firsts = {one.conversation: one for one in reversed(self.calls)}
        if call.conversation not in firsts:
            before = [self.times[name] for name, one in firsts.items() if one.number < call.number]
            earliest = min((self.times[name] for name in firsts), default=self.present)
            self.times[call.conversation] = max(before, default=earliest) if call.is_back else self.present
        later = [one.number > call.number and one.conversation == call.conversation for one in self.calls]
        self.calls.insert(later.index(True) if call.is_back and any(later) else len(later), call)

    def serve(self, call: Asked) -> None:
        self.present += call.tokens / len({one.conversation for one in self.calls})
        self.times[call.conversation] += call.tokens
        self.calls.remove(call)

    def in_turn(self) -> list[Asked]:
        calls, times, found = self.calls[:], dict(self.times), []
        while calls:
            firsts = {call.conversation: call for call in reversed(calls)}
            first = min(firsts.values(), key=lambda one: (times[one.conversation], one.number))
            times[first.conversation] += first.tokens
            calls.remove(first)
            found.append(first)
        return found


EVENTS = st.tuples(
    st.sampled_from(("add", "add", "back", "serve", "remove", "defer")),
    st.sampled_from(("", "a", "b", "c")),
    st.integers(1, 500),
    st.integers(0, 30),
)


@given(st.lists(EVENTS, max_size=60))
@example([("add", "", 1, 0), ("add", "", 1, 0), ("defer", "", 1, 0), ("back", "", 1, 3)])
def test_the_order_is_that_of_the_oracle(events: list[tuple[str, str, int, int]]) -> None:
    queue, oracle = InTurn[Asked](), Oracle()
    for place, (what, name, tokens, which) in enumerate(events):
        waiting = oracle.in_turn()
        if what in {"add", "back"}:
            call = spoken(name, tokens, 100 * place if what == "add" else 100 * (place - which) + which + 1)
            call.is_back = what == "back"
            queue.add(call)
            oracle.add(call)
        elif waiting:
            call = waiting[0] if what == "serve" else waiting[which % len(waiting)]
            {"serve": queue.serve, "remove": queue.remove, "defer": queue.defer}[what](call)
            oracle.serve(call) if what == "serve" else oracle.calls.remove(call)
            if what == "defer":
                oracle.calls.append(call)
                times = [oracle.times[one] for one in {one.conversation for one in oracle.calls}]
                if len(times) > 1:
                    oracle.times[call.conversation] = max(times) + 1.0
        assert names(list(queue)) == names(oracle.in_turn())
        assert [call.number for call in queue] == [call.number for call in oracle.in_turn()]
        assert (len(queue), bool(queue)) == (len(oracle.calls), bool(oracle.calls))


# What waits.


def test_those_with_most_waiting_calls() -> None:
    made = Conversations()
    for name, calls in {"one": 2, "two": 3, "three": 3}.items():
        for _ in range(calls):
            made.waits("t", name)
    assert made.largest("t") == {"two", "three"}
    made.left("t", "two")
    assert made.largest("t") == {"three"}
    assert made.largest("other") == set()


def test_names_without_waiting_calls_are_forgotten() -> None:
    made = Conversations()
    for number in range(9):
        made.waits("t", str(number))
        made.left("t", str(number))
    made.check(())
    assert made.largest("t") == set()
