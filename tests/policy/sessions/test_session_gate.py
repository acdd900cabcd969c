"""Which sessions are held, for how long, and who goes first."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plait.policy.sessions import known
from plait.policy.sessions.session_gate import CHAT_SHARE, MOST_AWAY_S, MOST_HELD_S, Turn
from plait.policy.types import Slo
from tests.invariants import check
from tests.policy.sessions.gates import Gate, arrival

KEPT_S = 0.070 * 100 / (2 * 60)
"""A context of 60 tokens takes 70 ms to compute. Of two engines with 100 tokens together it has 60 %."""


def test_an_open_gate_holds_nobody() -> None:
    gate = Gate(is_closed=False)
    assert not any(gate.come(f"{number}aaaaa", f"{number}").is_held for number in range(5))


def test_sessions_of_which_the_contexts_do_not_fit_wait_by_birth() -> None:
    gate = Gate()
    first = gate.come("aaaaaa", "a")
    second, third = gate.come("bbbbbb", "b", 1.0), gate.come("ccccc", "c", 2.0)
    assert not first.is_held
    assert second.is_held
    assert third.is_held, "nobody overtakes, even if there is room"
    assert gate.end(first, 3.0) == [], "the first session is thinking"
    assert gate.free(3.0 + 0.9 * KEPT_S) == []
    assert gate.free(3.0 + 1.1 * KEPT_S) == [second], "keeping the context has cost as much as computing it again"
    assert gate.expired == 1
    assert gate.end(second, 4.0) == []
    assert gate.free(5.0) == [third]


def test_a_live_session_passes() -> None:
    gate = Gate()
    gate.end(gate.come("aaaaaa", "a"), 1.0)
    held = gate.come("bbbbbb", "b", 2.0)
    turn = gate.come("aaaaaaaa", "a", 100.0)
    assert (turn.is_held, held.is_held) == (False, True)
    assert gate.end(turn, 101.0) == []


def test_who_has_begun_goes_before_who_has_not() -> None:
    gate = Gate()
    turn = gate.come("aaaaaa", "a")
    gate.end(turn, 1.0)
    waiting = [gate.come("bbbbbb", "b", 2.0), gate.come("cccccc", "c", 3.0)]
    assert gate.free(100.0) == waiting[:1]
    again = gate.come("aaaaaaa", "a", 101.0)
    gate.end(waiting[0], 102.0)
    assert gate.free(200.0) == [again]


def test_the_youngest_is_paused_if_contexts_outgrow_the_caches() -> None:
    gate = Gate(200)
    old, young, youngest = (gate.come(6 * name, name, number) for number, name in enumerate("abc"))
    for turn in (old, young, youngest):
        gate.end(turn, 3.0)
    assert not gate.come(8 * "a", "a", 4.0).is_held, "200 tokens: they fit"
    assert gate.come(9 * "c", "c", 5.0).is_held, "230 tokens, and the youngest thinks"
    assert gate.paused == 1
    assert not gate.come(9 * "b", "b", 6.0).is_held


def test_a_running_call_is_never_paused() -> None:
    gate = Gate()
    running = gate.come("aaa", "a"), gate.come("bbb", "b", 1.0)
    assert not gate.come(12 * "b", "b", 2.0).is_held
    assert gate.paused == 0, running


def test_chat_is_never_held_and_counts_while_it_is_in_an_engine() -> None:
    gate = Gate(200)
    chats = [gate.come(f"{number}x") for number in range(5)]
    assert not any(chat.is_held for chat in chats)
    gate.end(gate.come("y", "b"), 0.5)
    turn = gate.come(12 * "a", "a")
    assert gate.tokens == 220, "nobody is live, so the first session passes"
    held = gate.come(8 * "b", "b", 1.0)
    gate.end(turn, 2.0)
    assert gate.end(chats[0], 2.0) == gate.end(chats[1], 2.0) == gate.end(chats[2], 2.0) == []
    assert gate.end(chats[3], 2.0) == [], "20 tokens of chat, 120 of the session"
    assert gate.end(chats[4], 2.0) == [held]


def test_chat_counts_up_to_a_part_of_the_caches() -> None:
    gate = Gate(200)
    chats = [gate.come(8 * name) for name in "wxyz"]
    assert gate.tokens == CHAT_SHARE * 200
    assert not gate.come("aaaaaa", "a").is_held
    assert not gate.come("bbb", "b").is_held
    assert gate.come("cccccc", "c").is_held
    for chat in chats:
        gate.end(chat, 1.0)
    assert gate.tokens == 150, "and the third one has passed"


def test_a_session_without_a_name_is_known_by_its_prompts() -> None:
    gate = Gate()
    gate.end(gate.come("system A" + "a" * 12), 1.0)
    gate.end(gate.come("system B" + "b" * 12, now_s=1.0), 1.5)
    assert not gate.come("system A" + "a" * 14, now_s=2.0).is_held
    assert gate.come("system B" + "b" * 14, now_s=3.0).is_held
    assert not gate.come("system A" + "a" * 16, now_s=4.0).is_held


def test_a_prompt_that_names_no_session_is_chat_until_another_goes_on_with_it() -> None:
    gate = Gate(1000)
    firsts = [gate.come(12 * name, now_s=0.1) for name in "abc"]
    assert not any(first.is_held for first in firsts)
    assert (gate.tokens, len(gate.live), gate.worth._returns) == (360, 0, 0)
    gate.gone(firsts[0], 1.0)
    gate.end(firsts[1], 1.0)
    gate.end(firsts[2], 1.0)
    assert gate.tokens == 0
    second = gate.come(14 * "c", now_s=2.0)
    assert (gate.tokens, len(gate.live), gate.worth._returns, second.is_chat) == (140, 1, 1, False)


def test_questions_about_a_document_are_of_no_session() -> None:
    """They come one after the other here: what each asks is not what the next one goes on with."""
    gate = Gate(is_closed=False)
    document = 30 * "d"
    gate.end(gate.come(document + "a"), 1.0)
    maybe = gate.come(document + "b", now_s=1.5)
    assert maybe.context is not None, "it may be one: agents rewrite the end of a prompt now and then"
    gate.end(maybe, 1.6)
    questions = [gate.come(document + question, now_s=2.0) for question in ("c", "cc", "aa")]
    assert all(question.context is None for question in questions)
    assert (len(gate.live), gate.worth._returns) == (0, 0)
    gate.worth.is_closed = True
    assert not gate.come(document + "d").is_held


def test_a_held_question_that_comes_again_is_still_one_about_a_document() -> None:
    gate = Gate(is_closed=False)
    document = 30 * "d"
    gate.end(gate.come(document + "a"), 1.0)
    gate.end(gate.come(document + "aa", now_s=1.5), 1.6)
    gate.worth.is_closed = True
    gate.live.drop(next(iter(gate.live)))
    gate.come(90 * "f", "f", 2.0)
    held = gate.come(document + "b", now_s=3.0)
    assert held.is_held
    gate.gone(held, 4.0)
    again = gate.come(document + "b", now_s=5.0)
    assert again.context is not None
    assert again.context.strayed
    assert gate.come(document + "c", now_s=6.0).context is None, "a third question: it is a document"


def test_an_agent_may_rewrite_the_end_of_its_prompt() -> None:
    gate = Gate()
    prompt = 30 * "a"
    for number, end in enumerate(("bb", "cc", "ccdd", "ccde", "ccdeff")):
        turn = gate.come(prompt + end, now_s=float(number))
        assert turn.context is not None
        gate.end(turn, number + 0.5)
    assert len(gate.live) == 1


def test_calls_that_extend_a_prompt_at_the_same_time_are_of_no_session() -> None:
    gate = Gate()
    first = gate.come("ddddddddda", "a")
    held = gate.come("ffffffffff", "f", 1.0)
    assert not gate.come("ddddddddda and b", "a", 2.0).is_held
    assert len(gate.live) == 0
    assert gate.free(2.0) == [held], "the document is in no session's context"
    assert gate.end(first, 3.0) == []
    assert not gate.come("ddddddddda and b and c", "c", 4.0).is_held, "whatever its name is"


def test_a_held_call_of_a_document_passes_when_others_ask_about_it() -> None:
    gate = Gate()
    gate.come("aaaaaaaaaa", "a")
    held = gate.come("ddddddddda", "d", now_s=1.0)
    assert held.is_held
    assert not gate.come("dddddddddb", now_s=2.0).is_held
    assert gate.free(2.0) == [held]


def test_blocks_that_sessions_share_count_once() -> None:
    gate = Gate()
    gate.come("system A", "a")
    assert not gate.come("system B", "b").is_held
    assert gate.tokens == 90


def test_a_held_session_goes_after_a_time_whatever_there_is_room_for() -> None:
    gate = Gate()
    gate.come("aaaaaa", "a")
    held = [gate.come("bbbbbb", "b", 10.0), gate.come("cccccc", "c", 11.0)]
    assert gate.free(9.9 + MOST_HELD_S) == []
    assert gate.free(10.0 + MOST_HELD_S) == held[:1]


@pytest.mark.parametrize(
    ("held", "think_s", "part"),
    [(1, 0.0, 0.2), (4, 0.0, 0.8), (5, 0.0, 1.0), (7, 0.0, 1.0), (1, 0.1, 0.75), (1, 0.2, 1.0), (5, 0.1, 1.0)],
)
def test_while_few_are_held_a_context_that_is_idle_gives_room_sooner(held: int, think_s: float, part: float) -> None:
    """Contexts are worth .2 s. They are kept for one and a half think times, at least."""
    gate = Gate(300)
    gate.worth.returned(think_s, 30)
    for name in "abcdefghij":
        gate.end(gate.come(3 * name, name), 0.0)
    for name in "klmnopq"[:held]:
        gate.come(3 * name, name, 0.001)
    given_up_s = 0.2 * part
    assert gate.free(0.99 * given_up_s) == []
    assert gate.free(1.01 * given_up_s)


def test_a_session_that_comes_again_has_tried_since_its_first_try() -> None:
    gate = Gate()
    gate.come("aaaaaa", "a")
    now_s = 10.0
    while now_s < 9.0 + MOST_HELD_S:
        turn = gate.come("bbbbbb", "b", now_s)
        assert turn.is_held
        gate.gone(turn, now_s + 30.0)
        now_s += 60.0
    assert not gate.come("bbbbbb", "b", 10.0 + MOST_HELD_S).is_held


def test_a_session_that_was_away_for_long_begins_anew() -> None:
    gate = Gate()
    gate.come("aaaaaa", "a")
    gate.gone(gate.come("bbbbbb", "b", 0.0), 1.0)
    assert gate.come("bbbbbb", "b", 2.0 + MOST_AWAY_S).tried_for_s(2.0 + MOST_AWAY_S) == 0.0


def test_a_held_client_that_goes_lets_the_next_one_pass() -> None:
    gate = Gate()
    gate.come("aaaaaa", "a")
    long, short = gate.come("bbbbbb", "b", 1.0), gate.come("cccc", "c", 2.0)
    gate.gone(long, 3.0)
    assert gate.free(3.0) == [short]


@pytest.mark.parametrize(("weight", "next_one"), [(1.0, "light"), (4.0, "heavy")])
def test_the_tenant_with_the_fewest_live_tokens_for_its_weight_goes_first(weight: float, next_one: str) -> None:
    gate = Gate(200, weights={"heavy": weight})
    for number in range(2):
        gate.come(f"{number}aaaaa", f"{number}", tenant="heavy")
    running = gate.come("zaaaaa", "z", tenant="light")
    held = {tenant: gate.come(f"{tenant[0]}aaaaa", "h", 1.0, tenant=tenant) for tenant in ("heavy", "light")}
    assert gate.end(running, 2.0) == []
    assert gate.free(100.0) == [held[next_one]]


@pytest.mark.parametrize(("tenant", "is_held"), [("light", False), ("heavy", True)])
def test_a_call_with_a_deadline_passes_within_its_tenants_share(tenant: str, is_held: bool) -> None:
    gate = Gate()
    gate.come("aaaaaaaa", "a", tenant="heavy")
    assert gate.come("bbbbbb", "b", tenant="light").is_held
    assert gate.arrive(arrival("cccccc", "c", tenant=tenant, slo=Slo(ttft_s=1.0)), 1.0).is_held is is_held


def test_a_call_of_a_program_passes() -> None:
    gate = Gate()
    gate.come("aaaaaa", "a")
    assert not gate.come("bbbbbb", "b", passes=True).is_held


def test_a_session_that_ends_while_another_call_of_it_runs_stays_live() -> None:
    gate = Gate()
    running = gate.come("aaaaaa", "a")
    last = gate.arrive(arrival("x", "a")._replace(is_final=True), 1.0)
    gate.sent(last)
    gate.ended(last, 1, 2.0)
    assert len(gate.live) == 1
    gate.end(running, 3.0)
    assert len(gate.live) == 1
    last = gate.arrive(arrival("aaaaaaa", "a")._replace(is_final=True), 4.0)
    gate.sent(last)
    gate.ended(last, 1, 5.0)
    check(gate)
    assert (len(gate.live), gate.tokens) == (0, 0)
    assert not gate.come("aaaaaaa", "a", 6.0).is_held, "the name may come back"


def test_the_subagents_of_a_session_count() -> None:
    gate = Gate(200)
    main, sub = gate.come("aaaaaa", "a"), gate.come("bbbbbb", "a")
    assert (gate.tokens, len(gate.live)) == (120, 1)
    gate.end(sub, 1.0, output_tokens=5)
    assert gate.tokens == 125
    assert not gate.come("bbbbbbbb", "a", 2.0).is_held
    assert gate.tokens == 140, main


def test_a_context_that_is_forgotten_while_its_call_runs_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "MOST_CONTEXTS", 2)
    gate = Gate(1000)
    turns = [gate.come(6 * name, "s", number) for number, name in enumerate("abc")]
    for turn in turns:
        gate.end(turn, 5.0, output_tokens=50)
    check(gate.live)
    assert gate.tokens == 220, "60 and 50 of each of two"


def test_a_call_that_comes_again_before_an_answer_rewrites_nothing() -> None:
    gate = Gate()
    for number in range(4):
        gate.gone(gate.come(12 * "a", now_s=float(number)), number + 0.5)
    turn = gate.come(12 * "a", now_s=5.0)
    assert turn.context is not None
    gate.end(turn, 6.0)
    assert not gate.come(14 * "a", now_s=7.0).is_chat


class Sessions(RuleBasedStateMachine):
    """Sessions come, think, go and come again, while the gate closes and opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(200)
        self.now_s = 0.0
        self.texts: dict[str, str] = {}
        self.tried_s: dict[str, float] = {}

    @rule(
        name=st.sampled_from("abcdefgh"),
        more=st.integers(0, 4),
        is_named=st.booleans(),
        tenant=st.sampled_from(("", "t")),
        passes=st.booleans(),
    )
    def comes(self, name: str, more: int, *, is_named: bool, tenant: str, passes: bool) -> None:
        text = self.texts[name] = self.texts.get(name, "system" + name) + more * name
        turn = self.gate.come(text, name if is_named else "", self.now_s, tenant=tenant, passes=passes)
        assert not (turn.is_held and (passes or not self.gate.worth.is_closed))
        self.gate.free(self.now_s)

    @precondition(lambda self: self.gate.turns)
    @rule(number=st.integers(0, 30), output_tokens=st.integers(0, 40))
    def ends(self, number: int, output_tokens: int) -> None:
        turn = self.gate.turns[number % len(self.gate.turns)]
        if turn.is_held:
            self.gate.turns.remove(turn)
            self.gate.gone(turn, self.now_s)
            self.gate.free(self.now_s)
        else:
            self.gate.end(turn, self.now_s, output_tokens)

    @rule(seconds=st.sampled_from((0.01, 0.1, 1.0, 100.0)))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.gate.free(self.now_s)

    @rule(is_closed=st.booleans())
    def the_gate_closes_or_opens(self, *, is_closed: bool) -> None:
        self.gate.worth.is_closed = is_closed
        self.gate.free(self.now_s)

    @invariant()
    def nobody_is_held_without_need(self) -> None:
        held: list[Turn] = [turn for turn in self.gate.turns if turn.is_held]
        assert set(held) == set(self.gate.held)
        if held:
            assert self.gate.worth.is_closed
            assert len(self.gate.live), "somebody has the room"
        assert all(turn.tried_for_s(self.now_s) < MOST_HELD_S for turn in held)

    @invariant()
    def what_is_known_is_consistent(self) -> None:
        check(self.gate)
        in_engines = sum(not turn.is_held for turn in self.gate.turns if turn.context is not None)
        assert in_engines == sum(session.calls for session in self.gate.known)


TestSessions = Sessions.TestCase
