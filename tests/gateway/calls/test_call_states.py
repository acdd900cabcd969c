"""The states of a call: its table, who may write them, and that a call lets go of all that it holds."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from plait.backends.errors import AnswerTooLargeError
from plait.gateway.admission.backlog import Waiting
from plait.gateway.asgi import AsgiSink, Nowhere
from plait.gateway.calls.call import NOWHERE
from plait.gateway.calls.delivery import DELIVERY_TRANSITIONS, CallTransitionError, Delivery, DeliveryState
from plait.gateway.calls.holdings import Holdings
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.records import CallLog, CallRecords
from plait.gateway.calls.upstream import Exchange as UpstreamExchange
from plait.gateway.metrics import new_registry
from plait.policy.types import Call
from tests.gateway.calls.scripted_engines import (
    HASHES,
    JSON,
    LOST,
    WHOLE,
    Client,
    Exchange,
    FakeHttp,
    Gateway,
    gateway,
    until_stuck,
)
from tests.gateway.exposed import samples
from tests.source_tree import path_of, sources

MACHINE = {f"gateway/calls/{name}.py" for name in ("delivery", "relay", "attempts", "holdings", "upstream")}
"""`upstream` writes what an engine has answered."""

RECORDS = {"delivery", "attempt", "answer"}
HOLDINGS = (
    "_leave_objectives", "_leave_streams", "_leave_doubts", "_leave_admission", "_leave_retries",
    "CallMetrics.ended", "CallLog.ended", "_leave_watch",
)  # fmt: skip


class DefectError(Exception):
    """Raised by a part of the gateway."""


def test_a_step_that_is_not_in_the_table_changes_nothing() -> None:
    asked: Any = None
    for state, steps in DELIVERY_TRANSITIONS.items():
        for following in DeliveryState:
            delivery = Delivery(asked, Call("r1", "m", 1, 64, HASHES), NOWHERE, None, state=state)
            if following in steps:
                delivery.enter(following)
                assert delivery.state is following
            else:
                with pytest.raises(CallTransitionError, match=f"r1 is {state} and cannot become {following}"):
                    delivery.enter(following)
                assert delivery.state is state


def written(file: Path) -> Iterator[str]:
    """The attributes of records of calls that a module assigns to."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id in RECORDS:
                    yield f"{one.value.id}.{one.attr}"


def test_only_the_machine_writes_the_state_of_a_call() -> None:
    found = {path_of(file): set(written(file)) for file in sources("gateway")}
    assert {name for name, names in found.items() if names} <= MACHINE
    assert all(name.startswith("answer.") for name in found["gateway/calls/upstream.py"])


def test_what_a_call_holds_is_let_go_of_in_one_order() -> None:
    parts: Any = None
    records = CallRecords((CallMetrics(new_registry()), CallLog(str)))
    holdings = Holdings(parts, records, silent_streams=parts, objectives=parts, faults=parts, retries=parts)
    assert tuple(named(holdings)) == HOLDINGS


def named(holdings: Holdings) -> dict[str, Callable[[Delivery], None]]:
    """What lets go of a call's parts, by name, in order."""
    return {let_go.__qualname__.removeprefix("Holdings."): let_go for let_go in holdings.of_guests}


def has_let_go(made: Gateway) -> None:
    """Nothing is left of any call; a call that failed first has given back what it took for a retry."""
    assert made.relay.silent_streams._told_s == {}
    assert made.relay._objectives._deliveries == {}
    assert made.relay._attempts._faults.doubts == {}
    assert made.gate.admission._uses[""].running == 0
    assert made.router.retries._retrying["m"] == 0
    assert made.router.engines["a"].view.outstanding == 0
    assert made.open_answers.buffered_bytes == 0


@pytest.mark.parametrize("part", HOLDINGS)
async def test_a_part_that_fails_as_a_call_ends_keeps_no_other_from_being_let_go(
    part: str,
) -> None:
    """The call has failed once, and is streamed, held, counted, logged and watched."""
    async with gateway(FakeHttp(LOST, Exchange(headers=JSON, pieces=[WHOLE]))) as made:
        holdings = made.relay.holdings
        let_go = named(holdings)[part]

        def defective(delivery: Delivery) -> None:
            let_go(delivery)
            raise DefectError(part)

        at = HOLDINGS.index(part)
        holdings.of_guests = (*holdings.of_guests[:at], defective, *holdings.of_guests[at + 1 :])
        with structlog.testing.capture_logs() as lines, pytest.raises(DefectError, match=part):
            await made.relay.deliver(made.asked(handle="h"), AsgiSink(Client().send))
        has_let_go(made)
        assert [line["outcome"] for line in lines if line["event"] == "call"] == ["ok"]
        assert [made.ending.outcome, made.seen.ended_calls[0].state] == ["ok", DeliveryState.ENDED]
        assert sum(n for name, n in samples(made.registry).items() if name.startswith("plait_tenant_calls_total{")) == 1


@pytest.mark.parametrize("several", [True, False])
async def test_all_parts_that_fail_are_passed_and_whoever_began_the_call_is_told_of_the_first(several: bool) -> None:
    async with gateway(FakeHttp(Exchange(headers=JSON, pieces=[WHOLE]))) as made:
        passed: list[str] = []
        parts = named(made.relay.holdings)

        def defective(name: str, delivery: Delivery) -> None:
            parts[name](delivery)
            passed.append(name)
            raise DefectError(name)

        def defect(name: str) -> Callable[[Delivery], None]:
            return lambda delivery: defective(name, delivery)

        failing = HOLDINGS if several else HOLDINGS[-1:]
        order = tuple(defect(name) if name in failing else parts[name] for name in HOLDINGS)
        made.relay.holdings.of_guests = order
        with pytest.raises(DefectError, match=failing[0]):
            await made.relay.deliver(made.asked(handle="h"), AsgiSink(Client().send))
        assert tuple(passed) == failing
        has_let_go(made)


async def test_a_defect_is_raised_to_whoever_cancels_a_call() -> None:
    async with gateway(FakeHttp(None)) as made:
        ended: list[BaseException | None] = []

        let_go, *others = made.relay.holdings.of_clients

        def defective(delivery: Delivery) -> None:
            let_go(delivery)
            raise DefectError

        made.relay.holdings.of_clients = (defective, *others)
        delivery = made.relay.begin(made.asked(), NOWHERE, ended.append)
        with pytest.raises(DefectError):
            made.relay.cancel(delivery)
        made.relay.cancel(delivery)
        assert (ended, made.ending.outcome) == ([], "client_gone")
        has_let_go(made)


@pytest.mark.parametrize("part", ["close", "settle", "left_engine"])
async def test_an_attempt_that_cannot_be_closed_ends_the_call_once(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(FakeHttp(Exchange(headers=JSON, pieces=[WHOLE]))) as made:
        owners = {"close": UpstreamExchange, "settle": made.router, "left_engine": made.relay._attempts._metrics}
        original = getattr(owners[part], part)

        def defective(*arguments: Any) -> None:
            original(*arguments)
            raise DefectError(part)

        monkeypatch.setattr(owners[part], part, defective)
        with pytest.raises(DefectError, match=part):
            await made.relay.deliver(made.asked(), AsgiSink(Client().send))
        assert (made.ending.outcome, made.ending.status) == ("defect", 500)
        has_let_go(made)


async def test_a_defect_as_a_client_goes_is_raised() -> None:
    async with gateway(FakeHttp(None)) as made:
        release = made.router.release

        def defective(*arguments: Any, **named: Any) -> None:
            release(*arguments, **named)
            raise DefectError

        delivery = made.relay.begin(made.asked(), NOWHERE, lambda _error: None)
        made.router.release = defective  # type: ignore[method-assign]
        with pytest.raises(DefectError):
            made.relay.cancel(delivery)
        assert (made.ending.outcome, made.ending.status) == ("defect", 500)
        has_let_go(made)


class Full(Nowhere):
    """Takes no event."""

    def write(self, _body: bytes) -> None:
        raise AnswerTooLargeError("no room")


async def test_what_an_engine_has_computed_counts_though_nobody_takes_the_answer() -> None:
    event = b'data: {"choices":[{"index":0,"text":"x"}]}\n\n'
    async with gateway(FakeHttp(Exchange(pieces=[event, None]))) as made:
        with pytest.raises(AnswerTooLargeError):
            await made.relay.run(made.asked(), Full())
        assert made.ending.outcome == "refused"
        assert len(made.router.engines["a"].view.ledger) == 1


async def test_a_leased_call_that_waits_and_is_sent_in_one_turn_of_the_loop_is_sent_once() -> None:
    async with gateway(FakeHttp(None, None)) as made:
        admission = made.gate.admission
        enter = admission.enter

        def waits_for_a_moment(waiting: Waiting, now_s: float) -> None:
            def make_room() -> None:
                enter(waiting, now_s)
                assert waiting.tell is not None
                waiting.tell()

            asyncio.get_running_loop().call_soon(make_room)

        admission.enter = waits_for_a_moment  # type: ignore[method-assign, assignment]
        made.gate.leases = Leases()  # type: ignore[assignment]
        admission.has_place = lambda call: False  # type: ignore[method-assign]  # noqa: ARG005
        client = Client()
        task = asyncio.create_task(made.deliver(client))
        await until_stuck()
        assert len(made.engines["a"].requests) == 1
        client.gone.set()
        await asyncio.gather(task, return_exceptions=True)
        has_let_go(made)


class Leases:
    async def take(self, _tenant: str, _tokens: int, _on_wait: object) -> bool:
        await asyncio.sleep(0)
        return True
