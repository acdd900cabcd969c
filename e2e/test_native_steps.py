"""Steps that a client computes between two calls of a program, and conditions on what they give."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from e2e.programs import ProgramCall, ask
from e2e.sdk import asking, refusal
from e2e.servers import Fleet
from e2e.tenants import get, post


def call_of(prompt: str, made: str, *taken: str, **more: Any) -> dict[str, Any]:
    named = [{"name": made, "in_out": True}, *({"name": name} for name in taken)]
    return {"model": "demo", "max_tokens": 8, "seed": 4, "prompt": prompt, "placeholders": named, **more}


def test_a_client_computes_between_two_calls_and_one_side_is_taken(team: Fleet) -> None:
    calls = [
        call_of("Write {{task}} {{code}}", "code", "task"),
        call_of("Praise {{size}} {{praise}}", "praise", "size", when='verdict == "good"'),
        call_of("Mend {{size}} {{mended}}", "mended", "size", when='verdict != "good"'),
        call_of("Publish {{praise}} {{end}}", "end", "praise"),
    ]
    natives = [{"output": "size", "inputs": ["code"]}, {"output": "verdict", "inputs": ["size"], "seconds": 0.1}]
    program = {"session": "native", "values": {"task": "it"}, "calls": calls, "natives": natives}
    with ThreadPoolExecutor() as pool:
        gets = {"end": "latency", "mended": "latency"}
        running = pool.submit(post, team, "/v1/programs", {**program, "gets": gets})
        set_by_client = partial(post, team, "/v1/variables")
        early = {"session_id": "native", "semantic_var_id": "verdict", "value": "good"}
        code = get(team, "native", "code").json()["value"]
        assert code
        assert set_by_client(early).json()["error"]["code"] == "inputs_missing"
        sized = {"session_id": "native", "semantic_var_id": "size", "value": str(len(code))}
        assert set_by_client(sized).json()["state"] == "set"
        assert get(team, "native", "size").json()["value"] == str(len(code))
        assert set_by_client(early).json()["state"] == "set"
        answer = running.result().json()
    assert answer["values"]["end"]
    assert answer["errors"]["mended"]["code"] == "skipped"
    assert get(team, "native", "mended").status_code == 424


async def test_the_openai_sdk_takes_one_side_and_a_failed_step_fails_what_needs_it(
    team: Fleet, tenant: AsyncOpenAI
) -> None:
    async def when(condition: str, **headers: str) -> Any:
        named = {"plait-session": "sides", "plait-when": condition, **headers}
        return await tenant.chat.completions.create(**asking("Go on"), extra_headers=named)

    good, bad = asyncio.create_task(when('verdict == "good"')), asyncio.create_task(when('verdict != "good"'))
    value = {"session_id": "sides", "semantic_var_id": "verdict", "value": " good\n"}
    await asyncio.to_thread(post, team, "/v1/variables", value)
    assert (await good).choices[0].message.content
    with pytest.raises(openai.APIStatusError) as caught:
        await bad
    assert refusal(caught.value) == (424, "skipped")

    step = {"session_id": "sides", "semantic_var_id": "parsed", "inputs": ["verdict"]}
    assert (await asyncio.to_thread(post, team, "/v1/variables", step)).json()["state"] == "pending"
    held = asyncio.create_task(ask(tenant, "sides", ProgramCall("x", "{{parsed}}")))
    failed = {"session_id": "sides", "semantic_var_id": "parsed", "error": "ValueError: not JSON"}
    await asyncio.to_thread(post, team, "/v1/variables", failed)
    with pytest.raises(openai.APIStatusError) as caught:
        await held
    assert refusal(caught.value) == (424, "input_failed")
    assert "ValueError: not JSON" in str(caught.value)
