"""Chained calls over ASGI: held, woken, repeated, left, broken off; whose they are, and how many there may be."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator

import pytest

from plait.backends.errors import LimitError, NoEngineError, ValueTooLargeError
from plait.gateway.calls.call import Ending
from plait.gateway.calls.delivery import Delivery
from plait.gateway.guests.programs.chained_calls import ChainedCalls
from plait.gateway.guests.programs.recorded_answer import KEEP_ALIVE
from plait.gateway.timer import loop_time_s
from plait.policy.types import Objective, Slo
from tests.gateway.exposed import samples
from tests.gateway.guests.programs.chained_gateway import CHAT, Served, events, served_calls, settle


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with served_calls() as served:
        yield served


class Ends:
    """Reads how requests ended that were no calls of their own."""

    def __init__(self) -> None:
        self.seen: list[Ending] = []

    def ended(self, delivery: Delivery) -> None: ...

    def no_call(self, ending: Ending) -> None:
        self.seen.append(ending)


# Held and woken.


async def test_a_call_waits_for_its_input_and_takes_its_value(served: Served) -> None:
    second = await served.chat("Test {{ code }} of {{task}}", inputs="code", output="test")
    first = await served.chat("Write", output="code; transform=strip")
    assert (served.engine.delivered, second.messages) == (["Write"], [])
    await served.engine.answer("Write", "  x = 1 ")
    assert first.text == "  x = 1 ", "the client gets the model's own answer"
    await served.engine.answer("Test x = 1 of {{task}}", "fine")
    assert (second.text, second.headers[b"plait-engine"]) == ("fine", b"e")
    assert (await served.get("test")).json["value"] == "fine"


async def test_a_streamed_call_is_captured_on_its_way(served: Served) -> None:
    first = await served.chat("Write", output="code", stream=True)
    await served.chat("Test {{code}}", inputs="code")
    await served.engine.answer("Write", "x = 1")
    assert first.body.endswith(b"data: [DONE]\n\n")
    assert list(served.engine.running) == ["Test x = 1"]


async def test_an_output_whose_client_asks_for_no_stream_comes_whole(served: Served) -> None:
    first = await served.chat("Write", output="code")
    watching = await served.get("code", stream=True)
    assert json.loads(served.engine.running["Write"][0].body.original).get("stream") is None
    await served.engine.answer("Write", "x = 1;")
    assert first.text == "x = 1;"
    assert [piece.get("value") for piece in events(watching)[:-1]][-1] == "x = 1;"


async def test_a_call_without_an_output_is_sent_as_its_client_wrote_it(served: Served) -> None:
    held = await served.chat("Test {{code}}", inputs="code")
    await served.value("code", "x")
    assert json.loads(served.engine.running["Test x"][0].body.original).get("stream") is None
    await served.engine.answer("Test x", "fine")
    assert held.text == "fine"


async def test_an_output_whose_client_leaves_frees_what_is_assembled() -> None:
    async with served_calls(gone_grace_s=0) as served:
        first = await served.chat("Write", output="code")
        await served.engine.begin("Write", "x =")
        (tenant,) = served.executor.sessions.tenants.values()
        assert tenant.held_bytes > 0
        await first.leave()
        assert (served.engine.running, tenant.held_bytes) == ({}, 0)


async def test_a_held_stream_shows_that_it_lives() -> None:
    async with served_calls(keep_alive_s=0.001) as served:
        held = await served.chat("Test {{code}}", inputs="code", stream=True)
        await held.begun.wait()
        await settle()
        await served.value("code", "x")
        await served.engine.answer("Test x", "fine")
        assert (held.status, held.headers[b"plait-session"]) == (200, b"s")
        assert held.body.replace(KEEP_ALIVE, b"").startswith(b"data: {")
        assert held.body.startswith(KEEP_ALIVE)
        assert held.body.endswith(b"data: [DONE]\n\n")


async def test_a_held_calls_time_counts_from_when_it_is_ready(served: Served) -> None:
    await served.chat("Test {{code}}", inputs="code", objective="latency")
    before_s = asyncio.get_running_loop().time()
    await served.value("code", "x")
    asked = served.engine.running["Test x"][0]
    assert asked.arrived_s >= before_s
    assert (asked.call.objective, asked.call.slo) == (Objective.LATENCY, Slo(1.0, 0.04, is_deduced=True))
    assert asked.session == "s"
    assert samples(served.registry)["plait_hold_seconds_count"] == 1


async def test_a_prompt_that_has_grown_beyond_the_context_fails_like_any(served: Served) -> None:
    held = await served.chat("Test {{code}}", inputs="code", output="test")
    await served.value("code", "word " * 2_000)
    assert held.refusal == (400, "context_length_exceeded")
    assert (await served.get("test")).refusal == (424, "variable_failed")


async def test_two_calls_of_one_request_id_are_two(served: Served) -> None:
    for output in ("a", "b"):
        await served.send(
            CHAT,
            {"model": "m", "messages": [{"role": "user", "content": output}]},
            plait_session="s",
            plait_output=output,
            x_request_id="mine",
        )
    assert [asked.call.call_id for asked, _, _ in served.engine.running.values()] == ["mine", "mine-2"]


# Repeated.


async def test_a_repetition_gets_the_running_calls_answer_and_the_finished_ones(served: Served) -> None:
    exchanges = [await served.chat("Write", output="code") for _ in range(2)]
    await served.engine.answer("Write", "x = 1")
    exchanges.append(await served.chat("Write", output="code"))
    assert [exchange.text for exchange in exchanges] == ["x = 1"] * 3
    assert len({exchange.headers[b"plait-engine"] for exchange in exchanges}) == 1
    assert served.engine.delivered == ["Write"]


async def test_another_request_for_the_same_output_is_a_second_producer(served: Served) -> None:
    await served.chat("Write", output="code")
    other = await served.chat("Write more", output="code")
    assert (other.refusal, other.headers[b"x-should-retry"]) == ((409, "double_producer"), b"false")


async def test_a_failed_call_may_be_sent_again(served: Served) -> None:
    first = await served.chat("Write", output="code")
    await served.engine.lose("Write")
    assert (first.refusal, first.headers[b"x-should-retry"]) == ((502, "engine_error"), b"true")
    again = await served.chat("Write", output="code")
    await served.engine.answer("Write", "x")
    assert again.text == "x"


@pytest.mark.parametrize("has_begun", [False, True], ids=["only comments", "a part of it"])
async def test_a_repetition_of_a_stream_that_fails_is_no_success(has_begun: bool) -> None:
    async with served_calls(keep_alive_s=0.001) as served:
        served.engine.holdings.read_by(ends := Ends())
        exchanges = [await served.chat("Write", output="code", stream=True) for _ in range(2)]
        for exchange in exchanges:
            await exchange.begun.wait()
        await (served.engine.break_off("Write", "x =") if has_begun else served.engine.lose("Write"))
        await settle()
        assert [exchange.status for exchange in exchanges] == [200, 200]
        assert b'"error"' in exchanges[1].body
        assert [(one.outcome, one.status, one.code) for one in ends.seen] == [("refused", 200, "engine_error")]


async def test_a_repetition_of_a_stream_that_the_gateway_ends_is_no_success() -> None:
    async with served_calls(keep_alive_s=0.001) as served:
        served.engine.holdings.read_by(ends := Ends())
        exchanges = [await served.chat("Write", output="code", stream=True) for _ in range(2)]
        for exchange in exchanges:
            await exchange.begun.wait()
        asked, _, ended = served.engine.running["Write"]
        error = NoEngineError("no engine is up", retry_after_s=1.0)
        assert asked.slot.begins_anew is not None
        assert not asked.slot.begins_anew(Ending("no_engine", 503, error=error))
        ended.set_exception(error)
        await settle()
        assert b'"error"' in exchanges[1].body
    assert [(one.outcome, one.status, one.code) for one in ends.seen] == [("no_engine", 200, "no_engine_available")]


async def test_an_answer_that_is_not_kept_cannot_be_repeated() -> None:
    async with served_calls(max_held_bytes=2_000) as served:
        first = await served.chat("Write", output="code")
        await served.engine.answer("Write", "x" * 150)
        assert first.text == "x" * 150
        (tenant,) = served.executor.sessions.tenants.values()
        assert (tenant.answer_bytes, tenant.held_bytes) == (0, 150)
        again = await served.chat("Write", output="code")
        assert again.refusal == (409, "double_producer")
        assert "not kept" in again.json["error"]["message"]


# Broken.


async def test_a_lost_engine_fails_what_follows_with_the_chain_of_causes(served: Served) -> None:
    first = await served.chat("Write", output="code")
    second = await served.chat("Test {{code}}", inputs="code", output="test")
    third = await served.chat("Sum up {{test}}", inputs="test")
    await served.engine.lose("Write")
    assert first.refusal == (502, "engine_error")
    assert second.refusal == third.refusal == (424, "input_failed")
    message = third.json["error"]["message"]
    assert message.endswith("engine e: connection lost.")
    assert message.count("because") == 2
    causes = third.json["error"]["causes"]
    assert [(cause["engine"], cause["variable"]) for cause in causes] == [(None, None), (None, "test"), ("e", "code")]
    assert "causes" not in first.json["error"]
    late = await served.chat("Test {{code}}", inputs="code")
    assert late.refusal == (424, "input_failed")


@pytest.mark.parametrize("status", [400, 501, 529])
async def test_a_refusal_reaches_the_client_as_the_engine_made_it(served: Served, status: int) -> None:
    first = await served.chat("Write", output="code")
    second = await served.chat("Test {{code}}", inputs="code")
    await served.engine.refuse("Write", status)
    assert (first.status, first.body) == (status, b'{"error":{"message":"too long"}}')
    assert f"engine e: refused with status {status}: too long" in second.json["error"]["message"]


async def test_a_text_that_the_transform_refuses_fails_the_variable_only(served: Served) -> None:
    first = await served.chat("Write", output="code; transform=code_block")
    second = await served.chat("Test {{code}}", inputs="code")
    await served.engine.answer("Write", "no code")
    assert first.text == "no code"
    assert second.refusal == (424, "input_failed")
    root = second.json["error"]["causes"][-1]
    assert (root["engine"], root["transform"], root["variable"]) == ("e", "code_block", "code")
    assert "transform code_block: there is no code block" in root["message"]


async def test_a_session_that_is_deleted_ends_what_runs_and_waits(served: Served) -> None:
    running = await served.chat("Write", output="code")
    waiting = await served.chat("Test {{code}}", inputs="code")
    deleted = await served.send("/v1/sessions/s", method="DELETE")
    assert deleted.json == {"id": "s", "object": "session.deleted", "deleted": True}
    assert running.refusal == waiting.refusal == (410, "session_ended")
    assert served.engine.running == {}
    for late in (
        served.get("code"),
        served.value("code", "x"),
        served.chat("Write", output="code"),
        served.chat("Label"),
        served.submit("Do {{code}}", "code"),
        served.send("/v1/sessions", {"session_id": "s"}),
        served.send("/v1/sessions/s", method="GET"),
        served.send("/v1/sessions/s", method="DELETE"),
        served.send("/v1/variables/s/code", method="GET"),
    ):
        assert (await late).refusal == (410, "session_ended")
    assert (await served.send("/v1/sessions", {"session_id": "s"}, key="two")).status == 200
    served.executor.endings.expire(loop_time_s() + 3600.0)
    assert (await served.send("/v1/sessions", {"session_id": "s"})).status == 200


async def test_an_error_that_nobody_foresaw_still_ends_the_call(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(served.engine, "run", broken)
    waiting = await served.chat("Test {{code}}", inputs="code")
    (call,) = next(iter(served.executor.sessions)).calls.values()
    told = list[Exception]()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context["exception"]))
    await served.value("code", "x")
    del call
    gc.collect()
    assert [type(error) for error in told] == [KeyError], "the log has it"
    assert waiting.status == 502


# Left.


async def test_a_client_that_leaves_a_held_call_cancels_it() -> None:
    async with served_calls(gone_grace_s=0) as served:
        held = await served.chat("Test {{code}}", inputs="code", output="test")
        await held.leave()
        await served.value("code", "x")
        assert (served.engine.delivered, held.messages) == ([], [])


async def test_a_client_that_leaves_a_running_call_cancels_it() -> None:
    async with served_calls(gone_grace_s=0) as served:
        running = await served.chat("Write", output="code")
        await running.leave()
        assert (served.engine.running, running.messages) == ({}, [])


async def test_a_call_that_others_wait_for_goes_on_without_its_client(served: Served) -> None:
    first = await served.chat("Write", output="code")
    second = await served.chat("Test {{code}}", inputs="code")
    await first.leave()
    await served.engine.answer("Write", "x")
    await served.engine.answer("Test x", "fine")
    assert (first.messages, second.text) == ([], "fine")


async def test_when_the_last_who_waits_leaves_all_of_the_chain_ends() -> None:
    async with served_calls(gone_grace_s=0) as served:
        first = await served.chat("Write", output="code")
        second = await served.chat("Test {{code}}", inputs="code", output="test")
        waiting = await served.get("test")
        for exchange in (first, second):
            await exchange.leave()
        assert list(served.engine.running) == ["Write"]
        await waiting.leave()
        assert served.engine.running == {}


async def test_of_two_clients_of_one_call_one_may_leave(served: Served) -> None:
    first, second = [await served.chat("Write", output="code") for _ in range(2)]
    await first.leave()
    await served.engine.answer("Write", "x")
    assert second.text == "x"


async def test_a_gateway_that_stops_tells_everybody(served: Served) -> None:
    running = await served.chat("Write", output="code")
    waiting = await served.chat("Test {{code}}", inputs="code")
    getting = await served.get("code")
    await served.gateway.house[ChainedCalls].close()
    await settle()
    assert running.refusal == waiting.refusal == getting.refusal == (410, "session_ended")


# Tenants and limits.


async def test_tenants_do_not_meet(served: Served) -> None:
    mine = await served.chat("Mine {{x}}", inputs="x")
    theirs = await served.chat("Theirs {{x}}", inputs="x", key="two")
    await served.value("x", "1", key="two")
    assert (list(served.engine.running), mine.messages) == (["Theirs 1"], [])
    await served.engine.answer("Theirs 1", "done")
    assert theirs.text == "done"
    await served.send("/v1/sessions/s", method="DELETE", key="two")
    for request in (
        served.send("/v1/sessions/s", method="GET", key="two"),
        served.send("/v1/sessions/s", method="DELETE", key="two"),
        served.send("/v1/variables/s/x", method="GET", key="two"),
        served.get("x", key="two"),
    ):
        assert (await request).refusal == (410, "session_ended")
    assert (await served.send("/v1/sessions/s", method="GET", key="three")).status == 401
    await mine.leave()


async def test_limits_are_proper_refusals() -> None:
    async with served_calls(max_waiting_calls=1, max_sessions=1) as served:
        await served.chat("{{x}}", inputs="x")
        for refused, code in (
            (await served.chat("{{x}} again", inputs="x"), "too_many_waiting_calls"),
            (await served.chat("hi", session="other", output="y"), "too_many_sessions"),
            (await served.send("/v1/sessions", {"session_id": "third"}), "too_many_sessions"),
        ):
            assert refused.refusal == (429, code)
            assert refused.headers[b"retry-after"] == b"1"


async def test_a_text_that_was_cut_becomes_the_value_and_the_variable_tells(served: Served) -> None:
    await served.chat("Write", output="code")
    waiting = await served.get("code")
    await served.engine.answer("Write", "x =", finish_reason="length")
    assert (waiting.json["value"], waiting.json["truncated"]) == ("x =", True)
    shown = (await served.send("/v1/variables/s/code", method="GET")).json
    assert (shown["state"], shown["truncated"]) == ("set", True)


async def test_a_text_that_was_cut_fails_a_variable_that_must_be_whole(served: Served) -> None:
    first = await served.chat("Write", output="code; truncated=fail")
    waiting = await served.get("code")
    await served.engine.answer("Write", "x =", finish_reason="length")
    assert first.text == "x =", "the client has the model's own answer"
    error = waiting.json["error"]
    assert (waiting.status, error["transient"], error["causes"][0]["engine"]) == (424, False, "e")
    assert error["causes"][0]["message"] == "the text was cut at its length limit"


async def test_a_text_beyond_the_limit_fails_the_variable_and_its_client_still_gets_it() -> None:
    async with served_calls(max_value_bytes=10) as served:
        first = await served.chat("Write", output="code", stream=True)
        waiting = await served.get("code")
        for _ in range(3):
            await served.engine.begin("Write", "12345")
        await served.engine.answer("Write", "")
        assert waiting.refusal == (424, "variable_failed")
        assert "at most 10 are allowed" in waiting.json["error"]["message"]
        *pieces, done = events(first)
        said = "".join(piece["choices"][0]["delta"]["content"] for piece in pieces)
        assert (said, done) == ("123451234512345", "[DONE]")


async def test_a_text_beyond_the_limit_ends_a_call_that_nobody_reads() -> None:
    async with served_calls(max_value_bytes=10) as served:
        await served.submit("Do {{code}}", "code")
        asked, _, ended = served.engine.running["Do "]
        assert asked.slot.text is not None
        with pytest.raises(ValueTooLargeError) as caught:
            asked.slot.text.whole(b'{"choices":[{"message":{"content":"12345678901"}}]}')
        ended.set_exception(caught.value)
        refused = await served.get("code")
        assert refused.refusal == (424, "variable_failed")
        (tenant,) = served.executor.sessions.tenants.values()
        assert tenant.held_bytes == 0


async def test_what_a_client_has_not_read_counts_and_is_freed_when_it_goes() -> None:
    async with served_calls(max_held_bytes=100_000) as served:
        await served.value("x", "1")
        reading = await served.chat("Sum up {{x}}", inputs="x", stream=True)
        (tenant,) = served.executor.sessions.tenants.values()
        await served.engine.begin("Sum up 1", "y" * 30_000)
        assert (tenant.answer_bytes, len(reading.body) > 30_000) == (0, True)
        reading.pause()
        for _ in range(2):
            await served.engine.begin("Sum up 1", "y" * 30_000)
        assert tenant.answer_bytes > 60_000
        with pytest.raises(LimitError):
            await served.engine.begin("Sum up 1", "y" * 60_000)
        await reading.leave()
        assert (tenant.answer_bytes, tenant.held_bytes) == (0, 1)
