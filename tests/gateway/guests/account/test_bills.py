"""What a call's client gets where there are prices, budgets and limits of keys, of a gateway with scripted engines."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from plait.backends.protocol.engine_counts import EngineSizes
from plait.gateway.fleet.engine import StockKind
from plait.gateway.guests.account.guest import AccountGuest
from plait.gateway.guests.account.keys import KeyRecord, digest_of, new_key
from tests.gateway.api.served_gateway import ANSWER, Reply, Served, request, serving

PRICED: Final = [{"name": "m", "tokenizer": "embedded", "price": {"input": 1.0, "cached": 0.1, "output": 10.0}}]
TENANT: Final = {"name": "blue", "api_keys": ["blue"]}


@asynccontextmanager
async def accounting(**sections: Any) -> AsyncIterator[Served]:
    """A gateway whose accounts are closed at the end."""
    async with serving(**sections) as made:
        yield made
        (guest,) = [one for one in made.gateway.guests if isinstance(one, AccountGuest)]
        await guest._ledger.close()


async def reply(made: Served, *args: Any, **fields: Any) -> Reply:
    return Reply.of(await made.send(request(*args, **{"key": "blue", **fields})))


async def use(made: Served, key: str = "blue", query: str = "") -> Any:
    path = f"/v1/organization/usage/completions?start_time={int(time.time())}{query}"
    return (await reply(made, b"", method="GET", path=path, key=key)).json


def events(*, usages: bool, count: int = 3, tokens: int = 1) -> bytes:
    """A stream of so many events behind the one with the role, each with so many tokens."""
    found = []
    for number, text in enumerate(["", *("abc"[number % 3] for number in range(count))]):
        delta = {"role": "assistant", "content": ""} if not number else {"content": text}
        fields: dict[str, Any] = {
            "id": "c", "object": "chat.completion.chunk", "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": "stop" if number == count else None}],
        }  # fmt: skip
        if usages:
            output = tokens * number
            fields["usage"] = {"prompt_tokens": 5, "total_tokens": 5 + output, "completion_tokens": output}
        found.append(b"data: %b\n\n" % json.dumps(fields, separators=(",", ":")).encode())
    last = {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [], "usage": ANSWER["usage"]}
    return b"".join([*found, b"data: %b\n\n" % json.dumps(last).encode(), b"data: [DONE]\n\n"])


async def test_an_answer_has_its_cost() -> None:
    async with accounting(models=PRICED, tenants=[TENANT]) as made:
        answered = await reply(made)
        assert answered.headers["plait-cost"] == "0.000015000"  # 5 tokens at 1, and one at 10 a million
        (bucket,) = (await use(made))["data"]
        (result,) = bucket["results"]
    assert (result["input_tokens"], result["output_tokens"], result["num_model_requests"]) == (5, 1, 1)
    assert result["cost"] == pytest.approx(15e-6)


async def test_without_a_price_nothing_is_told_and_all_is_counted() -> None:
    async with accounting() as made:
        answered = await reply(made, key="one")
        assert "plait-cost" not in answered.headers
        assert not made.gateway.kernel.relay.accompany
        page = await use(made, "one")
    assert page["data"][0]["results"][0]["input_tokens"] == 5
    assert page["since"] <= time.time()


async def test_refusals_of_engines_are_no_use() -> None:
    async with accounting(models=PRICED, tenants=[TENANT]) as made:
        made.answer = (400, {"error": {"message": "no", "type": "invalid_request_error", "code": 400}})
        assert (await reply(made)).status == 400
        assert (await use(made))["data"][0]["results"] == []


@pytest.mark.parametrize("asks", [False, True])
async def test_a_client_sees_only_the_usage_that_it_has_asked_for(asks: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if asks else {}
    async with accounting(models=PRICED, tenants=[TENANT]) as made:
        made.gateway.kernel.router.engines["a"].stock = StockKind("vllm", EngineSizes())
        made.answer = (200, events(usages=True))
        answered = await reply(made, {"stream": True, **options})
    told = [json.loads(line[6:]) for line in answered.body.decode().split("\n\n") if line.startswith("data: {")]
    assert [bool(one["choices"]) for one in told] == [True] * 4 + [False] * asks
    assert all("usage" not in one for one in told if one["choices"])


async def test_a_budget_that_is_used_up() -> None:
    async with accounting(models=PRICED, tenants=[{**TENANT, "budget": {"tokens_per_day": 40}}]) as made:
        statuses = [(await reply(made, {"max_tokens": 4})).status for _ in range(7)]
        refused = await reply(made, {"max_tokens": 4})
    assert statuses[0] == 200
    assert refused.status == 429
    assert refused.json["error"]["code"] == "budget_exceeded"
    assert refused.headers["x-should-retry"] == "false"
    assert int(refused.headers["retry-after"]) > 0
    assert statuses == sorted(statuses)


@pytest.mark.parametrize("usages", [False, True])
async def test_a_stream_ends_with_the_budget_though_all_of_it_has_come(usages: bool) -> None:
    async with accounting(models=PRICED, tenants=[{**TENANT, "budget": {"tokens_per_day": 200}}]) as made:
        made.gateway.kernel.router.engines["a"].stock = StockKind("vllm", EngineSizes())
        made.answer = (200, events(usages=usages, count=300))
        body = (await reply(made, {"stream": True, "max_tokens": 300})).body
        (result,) = (await use(made))["data"][0]["results"]
    used = result["input_tokens"] + result["output_tokens"]
    assert b"budget_exceeded" in body
    assert 190 <= used <= 201  # an engine with usages has counted a shorter prompt
    assert result["output_tokens"] - 1 <= body.count(b'"content":"') - 1 <= result["output_tokens"]


@pytest.mark.parametrize("asks", [False, True])
async def test_one_event_exceeds_a_budget_though_events_have_many_tokens(asks: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": asks}
    async with accounting(models=PRICED, tenants=[{**TENANT, "budget": {"tokens_per_day": 200}}]) as made:
        made.gateway.kernel.router.engines["a"].stock = StockKind("vllm", EngineSizes())
        made.answer = (200, events(usages=True, count=20, tokens=50))
        body = (await reply(made, {"stream": True, "max_tokens": 1000, "stream_options": options})).body
    assert body.count(b'"content":"') - 1 == 4
    assert body.count(b'"usage"') == 5 * asks


async def test_an_answer_is_capped_by_what_is_left() -> None:
    async with accounting(models=PRICED, tenants=[{**TENANT, "budget": {"tokens_per_day": 100}}]) as made:
        answered = await reply(made, {"max_tokens": 5000})
        uncapped = await reply(made, {"max_tokens": 1})
    assert answered.headers["plait-budget"] == "capped"
    assert "plait-budget" not in uncapped.headers


async def issue(made: Served, **terms: Any) -> str:
    """A key that is known to the gateway, though it has no store."""
    (guest,) = [one for one in made.gateway.guests if isinstance(one, AccountGuest)]
    keys = guest._keys
    key = new_key()
    made.gateway.kernel.keys.issued = keys._issued
    await keys.write(digest_of(key), KeyRecord("key_0", "blue", key[:8], 0, "admin_key", **terms))
    return key


async def test_an_issued_key_is_of_its_tenant() -> None:
    async with accounting(tenants=[TENANT, {"name": "red", "api_keys": ["red"]}]) as made:
        key = await issue(made)
        assert (await reply(made, key=key)).status == 200
        (result,) = (await use(made, "blue", "&group_by=api_key_id"))["data"][0]["results"]
        assert result["api_key_id"].startswith("key_")
        assert (await use(made, "red"))["data"][0]["results"] == []


@pytest.mark.parametrize(
    ("terms", "code"),
    [({"revoked_at": 1}, "key_revoked"), ({"expires_at": 1}, "key_expired"), ({}, None)],
)
async def test_keys_end(terms: dict[str, Any], code: str | None) -> None:
    async with accounting(tenants=[TENANT]) as made:
        answered = await reply(made, key=await issue(made, **terms))
    assert answered.status == (200 if code is None else 401)
    assert code is None or answered.json["error"]["code"] == code


async def test_the_keys_of_a_tenant_that_is_gone_open_nothing() -> None:
    async with accounting(tenants=[{"name": "red", "api_keys": ["red"]}]) as made:
        answered = await reply(made, key=await issue(made))
    assert (answered.status, answered.json["error"]["code"]) == (401, "invalid_api_key")


async def test_while_the_store_is_away_an_unknown_key_may_be_a_new_one() -> None:
    async with accounting(tenants=[TENANT]) as made:
        key = await issue(made)
        issued = made.gateway.kernel.keys.issued
        assert issued is not None
        issued.is_away = True
        assert (await reply(made, key=key)).status == 200
        assert (await reply(made, key="sk-" + 43 * "a")).json["error"]["code"] == "accounts_unavailable"
        issued.known_until_s = 0.0
        assert (await reply(made, key=key)).status == 503
        assert (await reply(made, key="blue")).status == 200


async def test_a_key_may_call_its_models_only() -> None:
    async with accounting(tenants=[TENANT]) as made:
        answered = await reply(made, key=await issue(made, models=("other",)))
    assert (answered.status, answered.json["error"]["code"]) == (403, "model_not_allowed")


async def test_a_key_has_rates_of_its_own() -> None:
    async with accounting(tenants=[TENANT]) as made:
        key = await issue(made, calls_per_s=0.2)
        statuses = [(await reply(made, key=key)).status for _ in range(4)]
        refused = await reply(made, key=key)
        assert (await reply(made)).status == 200, "the tenant's other keys"
    assert statuses == [200, 200, 429, 429]
    assert refused.json["error"]["code"] == "calls_per_second"


async def test_a_budget_of_a_key_is_not_the_tenants() -> None:
    from plait.gateway.config.sections import BudgetConfig  # noqa: PLC0415

    async with accounting(tenants=[TENANT]) as made:
        key = await issue(made, budget=BudgetConfig(tokens_per_day=10))
        assert (await reply(made, {"max_tokens": 1}, key=key)).status == 429
        assert (await reply(made, {"max_tokens": 1})).status == 200
