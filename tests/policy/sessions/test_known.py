"""Which session a call is of."""

from __future__ import annotations

import pytest

from plait.policy.sessions import known as known_module
from plait.policy.sessions.known import MOST_CONTEXTS, Context, KnownSessions
from tests.policy.sessions.gates import prompt_of


@pytest.fixture
def closed() -> list[Context]:
    return []


@pytest.fixture
def known(closed: list[Context]) -> KnownSessions:
    return KnownSessions(closed.append)


def begin(known: KnownSessions, text: str, name: str = "", *, tenant: str = "") -> Context:
    """A context known by the last block of this prompt."""
    context = known.begin(tenant, name, 0.0)
    known.mark(context, prompt_of(text), len(text) - 1)
    return context


def test_a_prompt_that_goes_on_extends_the_context(known: KnownSessions) -> None:
    first, second = begin(known, "system A"), begin(known, "system B")
    assert known.extended("", "", prompt_of("system A and more")) is first
    assert known.extended("", "", prompt_of("system B")) is second
    assert known.extended("", "", prompt_of("system C")) is None
    assert known.extended("", "", prompt_of("system")) is None
    assert known.extended("other", "", prompt_of("system A")) is None


def test_a_name_counts_before_the_prompt(known: KnownSessions) -> None:
    mine = begin(known, "system A", "mine")
    assert known.extended("", "mine", prompt_of("system A.")) is mine
    assert known.extended("", "yours", prompt_of("system A.")) is None
    assert known.extended("", "", prompt_of("system A.")) is mine, "a client may name it in its first call only"


def test_a_session_has_several_contexts(known: KnownSessions) -> None:
    main, sub = begin(known, "main", "s"), begin(known, "sub", "s")
    assert main.session is sub.session
    assert known.extended("", "s", prompt_of("sub.")) is sub


def test_a_context_is_known_by_its_latest_prompt(known: KnownSessions) -> None:
    context = begin(known, "a")
    known.mark(context, prompt_of("a and more"), 9)
    assert known.extended("", "", prompt_of("a")) is None
    assert known.extended("", "", prompt_of("a and more.")) is context


def test_the_context_that_is_idle_longest_is_forgotten(known: KnownSessions, closed: list[Context]) -> None:
    contexts = [begin(known, f"{number}", "s") for number in range(MOST_CONTEXTS)]
    for number, context in enumerate(contexts):
        context.ended_s = -1.0 - (number * 7) % MOST_CONTEXTS
    begin(known, "one more", "s")
    assert closed == [min(contexts, key=lambda one: one.ended_s or 0.0)]
    assert len(closed[0].session.contexts) == MOST_CONTEXTS


def test_the_session_that_has_not_come_for_longest_is_forgotten(
    known: KnownSessions, closed: list[Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_module, "MOST_SESSIONS", 2)
    first, second = begin(known, "a", "a"), begin(known, "b", "b")
    known.called(first.session)
    begin(known, "c", "c")
    assert closed == [second]
    assert known.extended("", "b", prompt_of("b.")) is None
    assert known.extended("", "a", prompt_of("a.")) is first
    first.session.calls = 1
    begin(known, "d", "d")
    assert known.extended("", "a", prompt_of("a.")) is first, "it has a call"
