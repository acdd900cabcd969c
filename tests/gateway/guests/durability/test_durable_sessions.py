"""What a gateway finds of the sessions of the one before it, which was killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from plait.gateway.intake import turns
from plait.gateway.timer import loop_time_s
from tests.gateway.guests.durability.durable_gateway import DurableServed, durable, held_commits
from tests.gateway.guests.programs.chained_gateway import CHAT, events, settle


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "plait.db"


async def test_values_of_clients_and_calls_are_there_again(path: Path) -> None:
    async with durable(path) as first:
        assert (await first.value("task", "a snake game")).status == 200
        submitted = await first.submit("Write {{task}}: {{code}}", "code", inputs=("task",))
        assert submitted.status == 200
        await first.engine.answer("Write a snake game: ", "x = 1")
        await first.stored()
    async with durable(path) as second:
        assert second.engine.delivered == []
        for variable, value in (("task", "a snake game"), ("code", "x = 1")):
            exchange = await second.get(variable)
            await second.stored()
            assert exchange.json["value"] == value


async def test_an_interrupted_call_starts_again_with_its_values_and_id(path: Path) -> None:
    async with durable(path, max_attempts=3) as first:
        await first.submit("Write {{code}}", "code")
        test = await first.submit("Test {{code}} {{test}}", "test", inputs=("code",))
        await first.engine.answer("Write ", "x = 1")
        await first.stored()
        call_id = test.json["id"]
        assert list(first.engine.running) == ["Test x = 1 "]
    async with durable(path, max_attempts=3) as second:
        assert list(second.engine.running) == ["Test x = 1 "]
        asked, *_ = second.engine.running["Test x = 1 "]
        assert asked.call.call_id == call_id
        await second.engine.answer("Test x = 1 ", "fine")
        await second.stored()
        assert (await second.get("test")).json["value"] == "fine"


async def test_a_call_of_several_outputs_goes_on_after_the_last_that_it_made(path: Path) -> None:
    prompt = "Name: {{name}} Age: {{age}}"
    async with durable(path) as first:
        first_name = {"name": "name", "in_out": True, "transforms": "strip"}
        body = {"session_id": "s", "model": "m", "prompt": prompt}
        await first.send("/v1/submit", {**body, "placeholders": [first_name, {"name": "age", "in_out": True}]})
        await first.engine.answer("Name: ", " Ada ")
        await first.stored()
    async with durable(path, max_attempts=3) as second:
        await second.stored()
        assert (await second.get("name")).json["value"] == "Ada"
        (running,) = second.engine.running
        assert running.endswith(" Ada  Age:"), "the model's own text, before the transform"
        await second.engine.answer(running, " 36")
        await second.stored()
        assert (await second.get("age")).json["value"] == "36"


async def test_a_call_is_started_at_most_max_attempts_times_across_restarts(path: Path) -> None:
    for _ in range(2):
        async with durable(path, max_attempts=2) as served:
            if not served.executor.sessions.tenants:
                await served.submit("Write {{code}}", "code")
            await served.stored()
            assert list(served.engine.running) == ["Write "]
            await served.stored()
    async with durable(path, max_attempts=2) as last:
        assert last.engine.delivered == []
        failed = await last.get("code")
        await last.stored()
        assert failed.status == 424
        assert "it was started 2 times, and a gateway ended" in failed.json["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeated_request_gets_the_answer_of_the_gateway_before(path: Path, stream: bool) -> None:
    async with durable(path) as first:
        answered = await first.chat("Write", output="code; transform=strip", stream=stream)
        await first.engine.answer("Write", " x = 1 ")
        await first.stored()
        await answered.task
    async with durable(path) as second:
        again = await second.chat("Write", output="code; transform=strip", stream=stream)
        await second.stored()
        await again.task
        assert second.engine.delivered == []
        if stream:
            assert "".join(event["choices"][0]["delta"]["content"] for event in events(again)[:-1]) == " x = 1 "
            assert again.body.endswith(b"data: [DONE]\n\n")
        else:
            assert again.body == answered.body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_call_ended_without_its_client_gets_the_form_it_asks_for(
    path: Path, stream: bool
) -> None:
    """The second gateway ends the call that the first one began: its client comes back only to the third."""
    async with durable(path, max_attempts=2) as first:
        await first.chat("Write", output="code", stream=stream)
        await first.stored()
    async with durable(path, max_attempts=2) as second:
        await second.engine.answer("Write", "x = 1")
        await second.stored()
    async with durable(path, max_attempts=2) as third:
        again = await third.chat("Write", output="code", stream=stream)
        await third.stored()
        await again.task
        assert third.engine.delivered == []
        if stream:
            assert "".join(event["choices"][0]["delta"]["content"] for event in events(again)[:-1]) == "x = 1"
        else:
            assert again.json["choices"][0]["message"] == {"role": "assistant", "content": "x = 1"}
            assert again.json["object"] == "chat.completion"


async def test_a_repeated_request_attaches_to_the_call_that_was_interrupted(path: Path) -> None:
    async with durable(path, max_attempts=2) as first:
        await first.chat("Write", output="code")
        await first.chat("Test {{code}}", inputs="code", output="test")
        await first.stored()
    async with durable(path, max_attempts=2) as second:
        again = await second.chat("Test {{code}}", inputs="code", output="test")
        await second.engine.answer("Write", "x = 1")
        await second.engine.answer("Test x = 1", "fine")
        await second.stored()
        assert again.text == "fine"
        assert second.engine.delivered == ["Write", "Test x = 1"]


async def test_a_dependent_call_is_on_its_engine_before_the_commit_of_its_input(path: Path) -> None:
    served = DurableServed(path)
    await served.recover()
    first = await served.chat("Write", output="code")
    await served.chat("Test {{code}}", inputs="code", output="test")
    await served.stored()
    getting = await served.get("code")
    with held_commits(served):
        await served.engine.answer("Write", "x = 1")
        assert list(served.engine.running) == ["Test x = 1"], "the dependent call is on its engine"
        assert (first.messages, getting.messages) == ([], []), "and nobody was told of the value"
    await served.stored()
    assert (first.text, getting.json["value"]) == ("x = 1", "x = 1")
    await served.kill()


async def test_failures_skips_and_native_steps_are_what_they_were(path: Path) -> None:
    async with durable(path) as first:
        await first.send("/v1/variables", {"session_id": "s", "semantic_var_id": "bad", "error": "no data"})
        await first.submit("Of {{bad}}: {{out}}", "out", inputs=("bad",))
        await first.value("verdict", "no")
        await first.submit("Only if {{skipped}}", "skipped", when='verdict == "yes"')
        await first.send("/v1/variables", {"session_id": "s", "semantic_var_id": "sum", "inputs": ["verdict"]})
        before = [(await first.send("/v1/sessions/s", method="GET")).json["variables"]]
    async with durable(path) as second:
        assert (await second.send("/v1/sessions/s", method="GET")).json["variables"] == before[0]
        assert (await second.value("sum", "3")).status == 200
        await second.stored()
    async with durable(path) as third:
        got = await third.get("sum")
        await third.stored()
        assert got.json["value"] == "3"


async def test_deleted_sessions_are_gone_and_their_ids_refused(path: Path) -> None:
    async with durable(path) as first:
        await first.value("task", "x")
        await first.send("/v1/sessions/s", method="DELETE")
    async with durable(path) as second:
        assert len(second.executor.sessions) == 0
        assert (await second.value("task", "x")).status == 410


async def test_a_session_expires_by_the_wall_clock(path: Path) -> None:
    async with durable(path) as first:
        await first.send("/v1/sessions", {"session_id": "short", "ttl_s": 0.01})
        await first.send("/v1/sessions", {"session_id": "long", "ttl_s": 60})
    await asyncio.sleep(0.02)
    async with durable(path) as second:
        assert [session.session_id for session in second.executor.sessions] == ["long"]


async def test_objective_close_and_time_to_live_are_kept(path: Path) -> None:
    async with durable(path) as first:
        await first.send("/v1/sessions", {"session_id": "s", "ttl_s": 77, "objective": "throughput"})
        await first.send("/v1/sessions/s/close")
    async with durable(path) as second:
        (session,) = second.executor.sessions
        assert (session.ttl_s, session.objective, session.closed) == (77, "throughput", True)
        assert (await second.value("x", "1")).refusal == (409, "session_closed")


async def test_a_session_may_be_in_memory_only(path: Path) -> None:
    async with durable(path) as first:
        await first.value("secret", "not for the disk", plait_durable="false")
        await first.chat("Write", output="code", session="t", plait={"durable": False})
        await first.stored()
        assert not [session.session_id for session in first.executor.sessions if session.record.stores]
        await first.value("x", "1", plait_durable="perhaps")
        assert first.exchanges[-1].status == 400
    async with durable(path) as second:
        assert len(second.executor.sessions) == 0
    assert b"not for the disk" not in b"".join(file.read_bytes() for file in path.parent.iterdir())


async def test_until_sessions_are_read_they_cannot_be_used_but_plain_calls_can(path: Path) -> None:
    served = DurableServed(path)
    refused = [await served.chat("Write", output="code"), await served.get("code"), await served.value("x", "1")]
    assert {exchange.refusal for exchange in refused} == {(503, "recovering")}
    assert {exchange.headers[b"retry-after"] for exchange in refused} == {b"1"}
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    plain = await served.send(CHAT, body, plait_session="s")
    assert plain.messages == [] or plain.status != 503 or plain.json["error"]["code"] != "recovering"
    await served.recover()
    assert (await served.value("x", "1")).status == 200
    await served.kill()


async def test_a_session_that_is_asked_for_is_made_before_the_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"s{number}" for number in range(9)]
    async with durable(path) as first:
        for name in names:
            await first.send("/v1/variables", {"session_id": name, "semantic_var_id": "x", "value": name})
    monkeypatch.setattr(turns, "SLICE_S", -1.0)  # one session in each turn of the loop
    served = DurableServed(path)
    recovering = asyncio.ensure_future(served.recover())
    while not len(served.executor.sessions):  # noqa: ASYNC110 - as a client that comes again
        await asyncio.sleep(0)
    sessions = served.executor.sessions
    (tenant,) = sessions.tenants
    assert sessions.find(tenant, names[-1], loop_time_s()).values == {"x": names[-1]}
    assert len(sessions) < len(names)
    await recovering
    assert sorted(session.session_id for session in sessions) == sorted(names), "each once"
    await served.kill()


async def test_at_the_end_waiting_clients_are_told_at_once_and_the_next_gateway_goes_on(path: Path) -> None:
    async with durable(path, max_attempts=2) as first:
        running = await first.chat("Write", output="code")
        held = await first.chat("Test {{code}}", inputs="code", output="test")
        getting = await first.get("test")
        await first.stored()
        first.gateway.begin_stop()
        await settle()
        assert [exchange.refusal for exchange in (held, getting)] == [(503, "gateway_stopping")] * 2
        assert held.headers[b"retry-after"] == b"1"
        assert (await first.value("x", "1")).refusal == (503, "gateway_stopping")
        await first.engine.answer("Write", "x = 1")
        await first.stored()
        assert running.text == "x = 1", "what runs may end"
        assert first.engine.running == {}, "what it makes ready is for the next gateway"
    async with durable(path, max_attempts=2) as second:
        assert list(second.engine.running) == ["Test x = 1"]


async def test_secrets_of_clients_are_not_written(path: Path) -> None:
    async with durable(path) as first:
        await first.chat("Write", output="code")
        await first.stored()
    assert b"Bearer" not in b"".join(file.read_bytes() for file in path.parent.iterdir())
