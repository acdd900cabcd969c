"""A software team of 25 calls on real engines: given to the gateway all at once, and chained by its client.

The prompts are a recorded MetaGPT run's, the values in them what the tiny model says. Everyone sends the same calls to
the same engines, with a cache salt of their own: they find nothing in the caches that another has left there.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from openai import AsyncOpenAI

from e2e.programs import METAGPT, Answers, Program, chained_by_client, chained_by_gateway, metagpt, texts, wanted
from e2e.sdk import async_client
from e2e.servers import Server
from e2e.vllm.engines import MODEL
from e2e.vllm.findings import Findings
from e2e.vllm.fleet import VllmFleet, new_gateway
from plait.backends.tokenization.tokenizer import load_tokenizer

pytestmark = pytest.mark.skipif(not METAGPT.is_file(), reason="the recorded run (../shared/traces/metagpt) is not here")

AT_ONCE: Final = "all at once"
FOR_LATENCY: Final = "all at once, results wanted with objective latency"
BY_CLIENT: Final = "chained by the client, same gateway without sessions"
ROUND_ROBIN: Final = "chained by the client, engines in turn without a gateway"
CHAINED: Final = (AT_ONCE, FOR_LATENCY)


@dataclass(frozen=True)
class Run:
    """What became of the calls; `values` are what the gateway holds of them, `grouped` how many it knew as a group's.

    `cached_tokens` of prompts came out of the engines' caches, by their own count.
    """

    answers: Answers
    values: Mapping[str, str]
    grouped: int
    cached_tokens: float
    duration_s: float

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.usage.prompt_tokens for answer in self.answers.values() if answer.usage)


Chaining = Callable[[AsyncOpenAI, list[AsyncOpenAI], dict[str, Any]], Coroutine[None, None, Answers]]
"""Runs the calls by clients of the gateway and of the engines; each request has the fields as well."""


@pytest.fixture(scope="module")
def program() -> Program:
    return metagpt()


@pytest.fixture(scope="module")
def runs(fleet: VllmFleet, program: Program, model: Path, folder: Path) -> dict[str, Run]:
    """One after the other, each with a gateway that has placed nothing yet."""
    for_latency = wanted(program, "latency")
    chainings: dict[str, Chaining] = {
        AT_ONCE: lambda gateway, _, fields: chained_by_gateway(gateway, "team", program, **fields),
        FOR_LATENCY: lambda gateway, _, fields: chained_by_gateway(gateway, "team", for_latency, **fields),
        BY_CLIENT: lambda gateway, _, fields: chained_by_client([gateway], program, **fields),
        ROUND_ROBIN: lambda _, engines, fields: chained_by_client(engines, program, **fields),
    }
    done = {}
    for number, (name, chaining) in enumerate(chainings.items()):
        gateway = new_gateway(f"gateway-metagpt-{number}", fleet.engines, model, folder)
        with ExitStack() as stack:
            VllmFleet(gateway, fleet.engines).start_gateway(stack)
            done[name] = run(fleet, gateway, chaining, cache_salt=name)
    return done


def run(fleet: VllmFleet, gateway: Server, chaining: Chaining, cache_salt: str) -> Run:
    extra = {"ignore_eos": True, "cache_salt": cache_salt}
    fields = {"model": MODEL, "temperature": 0, "timeout": 120, "extra_body": extra}

    async def answered() -> Answers:
        clients = [async_client(server) for server in (gateway, *fleet.engines.values())]
        try:
            return await chaining(clients[0], clients[1:], fields)
        finally:
            await asyncio.gather(*(client.close() for client in clients))

    cached_before, began_s = fleet.cached_prompt_tokens(), time.monotonic()
    grouped_before = len(re.findall(r'"group": ?"', gateway.log()))
    answers = asyncio.run(answered())
    duration_s = time.monotonic() - began_s
    cached_tokens = fleet.cached_prompt_tokens() - cached_before
    variables = {name: gateway.get(f"/v1/variables/team/{name}") for name in answers}
    values = {name: found.json()["value"] for name, found in variables.items() if found.status_code == 200}
    grouped = len(re.findall(r'"group": ?"', gateway.log())) - grouped_before
    return Run(answers, values, grouped, cached_tokens, duration_s)


@pytest.mark.parametrize("name", CHAINED)
def test_every_value_is_in_its_place(runs: dict[str, Run], program: Program, name: str) -> None:
    """Each prompt is as long as with the values filled in by hand, and those are what their calls have answered."""
    tokenizer, done = load_tokenizer("embedded"), runs[name]
    assert done.values == texts(done.answers)
    for call in program:
        usage = done.answers[call.output].usage
        assert usage is not None
        prompt = call.filled_in(done.values)
        assert usage.prompt_tokens == len(tokenizer.encode_chat([{"role": "user", "content": prompt}]))
        assert usage.completion_tokens == call.max_tokens


def test_who_chains_changes_no_text(runs: dict[str, Run]) -> None:
    expected = texts(runs[ROUND_ROBIN].answers)
    assert all(texts(done.answers) == expected for done in runs.values())
    assert len(set(expected.values())) == len(expected), "else equal texts would mean little"


def test_coders_and_reviewers_are_groups_where_results_are_wanted(runs: dict[str, Run]) -> None:
    assert {name: done.grouped for name, done in runs.items()} == dict.fromkeys(runs, 0) | {FOR_LATENCY: 16}


def test_no_fewer_tokens_come_out_of_caches_than_when_clients_chain(runs: dict[str, Run], findings: Findings) -> None:
    """With the objective they are noted only: calls that run out of time may start before the prefix that they share
    has been computed by another, and then compute it once more.
    """
    for name, done in runs.items():
        findings.figures[f"MetaGPT, {len(done.answers)} calls {name}"] = {
            "prompt tokens": done.prompt_tokens,
            "cached": done.cached_tokens,
            "share cached": done.cached_tokens / done.prompt_tokens,
            "duration (s)": done.duration_s,
        }
    assert findings.at_least(
        "cached prompt tokens of MetaGPT, all at once / chained by the client through the same gateway",
        runs[AT_ONCE].cached_tokens / runs[BY_CLIENT].cached_tokens,
        1.0,
    )
    assert findings.at_least(
        "cached prompt tokens of MetaGPT, all at once / chained by the client with engines in turn",
        runs[AT_ONCE].cached_tokens / runs[ROUND_ROBIN].cached_tokens,
        1.0,
    )
