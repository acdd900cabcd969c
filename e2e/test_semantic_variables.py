"""Programs given to the gateway all at once with the OpenAI SDK: the same texts as by hand, and whole failures."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import openai
import pytest
from openai import AsyncOpenAI

from e2e.programs import (
    Program,
    ProgramCall,
    ask,
    at_once,
    by_hand,
    chain,
    diamond,
    map_reduce,
    metagpt,
    whole,
)
from e2e.sdk import asking, async_client, content, refusal, sync_client
from e2e.server_process import eventually
from e2e.servers import Fleet, Launcher
from e2e.tenants import KEYS, get, post
from e2e.traces import ABSENT, METAGPT
from tests.waiting import SLOWNESS

# Programs.


@pytest.mark.parametrize(
    "program", [chain(20), map_reduce(16), diamond()], ids=["chain of 20", "map-reduce of 16", "diamond"]
)
async def test_a_program_gives_the_texts_that_it_gives_by_hand(tenant: AsyncOpenAI, program: Program) -> None:
    expected = await by_hand(tenant, program)
    assert await at_once(tenant, f"forwards-{len(program)}", program) == expected
    assert await at_once(tenant, f"backwards-{len(program)}", program[::-1]) == expected


@pytest.mark.skipif(not METAGPT.is_file(), reason=ABSENT)
async def test_a_software_team_of_25_calls(team: Fleet, tenant: AsyncOpenAI) -> None:
    program = metagpt()
    assert len(program) == 25
    expected = await by_hand(tenant, program)
    assert await at_once(tenant, "team", program) == expected
    whole = await asyncio.to_thread(get, team, "team", "revised7")
    assert whole.json()["value"] == expected["revised7"]


async def test_a_submitted_prompt_is_what_a_client_gets_that_goes_on_by_itself(
    team: Fleet, tenant: AsyncOpenAI
) -> None:
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 12, "seed": 4}
    user: Any = {"role": "user", "content": "Do a game. Code: "}
    first = await tenant.chat.completions.create(messages=[user], **fields)
    code = first.choices[0].message.content or ""
    begun: Any = {"role": "assistant", "content": f"{code} Test: "}
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    second = await tenant.chat.completions.create(messages=[user, begun], extra_body=going_on, **fields)

    waiting = asyncio.to_thread(get, team, "submitted", "test", criteria="latency")
    body = {
        "session_id": "submitted",
        "prompt": "Do {{task}}. Code: {{code}} Test: {{test}}",
        "placeholders": [{"name": "task"}, {"name": "code", "in_out": True}, {"name": "test", "in_out": True}],
        **fields,
    }
    placed = placements(team)
    made = (await asyncio.to_thread(post, team, "/v1/submit", body)).json()
    assert [output["semantic_var_id"] for output in made["outputs"]] == ["code", "test"]
    value = {"session_id": "submitted", "semantic_var_id": "task", "value": "a game"}
    assert (await asyncio.to_thread(post, team, "/v1/variables", value)).status_code == 200
    assert (await waiting).json()["value"] == second.choices[0].message.content
    assert (await asyncio.to_thread(get, team, "submitted", "code")).json()["value"] == code
    (engine,) = {name for name, calls in placements(team).items() if calls > placed[name]}
    assert placements(team)[engine] == placed[engine] + 2, "both steps ran on one engine"


async def test_a_whole_program_is_what_a_client_gets_that_goes_on_by_itself(team: Fleet, tenant: AsyncOpenAI) -> None:
    program = map_reduce(16)
    expected = await by_hand(tenant, program)
    gets: dict[str, Any] = {call.output: "latency" if call is program[-1] else None for call in program}
    body = {"session": "whole", "calls": whole(program), "gets": gets}
    got = await asyncio.to_thread(post, team, "/v1/programs", body)
    assert (got.status_code, got.json()["values"], got.json()["errors"]) == (200, expected, {})

    streamed = await asyncio.to_thread(post, team, "/v1/programs", {**body, "session": "streamed", "stream": True})
    events = [block.split("\ndata: ") for block in streamed.text.split("\n\n") if block.startswith("event: ")]
    values = [json.loads(data) for kind, data in events if kind == "event: value"]
    assert {value["name"]: value["value"] for value in values} == expected
    assert events[-1][0] == "event: done"
    lines = [json.loads(line) for line in team.gateway.log().splitlines() if '"event":"call"' in line]
    maps = [line for line in lines if "/whole/" in (line["group"] or "")]
    assert [line["objective"] for line in maps] == ["latency"] * 16, "the first stage knows what it is for"


def placements(team: Fleet) -> dict[str, float]:
    return {name: team.gateway.metric("plait_placements_total", engine=name) for name in team.engines}


async def test_raw_prompts_are_chained_too(tenant: AsyncOpenAI) -> None:
    async def complete(prompt: str, **headers: str) -> str:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await tenant.completions.create(model="demo", prompt=prompt, max_tokens=9, extra_headers=named)
        return answer.choices[0].text

    by_hand = await complete("After " + await complete("First") + "!")
    held = complete("After {{a}}!", plait_session="raw", plait_inputs="a")
    assert (await asyncio.gather(held, complete("First", plait_session="raw", plait_output="a")))[0] == by_hand


async def test_a_chained_answer_names_its_session_once(team: Fleet) -> None:
    headers = {"authorization": f"Bearer {KEYS[0]}", "plait-session": "named", "plait-output": "a"}
    for _ in range(2):
        answer = await asyncio.to_thread(
            team.gateway.post, "/v1/chat/completions", json=asking("Hello."), headers=headers
        )
        assert answer.headers.get_list("plait-session") == ["named"]
        assert answer.headers["plait-engine"] in team.engines


# Streams.


async def test_a_held_stream_is_kept_alive_and_brings_the_same_text(team: Fleet, tenant: AsyncOpenAI) -> None:
    program = diamond()
    expected = await by_hand(tenant, program)
    held = [asyncio.create_task(ask(tenant, "streams", call, stream=True)) for call in program[::-1]]
    for call, stream in zip(program[::-1], await asyncio.gather(*held), strict=True):
        assert content([chunk async for chunk in stream]) == expected[call.output]

    stream = await ask(tenant, "comments", ProgramCall("b", "{{a}}"), stream=True)
    await asyncio.to_thread(
        post, team, "/v1/variables", {"session_id": "comments", "semantic_var_id": "a", "value": "x"}
    )
    assert content([chunk async for chunk in stream]).startswith("This is emulated text.")


async def test_after_a_comment_a_failure_is_an_error_in_the_stream(tenant: AsyncOpenAI) -> None:
    stream = await ask(tenant, "late", ProgramCall("b", "{{a}}"), stream=True)  # answered: a comment has come
    with pytest.raises(openai.BadRequestError):
        await ask(tenant, "late", ProgramCall("a", "x" * 20_000, max_tokens=10**9))
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "input_failed"


async def test_a_get_streams_what_is_generated(team: Fleet, tenant: AsyncOpenAI) -> None:
    await asyncio.to_thread(post, team, "/v1/sessions", {"session_id": "grows"})
    waiting = asyncio.to_thread(get, team, "grows", "a", stream=True)
    call = ProgramCall("a", "Write.", max_tokens=60)
    text, response = await asyncio.gather(at_once(tenant, "grows", [call]), waiting)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    *deltas, whole = map(json.loads, lines[:-1])
    assert "".join(delta["delta"] for delta in deltas) == whole["value"] == text["a"]


# Failures.


async def test_a_failing_branch_takes_its_successors_and_leaves_the_others(tenant: AsyncOpenAI) -> None:
    calls = [
        ProgramCall("good", "Fine."),
        ProgramCall("bad", "Too long.", max_tokens=10**9),
        ProgramCall("after", "{{bad}}"),
        ProgramCall("last", "{{after}} {{good}}"),
        ProgramCall("aside", "{{good}}"),
    ]
    results = await asyncio.gather(*(ask(tenant, "branch", call) for call in calls), return_exceptions=True)
    good, bad, after, last, aside = (cast("Any", result) for result in results)
    assert good.choices[0].message.content
    assert aside.choices[0].message.content
    assert refusal(bad) == (400, "context_length_exceeded")
    assert refusal(after) == refusal(last) == (424, "input_failed")
    assert "its input after failed, because" in str(last)
    assert "has a context of" in str(last)


async def test_an_engine_that_dies_fails_the_chain_and_the_retry_mends_it(launch: Launcher) -> None:
    engine = launch.engine("dying", time_scale=1)
    gateway = launch.gateway([engine])
    Fleet(gateway, {engine.name: engine}).start()
    async with async_client(gateway) as client:
        first = asyncio.create_task(ask(client, "s", ProgramCall("a", "Write.", max_tokens=2_000)))
        second = asyncio.create_task(ask(client, "s", ProgramCall("b", "{{a}}")))
        await asyncio.to_thread(eventually, lambda: gateway.metric("plait_held_calls") == 1)
        await asyncio.to_thread(eventually, lambda: engine.metric("plait_engine_calls_running") == 1)
        engine.kill()
        results = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(results[0], openai.InternalServerError)
        assert refusal(results[1]) == (424, "input_failed")
        engine.start()
        await asyncio.to_thread(eventually, lambda: gateway.metric("plait_engine_up") == gateway.processes)
        for call in (ProgramCall("a", "Write."), ProgramCall("b", "{{a}}")):
            assert (await ask(client, "s", call)).choices


async def test_a_transform_makes_the_value_and_its_failure_fails_the_variable(team: Fleet, tenant: AsyncOpenAI) -> None:
    async def outputs(transform: str, variable: str) -> Any:
        headers = {"plait-session": "transformed", "plait-output": f"{variable}; transform={transform}"}
        answer = await tenant.chat.completions.create(**asking("Write."), extra_headers=headers)
        assert answer.choices[0].message.content.startswith("This is")
        return (await asyncio.to_thread(get, team, "transformed", variable)).json()

    assert (await outputs("regex('This is (\\w+)')", "word"))["value"] == "emulated"
    failed = await outputs("code_block", "code")
    assert failed["error"]["code"] == "variable_failed"
    assert "transform code_block" in failed["error"]["message"]


async def test_cycles_and_second_producers_are_conflicts(team: Fleet, tenant: AsyncOpenAI) -> None:
    held = asyncio.create_task(ask(tenant, "conflicts", ProgramCall("b", "{{a}}")))
    await asyncio.to_thread(eventually, lambda: team.gateway.metric("plait_held_calls") == 1)
    with pytest.raises(openai.ConflictError) as cycle:
        await ask(tenant, "conflicts", ProgramCall("a", "{{b}}"))
    assert cycle.value.code == "cycle"
    first = ask(tenant, "conflicts", ProgramCall("a", "one"))
    second = ask(tenant, "conflicts", ProgramCall("a", "two"))
    results = await asyncio.gather(first, second, return_exceptions=True)
    (conflict,) = [result for result in results if isinstance(result, openai.ConflictError)]
    assert conflict.code == "double_producer"
    assert (await held).choices[0].message.content


def gone_clients(team: Fleet) -> int:
    return team.gateway.log().count('"outcome":"client_gone"')


async def test_a_client_that_retries_gets_the_same_answer(team: Fleet, tenant: AsyncOpenAI) -> None:
    """The SDK's first attempt runs into its own time limit; its second attaches to the call."""
    calls, gone = team.gateway.metric("plait_calls_total", outcome="ok"), gone_clients(team)
    call = ProgramCall("a", "Wait for {{x}}.")
    other = asyncio.create_task(ask(tenant, "retried", call))
    hasty = tenant.with_options(timeout=0.2 * SLOWNESS, max_retries=100)
    waiting = asyncio.create_task(ask(hasty, "retried", call))
    await asyncio.to_thread(eventually, lambda: gone_clients(team) > gone)
    await asyncio.to_thread(
        post, team, "/v1/variables", {"session_id": "retried", "semantic_var_id": "x", "value": "it"}
    )
    assert (await waiting).choices[0].message.content == (await other).choices[0].message.content
    assert team.gateway.metric("plait_calls_total", outcome="ok") == calls + 1


# Clients and tenants.


async def test_a_client_that_goes_away_takes_only_what_is_its_own(team: Fleet, tenant: AsyncOpenAI) -> None:
    def shown() -> dict[str, Any]:
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        calls: dict[str, Any] = team.gateway.get("/v1/sessions/gone", headers=headers).json()["calls"]
        return calls

    own = asyncio.create_task(ask(tenant, "gone", ProgramCall("own", "{{never}}")))
    shared = asyncio.create_task(ask(tenant, "gone", ProgramCall("shared", "{{task}}")))
    user = asyncio.create_task(ask(tenant, "gone", ProgramCall("user", "{{shared}}")))
    await asyncio.to_thread(eventually, lambda: team.gateway.metric("plait_held_calls") == 3)
    for task in (own, shared):
        task.cancel()
    await asyncio.gather(own, shared, return_exceptions=True)
    await asyncio.to_thread(eventually, lambda: shown()["waiting"] == 2)
    await asyncio.to_thread(
        post, team, "/v1/variables", {"session_id": "gone", "semantic_var_id": "task", "value": "x"}
    )
    assert (await user).choices[0].message.content
    assert (await asyncio.to_thread(get, team, "gone", "shared")).json()["state"] == "set"


def test_two_tenants_may_use_the_same_names(team: Fleet) -> None:
    for key, value in zip(KEYS, ("one", "two"), strict=True):
        post(team, "/v1/variables", {"session_id": "same", "semantic_var_id": "x", "value": value}, key)
    for key, value in zip(KEYS, ("one", "two"), strict=True):
        got = post(team, "/v1/get", {"session_id": "same", "semantic_var_id": "x"}, key)
        assert got.json()["value"] == value
        with sync_client(team.gateway, api_key=key) as client:
            headers = {"plait-session": "same", "plait-inputs": "x"}
            assert client.chat.completions.create(**asking("{{x}}"), extra_headers=headers).choices
    post(team, "/v1/sessions", {"session_id": "mine"}, KEYS[0])
    mine = team.gateway.get("/v1/sessions/mine", headers={"authorization": f"Bearer {KEYS[1]}"})
    assert mine.status_code == 404


async def test_nothing_is_left_of_a_session_that_was_deleted(team: Fleet, tenant: AsyncOpenAI) -> None:
    def held() -> list[float]:
        names = ("sessions", "semantic_variables", "held_calls", "held_bytes")
        return [team.gateway.metric(f"plait_{name}") for name in names]

    before = held()
    await at_once(tenant, "freed", diamond())
    waiting = asyncio.create_task(ask(tenant, "freed", ProgramCall("x", "{{never}}")))
    await asyncio.to_thread(eventually, lambda: held()[2] == before[2] + 1)
    assert held() > before
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    deleted = await asyncio.to_thread(team.gateway.request, "DELETE", "/v1/sessions/freed", headers=headers)
    assert deleted.json()["deleted"]
    with pytest.raises(openai.APIStatusError) as caught:
        await waiting
    assert refusal(caught.value) == (410, "session_ended")
    assert held() == before
