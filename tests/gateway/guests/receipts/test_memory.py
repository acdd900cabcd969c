"""A gateway's receipts stay in their part of memory, and a flood of refusals takes nothing of what calls have."""

from __future__ import annotations

import os
import tracemalloc
from array import array

import msgspec
import pytest

import plait.gateway.guests.receipts.receipts
from plait.backends.errors import LimitError, ReachedLimit
from plait.gateway.app import Gateway
from plait.gateway.calls.call import NOWHERE, Answer, Asked, Attempt, Ending
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.outgoing import ForwardedBody
from plait.gateway.config.file import parse_config
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.guests.receipts.receipts import REFUSED_SHARE, Receipts
from plait.policy.types import Call

IS_NIGHTLY = "PLAIT_NIGHTLY" in os.environ
MAX_BYTES = (16 if IS_NIGHTLY else 4) * 2**20
CALLS = 1_000_000 if IS_NIGHTLY else 15_000
PATH = "/v1/chat/completions"


def answered() -> Delivery:
    """A call that was compared on four engines, and has its answer."""
    engines = [{"name": f"engine-{number}", "url": f"http://127.0.0.1:{number}"} for number in range(1, 5)]
    router = Gateway(parse_config({"engines": engines}, "test")).kernel.router
    for engine in engines:
        router.health.answered(str(engine["name"]), {"m": None})
    call = Call("", "m", 640, router.block_tokens, array("Q", range(10)), arrived_s=0.0)
    booking = router.book(call, router.select(call, 0.0), 0.0)
    asked = Asked(call, PATH, (), ForwardedBody(b""), tenant="tenant")
    attempt = Attempt(booking, Answer("ok", usage=CallUsage(640, 20, 0), finish="stop"))
    ending = Ending("ok", 200, "engine-1", ended_s=1.0)
    return Delivery(asked, call, NOWHERE, None, attempt=attempt, ending=ending)


def named(delivery: Delivery, number: int) -> Delivery:
    call = delivery.call._replace(call_id=f"{number:032x}")
    asked = msgspec.structs.replace(delivery.asked, call=call)
    return msgspec.structs.replace(delivery, asked=asked, call=call)


def refusal(number: int) -> Ending:
    limit = ReachedLimit("calls_per_s", 10.0, 11.0)
    error = LimitError("too many", code="calls_per_second", retry_after_s=1.0, reached=limit)
    return Ending(
        "refused", 429, request_id=f"refused-{number}", path=PATH, tenant="tenant", code=error.code, error=error
    )


async def test_calls_and_a_flood_of_refusals_stay_within_the_bound() -> None:
    call = answered()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        receipts = Receipts(MAX_BYTES)
        for number in range(CALLS):
            receipts.ended(named(call, number))
        of_calls = tracemalloc.get_traced_memory()[0] - before
        kept = sum(1 for _ in receipts.newest())
        for number in range(CALLS):
            receipts.no_call(refusal(number))
        of_all = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert of_calls <= 1.1 * MAX_BYTES * (1 - 1 / REFUSED_SHARE)
    assert of_all <= 1.1 * MAX_BYTES
    assert MAX_BYTES // 900 < kept < CALLS
    ids = [receipt.request_id for receipt in receipts.newest()]
    assert ids[:kept] == [f"{number:032x}" for number in range(CALLS - 1, CALLS - 1 - kept, -1)], (
        "no call is pushed out"
    )
    assert ids[kept] == f"refused-{CALLS - 1}"
    found = receipts.find("tenant", f"{CALLS - kept:032x}")
    assert found is not None
    assert len(found.choices[0].candidates) == 4
    assert receipts.find("tenant", f"{CALLS - kept - 1:032x}") is None
    assert receipts.find("another", f"{CALLS - 1:032x}") is None


def test_a_receipt_with_the_same_hash_is_not_another_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plait.gateway.guests.receipts.receipts, "hash", lambda _name: 1, raising=False)
    receipts = Receipts(MAX_BYTES)
    receipts.no_call(refusal(1))
    assert receipts.find("tenant", "refused-1") is not None
    assert receipts.find("another", "refused-1") is None
    assert receipts.find("tenant", "refused-2") is None
