"""Conditions: how they are written, what is sent, and what a skipped variable is."""

from __future__ import annotations

import pytest

from plait.client import (
    Client,
    Condition,
    SemanticVariable,
    Session,
    SkippedError,
    TemplateError,
    Text,
    VariableFailedError,
    semantic_function,
)
from plait.gateway.calls.condition import read_condition
from tests.client.fake_gateway import PROGRAMS, Answer, FakeGateway, failed

TEXTS = ["yes", "", ' "quoted" \\ ', "two\nlines", "ä €", 'verdict == "no"']


@semantic_function()
def revise(draft: Text) -> SemanticVariable:
    """Revise {{draft}}: {{revised}}"""
    raise NotImplementedError


@pytest.mark.parametrize("text", TEXTS)
def test_the_gateway_reads_what_the_client_writes(session: Session, text: str) -> None:
    verdict = session.variable(name="verdict")
    made = [verdict.equals(text), verdict.differs(text)] + ([verdict.contains(text)] if text else [])
    for condition, operator in zip(made, ["==", "!=", "contains"], strict=False):
        read = read_condition(str(condition))
        assert read is not None
        assert (read.variable, read.operator, read.text) == ("verdict", operator, text)


def test_a_condition_goes_with_its_call(fake: FakeGateway, session: Session) -> None:
    verdict = session.variable(name="verdict")
    revise.when(verdict.equals("no"))("a text").get()
    (program,) = fake.programs
    (call,) = program["calls"]
    assert call["when"] == 'verdict == "no"'
    assert [place["name"] for place in call["placeholders"]] == ["draft", "revised"], "it is no input"
    assert program["external"] == ["verdict"]


def test_a_condition_brings_the_call_that_decides_it(fake: FakeGateway, session: Session) -> None:
    """Requests may overtake each other, so each has all that its variable needs."""
    verdict = revise.on(session)("good?")
    revised = revise.when(verdict.differs("yes"))("a text")
    batches = [session._collected.batches([name]) for name in (verdict.name, revised.name)]
    assert [len(batch.entries) for (batch,) in batches] == [4, 4], "two texts and two calls, each time"


@pytest.mark.parametrize("code", ["skipped", "variable_failed", "not_computed"])
def test_a_get_of_what_was_skipped_says_so(fake: FakeGateway, session: Session, code: str) -> None:
    revised = revise.when(session.variable("no").equals("yes"))("a text")
    fake.script(PROGRAMS, failed(revised.name, code, "it was skipped: its condition"))
    with pytest.raises(VariableFailedError) as caught:
        revised.get()
    assert isinstance(caught.value, SkippedError) == (code == "skipped")
    assert str(caught.value).startswith(f"{revised.name} {'was skipped' if code == 'skipped' else 'has failed'}: ")
    assert [cause.message for cause in caught.value.causes] == ["it was skipped: its condition"]


def test_the_side_that_was_taken_is_kept(fake: FakeGateway, session: Session) -> None:
    verdict = session.variable("no")
    one, other = revise.when(verdict.equals("yes"))("a"), revise.when(verdict.differs("yes"))("b")
    skipped = {"message": "no", "code": "skipped"}
    fake.script(
        PROGRAMS, Answer(200, {"object": "program", "values": {other.name: "x"}, "errors": {one.name: skipped}})
    )
    with pytest.raises(SkippedError):
        session.run(one, other)
    assert (one.value, other.value) == (None, "x")


def test_a_condition_is_not_a_truth_value(session: Session) -> None:
    verdict = session.variable("yes", name="verdict")
    with pytest.raises(TypeError, match=r'^verdict == "yes" is decided in the gateway: .*verdict\.get\(\)$'):
        bool(verdict.equals("yes"))
    assert verdict.equals("yes") == Condition(verdict, "==", "yes")
    session.run()


def test_what_is_no_condition(client: Client, session: Session) -> None:
    verdict = session.variable("yes")
    for text in ("", " \n"):
        with pytest.raises(TemplateError, match="empty text"):
            verdict.contains(text)
    with pytest.raises(TemplateError, match="SemanticVariable; expected a string"):
        verdict.equals(verdict)  # type: ignore[arg-type]
    with client.session() as other, pytest.raises(TemplateError, match="revise: draft is a variable of another"):
        revise.when(verdict.equals("yes"))(other.variable("x", name="x"))
    session.run()
