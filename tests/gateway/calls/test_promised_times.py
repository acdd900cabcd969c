"""What the answer and the log say of a call's TTFT and JCT, and of how long it waited."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from plait.gateway.asgi import AsgiSink
from plait.policy.placement.policies import POLICIES
from plait.policy.types import Call, Slo
from tests.gateway.calls.scripted_engines import (
    DONE,
    FINISH,
    HASHES,
    JSON,
    STREAM,
    WHOLE,
    Client,
    Exchange,
    FakeHttp,
    Gateway,
    gateway,
)
from tests.gateway.exposed import samples

STREAMED = Exchange(headers=STREAM, pieces=[FINISH, DONE])
FAILED = Exchange(status=500, headers=JSON, pieces=[b"{}"])


async def answered(made: Gateway, slo: Slo | None, *, age_s: float = 0.0, streamed: bool = True) -> Client:
    """The client of a call that came so long ago, and is placed by its delay."""
    made.router.policy = POLICIES["plait"]
    client = Client()
    asked = made.asked(call=Call("r1", "m", 257, 64, HASHES, slo=slo, streamed=streamed))
    late = msgspec.structs.replace(asked, call=asked.call._replace(arrived_s=asked.arrived_s - age_s))
    await made.relay.deliver(late, AsgiSink(client.send))
    return client


def whole() -> Exchange:
    return Exchange(headers=JSON, pieces=[WHOLE])


def line_of(logs: list[Any]) -> Any:
    (line,) = (entry for entry in logs if entry["event"] == "call")
    return line


CASES = [
    (Slo(ttft_s=60.0), 0.0, b"expected"),
    (Slo(jct_s=60.0), 0.0, b"expected"),
    (Slo(ttft_s=60.0), 61.0, b"missed"),
    (Slo(jct_s=60.0), 61.0, b"missed"),
    (Slo(ttft_s=100.0, jct_s=60.0), 61.0, b"missed"),
    (Slo(tpot_s=1.0), 61.0, None),
    (Slo(tpot_s=0.001), 0.0, b"missed"),  # an iteration takes 11 ms
    (Slo(ttft_s=60.0, tpot_s=0.001), 0.0, b"missed"),
    (None, 61.0, None),
]


@pytest.mark.parametrize(("slo", "age_s", "told"), CASES)
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
async def test_an_answer_says_how_its_times_stand(
    slo: Slo | None, age_s: float, told: bytes | None, *, streamed: bool
) -> None:
    async with gateway(FakeHttp(Exchange(headers=STREAM, pieces=[FINISH, DONE]) if streamed else whole())) as made:
        client = await answered(made, slo, age_s=age_s, streamed=streamed)
    is_judged = slo is None or streamed or slo.jct_s is not None
    assert client.headers.get(b"plait-slo") == (told if is_judged else b"not-judged")


@pytest.mark.parametrize(("streamed", "told"), [(True, b"missed"), (False, b"expected")])
async def test_a_ttft_is_judged_by_a_stream_only(*, streamed: bool, told: bytes) -> None:
    slo = Slo(ttft_s=60.0, tpot_s=0.001, jct_s=100.0)
    async with gateway(FakeHttp(Exchange(headers=STREAM, pieces=[FINISH, DONE]) if streamed else whole())) as made:
        client = await answered(made, slo, age_s=61.0, streamed=streamed)
        found = samples(made.registry)
    assert client.headers[b"plait-slo"] == told
    judged = {
        name.partition('slo="')[2].partition('"')[0] for name in found if name.startswith("plait_slo_calls_total{")
    }
    assert judged == ({"ttft", "tpot", "jct"} if streamed else {"jct"})


async def test_an_answer_whose_rest_takes_too_long_is_at_risk() -> None:
    async with gateway(FakeHttp(Exchange(headers=STREAM, pieces=[FINISH, DONE]))) as made:
        made.router.policy, slo = POLICIES["plait"], Slo(jct_s=60.0)
        placement = made.router.select(Call("r0", "m", 257, 64, HASHES, slo=slo), 0.0)
        assert placement.meets_slo
        client = await answered(made, slo, age_s=60.0 - placement.decode_s / 2)
    assert client.headers[b"plait-slo"] == b"at-risk"


async def test_a_retry_has_only_the_time_that_is_left() -> None:
    with capture_logs() as logs:
        async with gateway(FakeHttp(FAILED), FakeHttp(FAILED), FakeHttp(STREAMED)) as made:
            client = await answered(made, Slo(ttft_s=60.0), age_s=60.0)
    assert (line_of(logs)["status"], line_of(logs)["slo_at_risk"]) == (200, True)
    assert client.headers[b"plait-slo"] == b"missed"


async def test_a_tpot_that_no_iteration_can_keep_is_at_risk_in_the_log() -> None:
    with capture_logs() as logs:
        async with gateway(FakeHttp(whole())) as made:
            await answered(made, Slo(tpot_s=0.001), age_s=0.0, streamed=False)
    assert line_of(logs)["slo_at_risk"]


async def test_a_refusal_says_nothing_of_times() -> None:
    async with gateway(FakeHttp(Exchange(422, JSON, [b'{"error":{"message":"no"}}']))) as made:
        client = await answered(made, Slo(ttft_s=60.0), age_s=61.0, streamed=False)
    assert client.status == 422
    assert b"plait-slo" not in client.headers


async def test_header_and_log_have_the_whole_wait() -> None:
    with capture_logs() as logs:
        async with gateway(FakeHttp(whole())) as made:
            client = await answered(made, None, age_s=5.0, streamed=False)
    assert 5.0 <= line_of(logs)["waited_s"] < 6.0
    assert float(client.headers[b"plait-waited-s"]) == pytest.approx(line_of(logs)["waited_s"], abs=0.001)
