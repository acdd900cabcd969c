"""Accounts of gateways that share a database: what was used, keys and budgets hold over all, whatever dies."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Final, NamedTuple

import msgspec
import pytest

from e2e.account_load import Load
from e2e.accounts import ADMIN, Made, bearer, issue, opens, revoke, used_by
from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.postgresql.server import ABSENT, binaries, new_database, shared_postgres
from e2e.sdk import asking
from e2e.server_process import Server, eventually
from e2e.servers import Fleet, Launcher
from e2e.several_gateways import Gateways
from tests.waiting import SLOWNESS

pytestmark = pytest.mark.skipif(binaries() is None, reason=ABSENT)

LOADED: Final = {kills: [f"tenant-{number}-of-{kills}" for number in range(5)] for kills in (0, 2, 20)}
"""The tenants of calls with so many kills."""

KEYS: Final = {name: f"the-key-of-{name}" for name in ("blue", "green", *chain(*LOADED.values()))}
REVOKED_WITHIN_S: Final = 5 * SLOWNESS
AT_ONCE: Final = 200
OUTPUT: Final = 40
MORE_OUTPUT: Final = 100
"""More than a stream reserves at first."""

AN_EVENT: Final = 1
"""Tokens of an event of these engines."""

REFUSED: Final = "429 budget_exceeded"
UNAVAILABLE: Final = "503 accounts_unavailable"
STREAM_LOST: Final = "stream accounts_unavailable"
"""Signs of life had begun the answer before."""

STREAM_ENDS: Final = "stream budget_exceeded"
TEXT: Final = "How much is left of it?"


class Setting(NamedTuple):
    """Three gateways, and the URL of their database."""

    gateways: Gateways
    database: str


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    with Launcher(tmp_path_factory.mktemp("accounts")) as launch:
        engine = launch.engine("a")
        tenants = [{"name": name, "api_keys": [key]} for name, key in KEYS.items()]
        database = new_database(shared_postgres())
        gateways = launch.gateways([engine], database=database, tenants=tenants, server={"admin_key": ADMIN})
        Fleet(gateways, {engine.name: engine}).start()
        yield Setting(gateways, database)


@pytest.mark.parametrize(("calls", "kills"), [(100, 0), (160, 2), pytest.param(3_000, 20, marks=pytest.mark.nightly)])
async def test_usage_is_the_answers_own(setting: Setting, calls: int, kills: int) -> None:
    gateways, chance = setting.gateways, random.Random(11)
    load = Load(gateways.members, {name: KEYS[name] for name in LOADED[kills]}, chance)

    async def kill() -> None:
        number = chance.randrange(3)
        killed_s = time.monotonic()
        await asyncio.to_thread(gateways.members[number].kill)
        load.may_be_lost(number, killed_s)
        gateways.members[number].start()
        await asyncio.to_thread(gateways.members[number].wait_until_ready)

    for _ in range(max(1, kills)):
        await load.run(calls // max(1, kills), kill if kills else None)
        lost = await asyncio.to_thread(load.check, gateways.members[0])
    assert lost <= len(load.lost), f"of {calls} calls"
    assert len(load.answered) == calls // max(1, kills) * max(1, kills)


class Got(NamedTuple):
    """What a call got: its outcome, and tokens of output."""

    outcome: str
    output: int


def read(answer: Answer) -> Got:
    if answer.status != 200:
        return Got(f"{answer.status} {msgspec.json.decode(answer.body)['error']['code']}", 0)
    if answer.header("content-type") == "application/json":
        whole = msgspec.json.decode(answer.body)
        capped = answer.header("plait-budget") or "whole"
        return Got(capped, whole["usage"]["completion_tokens"])
    events = [event.removeprefix(b"data: ") for event in answer.body.split(b"\n\n") if event.startswith(b"data: {")]
    decoded = [msgspec.json.decode(event) for event in events]
    texts = sum(1 for event in decoded if event.get("choices") and event["choices"][0]["delta"].get("content"))
    error = decoded[-1].get("error")
    outcome = "whole stream" if error is None else f"stream {error['code']}"
    return Got(outcome, texts)


async def all_at_once(gateways: Gateways, key: str, calls: int = AT_ONCE, output: int = OUTPUT) -> list[Got]:
    """Streams and other calls, a third of them to each gateway."""
    clients = [Client(one.port) for one in gateways.members]

    async def call(number: int) -> Got:
        body = asking(TEXT, max_tokens=output, ignore_eos=True, stream=number % 2 == 0)
        return read(await clients[number % 3].post(CHAT, body, bearer(key)))

    got = await asyncio.gather(*(call(number) for number in range(calls)))
    for client in clients:
        await client.close()
    return got


def prompt_tokens(gateway: Server) -> int:
    body = asking(TEXT, max_tokens=1)
    answer = gateway.post(CHAT, json=body, headers=bearer(KEYS["green"]))
    tokens: int = answer.json()["usage"]["prompt_tokens"]
    return tokens


def leased(setting: Setting, made: Made) -> int:
    """What all gateways have leased of a key's budget: it is used, or reserved by calls, or about to be given back."""
    found = shared_postgres().run(
        f"SELECT sum(leased) FROM plait.account_budgets WHERE budget LIKE '%{made.id}%'", setting.database
    )
    return int(found or 0)


async def test_a_budget_holds_over_all_gateways(setting: Setting) -> None:
    gateways = setting.gateways
    prompt = await asyncio.to_thread(prompt_tokens, gateways)
    budget = AT_ONCE // 4 * (prompt + MORE_OUTPUT)
    made = await asyncio.to_thread(issue, gateways, "blue", budget={"tokens_per_day": budget})
    got = await all_at_once(gateways, made.key, output=MORE_OUTPUT)
    outcomes = Counter(one.outcome for one in got)
    assert set(outcomes) <= {"whole", "capped", "whole stream", STREAM_ENDS, REFUSED}, outcomes
    let = [one for one in got if one.outcome != REFUSED]
    await asyncio.to_thread(eventually, lambda: used_by(gateways, made).requests == len(let))
    used = used_by(gateways, made)
    assert (used.input, used.estimated) == (len(let) * prompt, 0)
    assert used.input + used.output <= budget + outcomes[STREAM_ENDS] * AN_EVENT
    assert budget - (used.input + used.output) < prompt + MORE_OUTPUT, "no call was refused that had found room"
    eventually(lambda: leased(setting, made) == used.input + used.output)


def test_a_key_that_one_gateway_revokes_is_refused_by_all(setting: Setting) -> None:
    one, *_ = setting.gateways.members
    made = issue(setting.gateways, "blue")
    revoke(one, made)
    eventually(lambda: opens(setting.gateways, made.key) == {401}, REVOKED_WITHIN_S)
    refused = one.get("/v1/models", headers=bearer(made.key))
    assert refused.json()["error"]["code"] == "key_revoked"


async def test_while_the_database_is_frozen_a_budget_holds_and_known_keys_go_on(setting: Setting) -> None:
    gateways, postgres = setting.gateways, shared_postgres()
    prompt = await asyncio.to_thread(prompt_tokens, gateways)
    known = await asyncio.to_thread(issue, gateways, "blue")
    budget = AT_ONCE // 4 * (prompt + OUTPUT)
    made = await asyncio.to_thread(issue, gateways, "blue", budget={"tokens_per_day": budget})
    first = await all_at_once(gateways, made.key, 20)
    assert {one.outcome for one in first} == {"whole", "whole stream"}
    postgres.freeze()
    try:
        got = await all_at_once(gateways, made.key)
        outcomes = Counter(one.outcome for one in got)
        assert outcomes[UNAVAILABLE] + outcomes[STREAM_LOST] > 0
        assert set(outcomes) <= {"whole", "capped", "whole stream", UNAVAILABLE, STREAM_LOST}, outcomes
        assert {opens(gateways, key) == {200} for key in (known.key, KEYS["green"])} == {True}
        assert opens(gateways, "sk-unknown") <= {401, 503}, "a key that nobody knows never opens"
    finally:
        postgres.thaw()
    let = [one for one in (*first, *got) if one.outcome not in {UNAVAILABLE, STREAM_LOST}]
    await asyncio.to_thread(eventually, lambda: used_by(gateways, made).requests == len(let))
    used = used_by(gateways, made)
    assert used.input + used.output <= budget
    await asyncio.to_thread(eventually, lambda: opens(gateways, "sk-unknown") == {401})
    again = await all_at_once(gateways, made.key)
    assert {one.outcome for one in again} >= {REFUSED}
    await asyncio.to_thread(
        eventually, lambda: used_by(gateways, made).requests == len(let) + sum(one.outcome != REFUSED for one in again)
    )
    used = used_by(gateways, made)
    assert used.input + used.output <= budget + AN_EVENT * sum(one.outcome == STREAM_ENDS for one in again)
