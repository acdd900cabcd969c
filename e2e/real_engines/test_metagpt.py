"""A software team of 25 calls on real engines: as one program, as calls sent at once, and chained by its client.

The prompts are a recorded MetaGPT run's, the values in them what the tiny model says. Everyone sends the same calls to
the same engines, with a cache salt of their own: they find nothing in the caches that another has left there.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import pytest
from openai import AsyncOpenAI

from e2e.programs import Program, chained_by_client, chained_by_gateway, metagpt, texts, wanted, whole
from e2e.real_engines.engine import MODEL
from e2e.real_engines.findings import Findings
from e2e.real_engines.fleet import EngineFleet, new_gateway
from e2e.sdk import async_client
from e2e.server_process import Server
from e2e.traces import ABSENT, METAGPT
from plait.backends.tokenization.loading import load_tokenizer

pytestmark = pytest.mark.skipif(not METAGPT.is_file(), reason=ABSENT)

PROGRAM: Final = "as one program, results wanted with objective latency"
AT_ONCE: Final = "all at once"
FOR_LATENCY: Final = "all at once, results wanted with objective latency"
BY_CLIENT: Final = "chained by the client, same gateway without sessions"
ROUND_ROBIN: Final = "chained by the client, engines in turn without a gateway"
CHAINED: Final = (PROGRAM, AT_ONCE, FOR_LATENCY)
TIMED: Final = (PROGRAM, BY_CLIENT)
NIGHTLY: Final = "PLAIT_NIGHTLY" in os.environ
"""Otherwise only the program runs, once: virtual time compares it with the others."""
TIMES: Final = 7 if NIGHTLY else 1
"""`TIMED` are run so often, each first in every other turn: the median time counts."""


@dataclass(frozen=True)
class Run:
    """What became of the calls: each output's text, and how many calls the gateway knew as a group's.

    `values` are what the gateway holds. `cached_tokens` of the `prompt_tokens` came out of the engines' caches, by
    their own count.
    """

    texts: Mapping[str, str]
    values: Mapping[str, str]
    grouped: int
    prompt_tokens: float
    cached_tokens: float
    duration_s: float


Chaining = Callable[[AsyncOpenAI, list[AsyncOpenAI], dict[str, Any]], Coroutine[None, None, dict[str, str]]]
"""Runs the calls by clients of the gateway and of the engines. Each request has the fields as well."""


@pytest.fixture(scope="module")
def program() -> Program:
    return metagpt()


@pytest.fixture(scope="module")
def runs(fleet: EngineFleet, program: Program, model: Path, folder: Path) -> dict[str, list[Run]]:
    """One after the other, each with a gateway that has placed nothing yet."""
    for_latency = wanted(program, "latency")

    async def by_gateway(gateway: AsyncOpenAI, program: Program, fields: dict[str, Any]) -> dict[str, str]:
        return texts(await chained_by_gateway(gateway, "team", program, **fields))

    async def by_client(servers: list[AsyncOpenAI], fields: dict[str, Any]) -> dict[str, str]:
        return texts(await chained_by_client(servers, program, **fields))

    chainings: dict[str, Chaining] = {
        PROGRAM: lambda gateway, _, fields: as_one_program(gateway, program, fields),
        AT_ONCE: lambda gateway, _, fields: by_gateway(gateway, program, fields),
        FOR_LATENCY: lambda gateway, _, fields: by_gateway(gateway, for_latency, fields),
        BY_CLIENT: lambda gateway, _, fields: by_client([gateway], fields),
        ROUND_ROBIN: lambda _, engines, fields: by_client(engines, fields),
    }
    done: dict[str, list[Run]] = {name: [] for name in (chainings if NIGHTLY else (PROGRAM,))}
    for turn in range(TIMES):
        first = chainings if NIGHTLY else (PROGRAM,)
        for number, name in enumerate(first if turn == 0 else TIMED[:: 1 if turn % 2 else -1]):
            gateway = new_gateway(f"gateway-metagpt-{turn}-{number}", fleet.engines, model, folder)
            with ExitStack() as stack:
                EngineFleet(gateway, fleet.engines).start_gateway(stack)
                done[name].append(run(fleet, gateway, chainings[name], cache_salt=f"{name} {turn}"))
    return done


async def as_one_program(gateway: AsyncOpenAI, program: Program, fields: dict[str, Any]) -> dict[str, str]:
    """One request, which asks for what no other call takes. The other texts are no answers: the gateway keeps them."""
    said = {name: value for name, value in fields.items() if name not in {"timeout", "extra_body"}}
    calls = [call | said | fields["extra_body"] for call in whole(program)]
    gets = {call.output: "latency" for call in wanted(program, "latency") if call.objective}
    answer: Any = await gateway.post(
        "/programs", cast_to=object, body={"session": "team", "calls": calls, "gets": gets}
    )
    assert answer["errors"] == {}
    return dict(answer["values"])


def run(fleet: EngineFleet, gateway: Server, chaining: Chaining, cache_salt: str) -> Run:
    extra = {"ignore_eos": True, "cache_salt": cache_salt}
    fields = {"model": MODEL, "temperature": 0, "timeout": 120, "extra_body": extra}

    async def answered() -> tuple[dict[str, str], float]:
        clients = [async_client(server) for server in (gateway, *fleet.engines.values())]
        try:
            began_s = time.monotonic()
            return await chaining(clients[0], clients[1:], fields), time.monotonic() - began_s
        finally:
            await asyncio.gather(*(client.close() for client in clients))

    computed, cached = fleet.computed_prompt_tokens(), fleet.cached_prompt_tokens()
    found, duration_s = asyncio.run(answered())
    computed, cached = fleet.computed_prompt_tokens() - computed, fleet.cached_prompt_tokens() - cached
    variables = {call.output: gateway.get(f"/v1/variables/team/{call.output}") for call in metagpt()}
    values = {name: got.json()["value"] for name, got in variables.items() if got.status_code == 200}
    grouped = len(re.findall(r'"group": ?"', gateway.log()))
    return Run(found, values, grouped, computed + cached, cached, duration_s)


@pytest.mark.parametrize(
    "name", [PROGRAM, *(pytest.param(name, marks=pytest.mark.nightly) for name in CHAINED if name != PROGRAM)]
)
def test_every_value_is_in_its_place(runs: dict[str, list[Run]], program: Program, name: str) -> None:
    """The prompts are as long as with the values filled in by hand, and those are what their calls have answered."""
    tokenizer = load_tokenizer("embedded")
    for done in runs[name]:
        assert done.texts.items() <= done.values.items()
        assert list(done.values) == [call.output for call in program]
        prompts = ([{"role": "user", "content": call.filled_in(done.values)}] for call in program)
        assert done.prompt_tokens == sum(len(tokenizer.encode_chat(prompt)) for prompt in prompts)


@pytest.mark.nightly
def test_who_chains_changes_no_text(runs: dict[str, list[Run]]) -> None:
    expected = runs[ROUND_ROBIN][0].texts
    assert all(done.texts.items() <= expected.items() for repeated in runs.values() for done in repeated)
    assert all(done.values == expected for name in CHAINED for done in runs[name])
    assert len(set(expected.values())) == len(expected), "else equal texts would mean little"


def test_coders_and_reviewers_are_groups_where_results_are_wanted(runs: dict[str, list[Run]]) -> None:
    """A program's reviewers and coders, and the coders who revise, if all of these are awaited together."""
    grouped = {name: {done.grouped for done in repeated} for name, repeated in runs.items()}
    assert grouped == {name: {16} if name in {FOR_LATENCY, PROGRAM} else {0} for name in runs}


@pytest.mark.nightly
def test_no_fewer_tokens_come_out_of_caches_than_when_clients_chain(
    runs: dict[str, list[Run]], findings: Findings
) -> None:
    """Calls wanted soon but sent one by one are only noted: some are placed before it is known what they share.

    Times are noted too. The client has no network between itself and the gateway, so chaining gains nothing there.
    """
    for name, repeated in runs.items():
        findings.figures[f"MetaGPT, {len(repeated[0].texts)} values {name}"] = {
            "prompt tokens": repeated[0].prompt_tokens,
            "cached, at least": min(done.cached_tokens for done in repeated),
            "share cached": min(done.cached_tokens / done.prompt_tokens for done in repeated),
            "duration (s), at least": min(done.duration_s for done in repeated),
        }
    taken_s = {name: median(done.duration_s for done in runs[name]) for name in TIMED}
    findings.at_most("MetaGPT: time as one program / chained by the client", taken_s[PROGRAM] / taken_s[BY_CLIENT], 1.0)
    held = [
        findings.at_least(
            f"cached prompt tokens of MetaGPT, {ours} / {theirs}",
            min(done.cached_tokens for done in runs[ours]) / max(done.cached_tokens for done in runs[theirs]),
            1.0,
        )
        for ours in (PROGRAM, AT_ONCE)
        for theirs in (BY_CLIENT, ROUND_ROBIN)
    ]
    assert all(held)
