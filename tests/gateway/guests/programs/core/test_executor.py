"""The executor in literal times: which call runs when, with what, and what each failure does to whom."""

from __future__ import annotations

import pytest

from plait.backends.errors import (
    ConflictError,
    FailedDependencyError,
    SessionEndedError,
)
from plait.gateway.guests.programs.core.held_call import HeldCall, Output, ReadyCall
from plait.gateway.guests.programs.core.session import repeated
from plait.gateway.guests.programs.transforms import TransformError
from plait.policy.programs.objectives import GROUP_STRETCH, LATENCY_SLO
from plait.policy.programs.request_graph_state import VariableState
from plait.policy.types import Objective, Slo
from tests.gateway.guests.programs.core.session_calls import SECONDS_PER_TOKEN, Core, Owner, error, owner
from tests.invariants import check


@pytest.fixture
def core() -> Core:
    return Core()


def ready(call: HeldCall) -> ReadyCall:
    found = owner(call).ready
    assert found is not None, f"{call.call_id} is not ready"
    return found


def jct_s(call: HeldCall) -> float | None:
    slo = ready(call).slo
    assert slo is not None
    assert slo == Slo(jct_s=slo.jct_s, is_deduced=True)
    return slo.jct_s


# Values.


def test_a_call_without_inputs_is_ready_at_once(core: Core) -> None:
    call = core.add("A", outputs=["a"], now_s=2.0)
    assert ready(call) == ReadyCall({}, 2.0)
    core.run(call, "text", now_s=3.0)
    assert core.get("a").told == ["text"]
    check(core.executor)


def test_a_call_is_ready_the_moment_that_its_last_input_has_a_value(core: Core) -> None:
    last = core.add("C", "a b", ["c"], now_s=1.0)
    first, second = core.add("A", outputs=["a"], now_s=2.0), core.add("B", outputs=["b|json($.x)"], now_s=3.0)
    core.run(first, "one", now_s=4.0)
    assert owner(last).ready is None
    core.run(second, '{"x": "two"}', now_s=5.0)
    assert ready(last) == ReadyCall({"a": "one", "b": "two"}, 5.0)
    check(core.executor)


def test_a_client_gives_a_variable_its_value(core: Core) -> None:
    call, waiting = core.add("A", "task"), core.get("task")
    core.executor.variables.set_value(core.session(), "task", "a game", 1.0)
    assert (ready(call).values, waiting.told) == ({"task": "a game"}, ["a game"])
    with pytest.raises(ConflictError) as caught:
        core.executor.variables.set_value(core.session(), "task", "another", 2.0)
    assert caught.value.code == "double_producer"


def test_several_outputs_come_one_after_the_other(core: Core) -> None:
    call = core.add("A", outputs=["a", "b"])
    after_a, after_b = core.add("B", "a"), core.add("C", "a b")
    core.executor.start(call, 0.0)
    core.executor.produce(call, "one", 1.0)
    assert (ready(after_a).values, owner(after_b).ready) == ({"a": "one"}, None)
    core.executor.produce(call, "two", 2.0)
    assert ready(after_b).values == {"a": "one", "b": "two"}


def test_a_get_may_come_before_the_call_and_again_after_it(core: Core) -> None:
    before = core.get("a")
    core.run(core.add("A", outputs=["a"]), "text")
    assert before.told == core.get("a").told == ["text"]


def test_who_wants_to_sees_the_text_grow(core: Core) -> None:
    early = core.get("a")
    call = core.add("A", outputs=["a"])
    core.executor.start(call, 0.0)
    core.executor.generated(call, "one ")
    late = core.get("a")
    core.executor.generated(call, "two")
    assert (early.deltas, late.deltas) == (["one ", "two"], ["one ", "two"])


def test_a_text_that_is_transformed_is_seen_when_it_is_whole(core: Core) -> None:
    waiting = core.get("a")
    core.run(core.add("A", outputs=["a|strip"]), "  text ")
    assert (waiting.deltas, waiting.told) == ([], ["text"])


# Failures.


def test_a_failure_takes_everybody_who_waits_with_it_and_says_why(core: Core) -> None:
    call = core.add("A", outputs=["a"])
    second, third, waiting = core.add("B", "a", ["b"]), core.add("C", "b"), core.get("b")
    core.executor.fail(call, "engine e1: connection lost", 1.0)
    assert owner(call).error is None, "its owner said so"
    assert (error(second).status, error(second).code) == (424, "input_failed")
    assert "C: its input b failed, because B: its input a failed, because A: engine e1: connection lost" in str(
        error(third)
    )
    (told,) = waiting.told
    assert (told.status, told.code) == (424, "variable_failed")
    assert core.executor.variables.counts["failed"] == 2
    check(core.executor)


def test_a_call_with_an_input_that_has_failed_is_refused(core: Core) -> None:
    core.executor.fail(core.add("A", outputs=["a"]), "no", 1.0)
    waiting = core.get("b")
    with pytest.raises(FailedDependencyError) as caught:
        core.add("B", "a", ["b"])
    assert caught.value.code == "input_failed"
    assert waiting.told[0].code == "variable_failed"
    check(core.executor)


def test_a_failed_variable_may_be_made_anew(core: Core) -> None:
    core.executor.fail(core.add("A", outputs=["a"]), "no", 1.0)
    core.run(core.add("A2", outputs=["a"]), "text")
    assert core.get("a").told == ["text"]
    check(core.executor)


def test_a_failed_variable_stays_if_the_call_that_would_make_it_is_refused(core: Core) -> None:
    core.executor.variables.set_value(core.session(), "taken", "x", 0.0)
    core.executor.fail(core.add("A", outputs=["a"]), "no", 1.0)
    for inputs, outputs in (("a", ["a"]), ("", ["a", "a"]), ("", ["a", "taken"])):
        with pytest.raises(ConflictError):
            core.add("B", inputs, outputs)
    assert core.session().state_of("a") is VariableState.FAILED


def test_a_text_that_its_transform_refuses_is_a_failure_of_the_callers_choice(core: Core) -> None:
    call = core.add("A", outputs=["a|json"])
    core.executor.start(call, 0.0)
    core.executor.generated(call, "no JSON")
    assert call.output is not None
    with pytest.raises(TransformError):
        call.output.value(str(call.text))


def test_a_second_producer_is_refused_and_changes_nothing(core: Core) -> None:
    call = core.add("A", outputs=["a"])
    with pytest.raises(ConflictError, match="already has a producer, A") as caught:
        core.add("B", outputs=["a"])
    assert caught.value.code == "double_producer"
    core.run(call, "text")
    assert core.get("a").told == ["text"]
    check(core.executor)


def test_a_cycle_is_refused_with_its_path(core: Core) -> None:
    core.add("A", "c", ["a"])
    core.add("B", "a", ["b"])
    with pytest.raises(ConflictError, match="C -> c -> A -> a -> B -> b -> C") as caught:
        core.add("C", "b", ["c"])
    assert caught.value.code == "cycle"
    check(core.executor)


def test_a_refused_call_forgets_no_failure(core: Core) -> None:
    core.executor.fail(core.add("a", outputs=["failed"]), "it broke", 0.0)
    core.add("b", "later", ["first"])
    with pytest.raises(ConflictError) as caught:
        core.add("c", "first", ["failed", "later"])
    assert caught.value.code == "cycle"
    assert core.session().state_of("failed") is VariableState.FAILED


def test_the_middle_of_a_long_chain_of_causes_is_left_out(core: Core) -> None:
    first = core.add("C0", outputs=["v0"])
    calls = [core.add(f"C{n}", f"v{n - 1}", [f"v{n}"]) for n in range(1, 1_000)]
    core.executor.fail(first, "engine lost", 1.0)
    core.settle(1.0)
    message = error(calls[-1]).message
    assert "C999: its input v998 failed" in message
    assert "C0: engine lost" in message
    assert "992 more" in message
    assert len(message) < 500


# Who waits for what.


def test_a_call_whose_client_goes_is_cancelled(core: Core) -> None:
    call = core.add("A", "a", ["b"])
    core.executor.leave([call], 1.0)
    assert error(call).code == "cancelled"
    check(core.executor)


def test_a_call_that_another_waits_for_goes_on_without_its_client(core: Core) -> None:
    call = core.add("A", outputs=["a"])
    consumer = core.add("B", "a")
    core.executor.leave([call], 1.0)
    core.run(call, "text")
    assert ready(consumer).values == {"a": "text"}


def test_a_call_that_a_get_waits_for_goes_on_until_that_is_given_up(core: Core) -> None:
    waiting = core.get("a")
    call = core.add("A", outputs=["a"])
    core.executor.leave([call], 1.0)
    assert owner(call).error is None
    core.executor.variables.release(core.session(), waiting.getter, 2.0)
    assert error(call).code == "cancelled"


def test_what_only_a_cancelled_call_waited_for_is_cancelled_too(core: Core) -> None:
    first = core.add("A", outputs=["a"])
    second = core.add("B", "a", ["b"])
    third, other = core.add("C", "b"), core.add("D", outputs=["d"])
    for call in (first, second):
        core.executor.leave([call], 1.0)
        assert owner(call).error is None
    core.executor.leave([third], 2.0)
    assert {error(call).code for call in (first, second, third)} == {"cancelled"}
    assert owner(other).error is None
    check(core.executor)


def test_a_long_chain_is_cancelled_as_a_short_one_is(core: Core) -> None:
    core.add("C0", outputs=["v0"])
    calls = [core.add(f"C{n}", f"v{n - 1}", [f"v{n}"]) for n in range(1, 3_000)]
    for call in calls:
        core.executor.leave([call], 1.0)
    core.settle(1.0)
    assert {error(call).code for call in calls} == {"cancelled"}
    assert list(core.session().calls) == ["C0"], "its client is there"


def test_what_only_a_failed_call_waited_for_is_cancelled_too(core: Core) -> None:
    left, right = core.add("L", outputs=["l"]), core.add("R", outputs=["r"])
    both = core.add("B", "l r")
    core.executor.leave([left], 1.0)
    core.executor.fail(right, "no", 2.0)
    assert (error(both).code, error(left).code) == ("input_failed", "cancelled")


def test_a_call_with_two_clients_ends_with_the_second(core: Core) -> None:
    call = core.add("A", outputs=["a"])
    call.clients += 1
    core.executor.leave([call], 1.0)
    assert owner(call).error is None
    core.executor.leave([call], 2.0)
    assert error(call).code == "cancelled"


def test_a_repetition_is_known_while_the_call_runs_and_afterwards_but_not_once_it_has_failed(core: Core) -> None:
    call = core.add("A", outputs=["a"], fingerprint=b"1")
    same = HeldCall("A2", (), call.outputs, Owner(), fingerprint=b"1")
    other = HeldCall("A3", (), call.outputs, Owner(), fingerprint=b"2")
    assert repeated(core.session(), same) is call
    assert repeated(core.session(), other) is None
    core.run(call, "text")
    assert repeated(core.session(), same) is call
    failed = core.add("B", outputs=["b"], fingerprint=b"1")
    core.executor.fail(failed, "no", 1.0)
    assert repeated(core.session(), HeldCall("B2", (), failed.outputs, Owner(), fingerprint=b"1")) is None


def test_what_happens_to_a_call_that_has_ended_changes_nothing(core: Core) -> None:
    call = core.add("A", outputs=["a"])
    core.run(call, "text")
    core.executor.start(call, 1.0)
    core.executor.fail(call, "too late", 1.0)
    core.executor.finish(call, 1.0)
    core.executor.leave([call], 1.0)
    assert (core.get("a").told, owner(call).error) == (["text"], None)
    check(core.executor)


def test_an_owner_may_call_back(core: Core) -> None:
    """As a simulator does: a call that is ready runs there and then."""

    class Eager(Owner):
        def on_ready(self, ready: ReadyCall) -> None:
            super().on_ready(ready)
            core.run(self.call, f"{''.join(ready.values.values())}.")

        call: HeldCall

    session = core.session()
    for call_id, inputs, output in (("C", ("b",), "c"), ("B", ("a",), "b"), ("A", (), "a")):
        eager = Eager()
        eager.call = HeldCall(call_id, inputs, (Output(output),), eager)
        core.executor.add(session, eager.call, 0.0)
    assert session.values == {"a": ".", "b": "..", "c": "..."}
    assert not session.calls
    check(core.executor)


def test_of_two_that_become_ready_the_first_may_end_the_session(core: Core) -> None:
    class Ending(Owner):
        def on_ready(self, _ready: ReadyCall) -> None:
            core.executor.endings.end(session, "was deleted", 0.0)

    session = core.session()
    first = HeldCall("A", ("v",), (), Ending())
    core.executor.add(session, first, 0.0)
    second = core.add("B", "v", ["b"])
    core.executor.variables.set_value(session, "v", "x", 1.0)
    assert isinstance(error(second), SessionEndedError)
    assert owner(second).ready is None
    check(core.executor)


# What calls are promised.


def test_nothing_is_promised_where_nobody_asks(core: Core) -> None:
    assert ready(core.add("A", outputs=["a"])).objective is None


def test_a_deduced_latency_call_has_figures_from_the_moment_that_it_is_ready(core: Core) -> None:
    core.get("b", Objective.LATENCY)
    first = core.add("A", outputs=["a"], now_s=1.0)
    second = core.add("B", "a", ["b"], now_s=2.0)
    core.run(first, "text", now_s=9.0)
    assert ready(second) == ReadyCall({"a": "text"}, 9.0, LATENCY_SLO, Objective.LATENCY)


def test_a_task_group_has_the_time_of_its_slowest_call(core: Core) -> None:
    core.get("all", Objective.LATENCY)
    core.add("reduce", "a b", ["all"])
    core.add("map1", "task", ["a"], prompt_tokens=100)
    short = core.add("map2", "task", ["b"], prompt_tokens=10)
    core.executor.variables.set_value(core.session(), "task", "x" * 40, 3.0)
    slowest_s = (100 + 10) * SECONDS_PER_TOKEN
    assert jct_s(short) == pytest.approx(GROUP_STRETCH * slowest_s)
    assert ready(short).objective is Objective.LATENCY
    group = ready(short).group
    assert group is not None
    assert group.calls == 2, "the gateway places them together"


def test_a_get_for_throughput_reaches_what_is_upstream(core: Core) -> None:
    core.get("b", Objective.THROUGHPUT)
    core.add("B", "a", ["b"])
    promised = ready(core.add("A", outputs=["a"]))
    # The consumer was there before: what is upstream of the awaited variable is known.
    assert (promised.slo, promised.objective) == (None, Objective.THROUGHPUT)


def test_a_calls_own_annotations_win(core: Core) -> None:
    core.get("a", Objective.LATENCY)
    own = core.add("A", outputs=["a"], slo=Slo(ttft_s=7.0), objective=Objective.THROUGHPUT)
    assert (ready(own).slo, ready(own).objective) == (Slo(ttft_s=7.0), Objective.THROUGHPUT)


def test_an_annotated_call_is_an_awaited_one(core: Core) -> None:
    core.add("B", "a", objective=Objective.LATENCY)
    assert ready(core.add("A", outputs=["a"])).slo == LATENCY_SLO


def test_a_jobs_time_is_shared_along_its_critical_path(core: Core) -> None:
    core.get("b", Slo(jct_s=10.0), now_s=0.0)
    second = core.add("B", "a", ["b"], now_s=0.0, prompt_tokens=300)
    first = core.add("A", outputs=["a"], now_s=0.0, prompt_tokens=100)
    assert jct_s(first) == pytest.approx(2.5)
    core.run(first, "", now_s=4.0)
    assert jct_s(second) == pytest.approx(6.0), "what the first took too long is the second's loss"


def test_a_jobs_time_counts_from_its_first_call(core: Core) -> None:
    call = core.add("A", "x", ["a"], now_s=10.0, prompt_tokens=100)
    core.get("a", Slo(jct_s=10.0), now_s=12.0)
    core.executor.variables.set_value(core.session(), "x", "1", 13.0)
    assert jct_s(call) == pytest.approx(7.0)


def test_a_get_with_figures_reaches_the_call_that_produces(core: Core) -> None:
    core.get("a", Slo(ttft_s=0.2, tpot_s=0.03))
    assert ready(core.add("A", outputs=["a"])).slo == Slo(ttft_s=0.2, tpot_s=0.03)
