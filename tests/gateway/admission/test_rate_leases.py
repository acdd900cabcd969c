"""A tenant's rates over several gateways that share a store: the limit holds over all of them, bursts included."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf

import pytest

from plait.backends.errors import LimitError
from plait.gateway.admission import rate_leases
from plait.gateway.admission.rate_leases import Drawn, RateLeases
from plait.gateway.admission.tenants import BURST_S, TenantLimits
from plait.gateway.guests.store.event_log import StoreError, drawn
from tests.waiting import WITHIN_S


class Bucket:
    """The store's, by a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.used = [0.0, 0.0]
        self.asked = 0
        self.away = False
        self._at_s = 0.0
        monkeypatch.setattr(rate_leases, "loop_time_s", lambda: self.now_s)

    async def draw(self, _tenant: str, rates: Sequence[float], least: Sequence[float], most: Sequence[float]) -> Drawn:
        await asyncio.sleep(0)
        if self.away:
            raise StoreError("away")
        self.asked += 1
        elapsed_s, self._at_s = self.now_s - self._at_s, self.now_s
        self.used = [
            0.0 if rate == inf else max(0.0, used - rate * elapsed_s)
            for used, rate in zip(self.used, rates, strict=True)
        ]
        result = drawn(self.used, rates, least, most, burst_s=BURST_S)
        self.used = list(result.used)
        return result


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return Bucket(monkeypatch)


def gateways(bucket: Bucket, limits: TenantLimits, count: int = 3) -> list[RateLeases]:
    return [RateLeases(lambda _tenant: limits, bucket.draw) for _ in range(count)]


async def taken(gateway: RateLeases, calls: int, tokens: int = 10) -> int:
    """How many of so many calls at once go through."""
    answers = await asyncio.gather(*(gateway.take("t", tokens) for _ in range(calls)), return_exceptions=True)
    assert all(answer is True or isinstance(answer, LimitError) for answer in answers)
    return answers.count(True)


async def offered(bucket: Bucket, each: Sequence[RateLeases], calls: Sequence[int], seconds: float) -> int:
    """How many calls go through while each gateway is sent so many each 50 ms."""
    through = 0
    for _ in range(round(seconds / 0.05)):
        through += sum(await asyncio.gather(*map(taken, each, calls)))
        bucket.now_s += 0.05
    return through


@pytest.mark.parametrize("calls", [(4, 4, 4), (10, 1, 1), (12, 0, 0)])
async def test_over_three_gateways_a_rate_is_kept_within_five_percent(bucket: Bucket, calls: Sequence[int]) -> None:
    three = gateways(bucket, TenantLimits(calls_per_s=40))
    assert await offered(bucket, three, calls, BURST_S) <= 2 * 40 * BURST_S
    through = await offered(bucket, three, calls, 60)
    assert 0.95 * 40 * 60 <= through <= 1.05 * 40 * 60
    assert bucket.asked < 3 * 10 * 70 + 100, "a tenant beyond its rate does not cost a question a call"


async def test_a_burst_goes_through_one_gateway_or_all(bucket: Bucket) -> None:
    one, two, _ = gateways(bucket, TenantLimits(calls_per_s=5))
    assert await taken(one, 30) == 30
    assert await taken(two, 30) == 15, "one has five left, for a second"
    assert await taken(one, 30) == 5
    with pytest.raises(LimitError) as refused:
        await one.take("t", 10)
    assert (refused.value.code, refused.value.retry_after_s) == ("calls_per_second", 1.0)


async def test_what_was_leased_goes_through_without_a_question(bucket: Bucket) -> None:
    one, two, _ = gateways(bucket, TenantLimits(calls_per_s=10))
    assert await taken(one, 1) == 1
    assert await taken(two, 100) == 89
    assert bucket.asked == 2
    assert [await taken(one, 1) for _ in range(10)] == [1] * 10, "the store has nothing left, but this lease has"
    assert bucket.asked == 2


async def test_a_call_waits_only_if_the_store_is_asked(bucket: Bucket) -> None:
    one, *_ = gateways(bucket, TenantLimits(calls_per_s=10))
    since_s = list[float]()
    bucket.now_s = 3.0
    assert await one.take("t", 10, since_s.append)
    assert await one.take("t", 10, since_s.append)
    assert since_s == [3.0]


async def test_a_request_that_was_no_call_uses_what_was_leased(bucket: Bucket) -> None:
    one, two, _ = gateways(bucket, TenantLimits(calls_per_s=10))
    one.spend("t")
    assert await taken(one, 1) == 1
    for _ in range(50):
        one.spend("t")
    assert await taken(one, 1) == 1
    assert await taken(two, 100) == 78, "of a burst of 100, 12 are used, and 10 are leased"


async def test_tokens_are_leased_as_calls_are(bucket: Bucket) -> None:
    one, two, _ = gateways(bucket, TenantLimits(tokens_per_s=100))
    assert await taken(one, 5, tokens=100) == 5
    assert await taken(two, 9, tokens=100) == 4
    with pytest.raises(LimitError, match=r"100 tokens a second") as refused:
        await two.take("t", 100)
    assert refused.value.code == "tokens_per_second"
    bucket.now_s += 60
    assert await two.take("t", 5_000), "more than a burst may go if nothing was used before"


async def test_what_is_not_used_is_given_back(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_leases, "UNUSED_S", 0.001)
    (one,) = gateways(bucket, TenantLimits(calls_per_s=10), 1)
    assert await taken(one, 1) == 1
    assert bucket.used[0] == 11
    one.put_back("t", 10)
    bucket.now_s += 0.01
    keeping = asyncio.create_task(one.keep())
    async with asyncio.timeout(WITHIN_S):
        while bucket.used[0] > 0:  # noqa: ASYNC110 - a task of its own
            await asyncio.sleep(0.001)
    keeping.cancel()


async def test_a_call_whose_client_has_gone_uses_nothing(bucket: Bucket) -> None:
    (one,) = gateways(bucket, TenantLimits(calls_per_s=1), 1)
    gone = asyncio.create_task(one.take("t", 10))
    others = [asyncio.create_task(one.take("t", 10)) for _ in range(9)]
    await asyncio.sleep(0)
    gone.cancel()
    assert await asyncio.gather(*others) == [True] * 9
    assert await one.take("t", 10), "the one that is left of a burst of ten"


async def test_without_the_store_or_a_rate_nothing_is_decided(bucket: Bucket) -> None:
    (free,) = gateways(bucket, TenantLimits(max_running=3), 1)
    assert not await free.take("t", 10)
    bucket.away = True
    (one,) = gateways(bucket, TenantLimits(calls_per_s=1), 1)
    assert not any(await asyncio.gather(one.take("t", 10), one.take("t", 10)))
    assert bucket.asked == 0


async def test_a_defect_of_the_store_keeps_no_call_waiting() -> None:
    async def broken(*_: object) -> Drawn:
        await asyncio.sleep(0)
        raise KeyError("a defect")

    one = RateLeases(lambda _tenant: TenantLimits(calls_per_s=1), broken)
    calls = [asyncio.create_task(one.take("t", 10)) for _ in range(3)]
    await asyncio.sleep(0)
    (asks,) = (task for task in asyncio.all_tasks() if task.get_name() == "rate-lease")
    assert await asyncio.gather(*calls) == [False] * 3, "each gateway keeps the rate by itself"
    with pytest.raises(KeyError):
        await asks


async def test_a_changed_rate_counts_at_once(bucket: Bucket) -> None:
    limits = TenantLimits(calls_per_s=1)
    one = RateLeases(lambda _tenant: limits, bucket.draw)
    assert await taken(one, 20) == 10
    limits = TenantLimits(calls_per_s=5)
    assert await taken(one, 100) == 40
