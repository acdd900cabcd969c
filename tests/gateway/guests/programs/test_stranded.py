"""When no request comes any more, those that wait for what nobody can send are answered, and the others go on."""

from __future__ import annotations

from tests.gateway.guests.programs.chained_gateway import events, served_calls, settle

STOPPING = (503, "gateway_stopping")


async def test_calls_and_gets_that_nothing_can_end_get_a_503() -> None:
    async with served_calls() as served:
        held = await served.chat("Use {{v}}", inputs="v", output="w")
        behind = await served.chat("Use {{w}}", inputs="w")
        gets = [await served.get(variable) for variable in ("v", "w", "x")]
        stream = await served.get("w", stream=True)
        served.gateway.on_closed()
        await settle()
        assert [one.refusal for one in (held, behind, *gets)] == [STOPPING] * 5
        assert held.headers[b"retry-after"] == b"1"
        assert events(stream)[-1]["error"]["code"] == "gateway_stopping"


async def test_what_a_running_call_will_produce_still_comes() -> None:
    async with served_calls() as served:
        first = await served.chat("Make it", output="v")
        held = await served.chat("Use {{v}}", inputs="v", output="w")
        got = await served.get("w")
        served.gateway.on_closed()
        await settle()
        await served.engine.answer("Make it", "text")
        await served.engine.answer("Use text", "more")
        assert (first.text, held.text, got.json["value"]) == ("text", "more", "more")


async def test_a_call_that_needs_one_of_each_is_given_up() -> None:
    async with served_calls() as served:
        await served.chat("Make it", output="v")
        held = await served.chat("Use {{v}} {{x}}", inputs="v, x")
        served.gateway.on_closed()
        await settle()
        assert held.refusal == STOPPING
        await served.engine.answer("Make it", "text")
