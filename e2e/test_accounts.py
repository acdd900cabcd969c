"""Accounts as operators and tenants see them: keys that come and go, what was used, and what it cost.

The gateway has two workers, so all of it is shared by them, in a file beside the store.
"""

from __future__ import annotations

import asyncio
import csv
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import chain
from typing import Any, Final, NamedTuple

import httpx
import openai
import pytest

from e2e.account_load import Load
from e2e.accounts import ADMIN, ASKED, DAY_S, HTTP, USAGE, Made, Used, bearer, issue, results, revoke, used, used_by
from e2e.sdk import asking, refusal, sync_client
from e2e.server_process import PLAIT, Server, eventually
from e2e.servers import Fleet, Launcher
from e2e.test_batches import completed, create, ended, line
from e2e.test_earlier_versions import VERSIONS
from e2e.test_workers import processes
from tests.waiting import SLOWNESS

WORKERS: Final = 2
REVOKED_WITHIN_S: Final = 5 * SLOWNESS
CHAT: Final = "/v1/chat/completions"
BLUE, GREEN = "blue-in-the-file", "green-in-the-file"
OTHER: Final = {"blue": "green", "green": "blue"}
LOADED: Final = {kills: [f"tenant-{number}-of-{kills}" for number in range(5)] for kills in (0, 2, 10)}
"""The tenants of calls with so many kills."""

TENANTS: Final[list[Mapping[str, Any]]] = [
    {"name": name, "api_keys": [f"{name}-in-the-file"]} for name in ("blue", "green", *chain(*LOADED.values()))
]
PRICE: Final = {"input": 2.0, "cached": 0.5, "output": 8.0}
NEW_PRICE: Final = {"input": 40.0, "cached": 40.0, "output": 40.0}
A_MILLION: Final = 1_000_000


def priced(price: Mapping[str, float]) -> list[Mapping[str, Any]]:
    return [{"name": "demo", "tokenizer": "embedded", "price": price}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("accounts")
    with Launcher(folder) as launch:
        engine = launch.engine("a")
        (folder / "store").mkdir(mode=0o700)
        server = launch.gateway(
            [engine],
            models=priced(PRICE),
            server={"workers": WORKERS, "admin_key": ADMIN},
            store={"path": str(folder / "store" / "sessions.db")},
            tenants=TENANTS,
        )
        for process in (engine, server):
            process.start()
        for process in (engine, server):
            process.wait_until_ready()
        eventually(lambda: server.metric("plait_engine_up") == WORKERS)
        yield server


def ask(gateway: Server, key: str, text: str = "Hello.", **fields: Any) -> Any:
    """The answer to the SDK, over a connection of its own."""
    with sync_client(gateway, api_key=key) as client:
        return client.chat.completions.create(**asking(text, **fields))


def refused(gateway: Server, key: str) -> tuple[int, str | None]:
    """How the SDK is refused that has this key; (200, None): it is not."""
    with sync_client(gateway, api_key=key) as client:
        try:
            client.chat.completions.create(**asking("Hello.", max_tokens=1))
        except openai.APIStatusError as error:
            return refusal(error)
    return 200, None


def refusals(gateway: Server, key: str) -> set[tuple[int, str | None]]:
    """How both workers refuse it: connections that are open at one time are spread over them."""
    found = set[tuple[int, str | None]]()
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=gateway.url, **HTTP)) for _ in range(ASKED)]
        for client in clients:
            answer = client.post(CHAT, json=asking("Hello.", max_tokens=1), headers=bearer(key))
            error = {} if answer.status_code == 200 else answer.json()["error"]
            found.add((answer.status_code, error.get("code")))
    return found


def plait(gateway: Server, *arguments: str) -> str:
    """What a command prints that asks the gateway."""
    command = [str(PLAIT), *arguments, f"--url={gateway.url}", f"--key={ADMIN}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# Keys.


def test_a_key_that_the_command_makes_opens_the_gateway(gateway: Server) -> None:
    key = plait(gateway, "keys", "create", "blue", "--name", "laptop", "--expires-in", "90d").strip()
    eventually(lambda: refusals(gateway, key) == {(200, None)})
    (line,) = [one for one in plait(gateway, "keys", "list", "--tenant", "blue").splitlines() if key[:8] in one]
    key_id, shown, status, tenant, name, *_ = line.split()
    assert (shown, status, tenant, name) == (f"{key[:8]}...", "active", "blue", "laptop:")
    assert key not in line
    path = f"/admin/keys/{key_id}"
    eventually(lambda: gateway.get(path, headers=bearer()).json()["last_used_at"] is not None)
    assert f"{key_id}  {shown}  active   blue laptop: used 20" in plait(gateway, "keys", "list")
    assert plait(gateway, "keys", "revoke", key_id) == f"{key_id} is revoked.\n"
    eventually(lambda: refusals(gateway, key) == {(401, "key_revoked")}, REVOKED_WITHIN_S)


def test_an_expired_key_is_refused_with_its_code(gateway: Server) -> None:
    body = {"tenant": "blue", "expires_in_s": 1}
    key = gateway.post("/admin/keys", json=body, headers=bearer()).json()["key"]
    eventually(lambda: refusals(gateway, key) == {(401, "key_expired")})


def test_a_wrong_key_is_refused_with_its_code(gateway: Server) -> None:
    assert refused(gateway, "sk-wrong") == (401, "invalid_api_key")


def test_a_key_that_one_worker_revokes_is_refused_by_the_other(gateway: Server) -> None:
    """What runs goes on."""
    made = issue(gateway, "blue")
    fields = asking("Go on.", stream=True, max_tokens=50_000, extra_body={"ignore_eos": True})
    with sync_client(gateway, api_key=made.key) as client, closing(client.chat.completions.create(**fields)) as stream:
        next(stream)
        revoke(gateway, made)
        eventually(lambda: refusals(gateway, made.key) == {(401, "key_revoked")}, REVOKED_WITHIN_S)
        assert next(stream).choices


def test_the_batch_of_a_key_that_is_revoked_is_cancelled(gateway: Server) -> None:
    made = issue(gateway, "blue")
    with sync_client(gateway, api_key=made.key) as client:
        batch = create(client, *[line(number, max_tokens=500) for number in range(500)])
        eventually(lambda: completed(client, batch.id) > 0)
    revoke(gateway, made)
    with sync_client(gateway, api_key=BLUE) as client:
        found = ended(client, batch.id)
    assert (found.status, [error.code for error in found.errors.data]) == ("cancelled", ["key_ended"])
    assert found.request_counts.completed < found.request_counts.total


def test_a_key_is_changed(gateway: Server) -> None:
    made = issue(gateway, "blue", models=["another"])
    eventually(lambda: refusals(gateway, made.key) == {(403, "model_not_allowed")})
    changed = gateway.post(f"/admin/keys/{made.id}", json={"models": []}, headers=bearer())
    assert changed.status_code == 200, changed.text
    eventually(lambda: refusals(gateway, made.key) == {(200, None)})


@pytest.mark.parametrize("path", ["/admin/keys", "/admin/keys/key_0"])
def test_keys_are_for_the_admin_key_only(gateway: Server, path: str) -> None:
    assert gateway.get(path, headers=bearer(BLUE)).status_code == 401
    assert gateway.get(path).status_code == 401


def test_no_file_and_no_log_has_an_issued_key(gateway: Server) -> None:
    keys = [issue(gateway, "blue", name=name).key for name in ("one", "two")]
    assert [refusals(gateway, key) for key in keys] == [{(200, None)}] * 2
    files = [*gateway.log_path.with_name("store").iterdir()]
    assert {file.name.rpartition(".")[2] for file in files} >= {"accounts", "accounts-wal"}
    written = b"".join(file.read_bytes() for file in files) + gateway.log().encode()
    assert b"key issued" in written
    assert not [key for key in keys if key.encode() in written]


# What was used.


class Asked(NamedTuple):
    """A key that has made one call, and what the answer says was used."""

    made: Made
    usage: Any


@pytest.fixture(scope="module")
def once(gateway: Server) -> Asked:
    made = issue(gateway, "green")
    usage = ask(gateway, made.key, "How much was it?", max_tokens=5).usage
    eventually(lambda: used_by(gateway, made).requests == 1)
    return Asked(made, usage)


@pytest.mark.parametrize("group", ["project_id", "api_key_id", "model", "batch"])
def test_the_sdk_reads_usage_by(gateway: Server, once: Asked, group: Any) -> None:
    with sync_client(gateway, admin_api_key=ADMIN) as client:
        page = client.admin.organization.usage.completions(
            start_time=int(time.time()) - DAY_S, api_key_ids=[once.made.id], group_by=[group], bucket_width="1d"
        )
    assert page.object == "page"
    result: Any
    (result,) = [result for bucket in page.data for result in bucket.results]
    named = {"project_id": "green", "api_key_id": once.made.id, "model": "demo", "batch": False}
    assert {name: getattr(result, name) for name in named} == {**dict.fromkeys(named), group: named[group]}
    assert (result.num_model_requests, result.input_tokens, result.output_tokens) == (
        1, once.usage.prompt_tokens, once.usage.completion_tokens,
    )  # fmt: skip


def test_usage_is_that_of_both_workers(gateway: Server) -> None:
    made = issue(gateway, "green")
    answers = [ask(gateway, made.key, f"Call {number}").usage for number in range(2 * ASKED)]
    wanted = Used(
        len(answers), sum(one.prompt_tokens for one in answers), sum(one.completion_tokens for one in answers)
    )
    eventually(lambda: used_by(gateway, made) == wanted)


def test_usage_is_read_page_by_page(gateway: Server) -> None:
    eventually(lambda: used(gateway).requests > 0)
    asked: dict[str, Any] = {"start_time": int(time.time()) - 2 * DAY_S, "limit": 1}
    buckets, page = [], None
    while True:
        answer = gateway.get(USAGE, params=asked | ({} if page is None else {"page": page}), headers=bearer()).json()
        buckets += answer["data"]
        page = answer["next_page"]
        if page is None:
            break
    assert [bucket["start_time"] % DAY_S for bucket in buckets] == [0] * len(buckets)
    assert [one["end_time"] for one in buckets[:-1]] == [one["start_time"] for one in buckets[1:]]
    assert len(buckets) >= 3
    assert sum(result["num_model_requests"] for bucket in buckets for result in bucket["results"]) > 0


@pytest.mark.parametrize("width", ["1h", "1m"])
def test_widths_other_than_a_day_are_refused_with_the_reason(gateway: Server, width: Any) -> None:
    with sync_client(gateway, admin_api_key=ADMIN) as client, pytest.raises(openai.BadRequestError) as caught:
        client.admin.organization.usage.completions(start_time=0, bucket_width=width)
    assert caught.value.param == "bucket_width"
    assert "because use is kept by UTC day" in str(caught.value)


def test_a_tenant_sees_its_own_use_only(gateway: Server) -> None:
    for key in (BLUE, GREEN):
        ask(gateway, key)
    eventually(lambda: {one["project_id"] for one in results(gateway, "project_id")} >= {"blue", "green"})
    for key, name in ((BLUE, "blue"), (GREEN, "green")):
        assert {one["project_id"] for one in results(gateway, "project_id", key=key)} == {name}
        assert results(gateway, "project_id", key=key, project_ids=OTHER[name]) == []
    assert gateway.get(USAGE, params={"start_time": 0}, headers=bearer("sk-wrong")).status_code == 401


def test_usage_is_printed_as_csv(gateway: Server, once: Asked) -> None:
    rows = list(csv.DictReader(plait(gateway, "usage", "--by", "key", "--days", "2", "--csv").splitlines()))
    (row,) = [row for row in rows if row["key"] == once.made.id]
    counted = once.usage.prompt_tokens, once.usage.completion_tokens
    assert (row["requests"], row["input"], row["output"]) == ("1", *map(str, counted))
    assert float(row["cost"]) > 0
    assert float(row["engine_s"]) > 0


# What it cost.


def cost_of(usage: Any, price: Mapping[str, float]) -> float:
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details else 0
    whole = (usage.prompt_tokens - cached) * price["input"] + cached * price["cached"]
    return float(whole + usage.completion_tokens * price["output"]) / A_MILLION


def test_a_whole_answer_its_receipt_and_its_usage_have_one_cost(gateway: Server) -> None:
    made = issue(gateway, "blue")
    text = " ".join(f"word{number}" for number in range(200))
    wanted = 0.0
    for _ in range(2):  # the second finds the prompt in the cache
        with sync_client(gateway, api_key=made.key) as client:
            raw = client.chat.completions.with_raw_response.create(**asking(text))
        usage = raw.parse().usage
        assert usage is not None
        assert float(raw.headers["plait-cost"]) == pytest.approx(cost_of(usage, PRICE), abs=1e-9)
        wanted += float(raw.headers["plait-cost"])
        path = f"/admin/receipts/{raw.headers['x-request-id']}"
        eventually(lambda path=path: gateway.get(path, headers=bearer()).status_code == 200)  # type: ignore[misc]
        receipt = gateway.get(path, headers=bearer()).json()
        assert receipt["cost"] == pytest.approx(float(raw.headers["plait-cost"]), abs=1e-9)
        assert receipt["key"] == made.id
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens, "cached tokens have a price of their own"
    eventually(lambda: used_by(gateway, made).requests == 2)
    (result,) = results(gateway, **{"api_key_ids[]": made.id})
    assert result["cost"] == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(("calls", "kills"), [(100, 0), (120, 2), pytest.param(3_000, 10, marks=pytest.mark.nightly)])
async def test_usage_is_the_answers_own(gateway: Server, calls: int, kills: int) -> None:
    """Also where workers are killed in between, but for the calls of a second."""
    chance = random.Random(7)
    load = Load([gateway], {name: f"{name}-in-the-file" for name in LOADED[kills]}, chance)

    async def kill() -> None:
        killed_s = time.monotonic()
        os.kill(chance.choice(processes(gateway)), signal.SIGKILL)
        await asyncio.to_thread(eventually, lambda: gateway.metric("plait_engine_up") == WORKERS)
        load.may_be_lost(None, killed_s)

    for _ in range(max(1, kills)):
        await load.run(calls // max(1, kills), kill if kills else None)
        await asyncio.to_thread(load.check, gateway)
    assert len(load.answered) == calls


def test_a_new_price_holds_for_calls_that_end_later(gateway: Server) -> None:
    """The last test of this gateway. A stream runs while the price is changed."""
    config = gateway.log_path.with_suffix(".toml")
    old = ", ".join(f"{name} = {value}" for name, value in PRICE.items())
    new = ", ".join(f"{name} = {value}" for name, value in NEW_PRICE.items())
    made = issue(gateway, "green")
    with sync_client(gateway, api_key=made.key) as client:
        fields = asking("Go on.", stream=True, max_tokens=50_000, extra_body={"ignore_eos": True})
        with closing(client.chat.completions.create(**fields)) as stream:
            next(stream)
            assert old in config.read_text()
            config.write_text(config.read_text().replace(old, new))
            gateway.signal(signal.SIGHUP)

            def costs() -> set[bool]:
                """Whether the costs of some answers are by the new price."""
                found = set()
                for _ in range(ASKED):
                    with sync_client(gateway, api_key=GREEN) as other:
                        raw = other.chat.completions.with_raw_response.create(**asking("Hello."))
                    cost = cost_of(raw.parse().usage, NEW_PRICE)
                    found.add(abs(float(raw.headers["plait-cost"]) - cost) < 1e-9)
                return found

            eventually(lambda: costs() == {True})
    eventually(lambda: used_by(gateway, made).requests == 1)
    (result,) = results(gateway, **{"api_key_ids[]": made.id})
    tokens = result["input_tokens"] + result["output_tokens"]
    assert result["cost"] == pytest.approx(tokens * NEW_PRICE["input"] / A_MILLION, abs=1e-9)


# Without a store, and with one of an earlier version.


def test_without_a_store_usage_says_since_when_and_no_key_is_issued(launch: Launcher) -> None:
    began_s = int(time.time())
    engine = launch.engine("a")
    gateway = launch.gateway([engine], server={"admin_key": ADMIN}, tenants=TENANTS)
    Fleet(gateway, {"a": engine}).start()
    assert refused(gateway, BLUE) == (200, None)
    assert refused(gateway, "sk-wrong") == (401, "invalid_api_key")
    eventually(lambda: used(gateway).requests == 1)
    answer = gateway.get(USAGE, params={"start_time": began_s}, headers=bearer()).json()
    assert began_s <= answer["since"] <= time.time()
    none = gateway.post("/admin/keys", json={"tenant": "blue"}, headers=bearer())
    assert (none.status_code, none.json()["error"]["code"]) == (400, "no_store")


@pytest.fixture(scope="module")
def of_the_first_release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A gateway whose store an earlier version has made."""
    folder = tmp_path_factory.mktemp("earlier")
    store = folder / "store" / "sessions.db"
    store.parent.mkdir(mode=0o700)
    shutil.copyfile(VERSIONS / "0.2.0.db", store)
    store.chmod(0o600)
    tenants: list[Mapping[str, Any]] = [{"name": "blue", "api_keys": []}]
    with Launcher(folder) as launch:
        engine = launch.engine("a")
        gateway = launch.gateway(
            [engine], server={"admin_key": ADMIN}, store={"path": str(store)}, sessions={"ttl_s": 3e8}, tenants=tenants
        )
        Fleet(gateway, {"a": engine}).start()
        yield gateway


def restart(gateway: Server) -> None:
    gateway.stop()
    gateway.start()
    gateway.wait_until_ready()
    eventually(lambda: gateway.metric("plait_engine_up") == 1)


def test_a_store_of_the_first_release_gets_accounts(of_the_first_release: Server) -> None:
    gateway = of_the_first_release
    made = issue(gateway, "blue")
    assert refused(gateway, made.key) == (200, None)
    eventually(lambda: used_by(gateway, made).requests == 1)
    restart(gateway)
    assert refused(gateway, made.key) == (200, None), "it outlives the process"
    eventually(lambda: used_by(gateway, made).requests == 2)
    accounts = gateway.log_path.with_name("store") / "sessions.db.accounts"
    assert accounts.stat().st_mode & 0o777 == 0o600


def test_a_reload_changes_budgets_keys_and_tenants(of_the_first_release: Server) -> None:
    """The last test of this gateway."""
    gateway = of_the_first_release

    def change(old: str, new: str) -> None:
        config = gateway.log_path.with_suffix(".toml")
        assert old in config.read_text()
        config.write_text(config.read_text().replace(old, new))
        gateway.signal(signal.SIGHUP)

    made, other = issue(gateway, "blue"), issue(gateway, "blue")
    change("api_keys = []", "api_keys = []\nbudget = {tokens_per_day = 5}")
    eventually(lambda: refused(gateway, made.key) == (429, "budget_exceeded"))
    change("tokens_per_day = 5", "tokens_per_day = 5000")
    eventually(lambda: refused(gateway, made.key) == (200, None))
    change("api_keys = []", f'api_keys = ["{made.key}"]')
    restart(gateway)
    before, total = used_by(gateway, made), used(gateway).requests
    assert refused(gateway, made.key) == (200, None)
    assert "a key is in the configuration, too, which counts" in gateway.log()
    eventually(lambda: used(gateway).requests == total + 1)
    assert used_by(gateway, made) == before, "the key in the file has an id of its own"
    assert refused(gateway, other.key) == (200, None)
    change('name = "blue"', 'name = "teal"')
    eventually(lambda: refused(gateway, other.key) == (401, "invalid_api_key"))
    assert refused(gateway, made.key) == (200, None)
