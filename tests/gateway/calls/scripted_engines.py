"""A relay over scripted engines, and a client of it that may go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import copy
from typing import Any, cast

import pytest

from plait.backends.errors import EngineError, PlaitError
from plait.backends.http.client import HttpClient
from plait.backends.http.connection import Response
from plait.backends.protocol.openai import CompletionRequest, parse_request
from plait.gateway.admission.admission import Admission
from plait.gateway.admission.tenants import UNLIMITED
from plait.gateway.asgi import AsgiSink, ClientGoneError, Headers, unless_gone
from plait.gateway.calls.call import NO_SLOT, Asked, Ending, Slot
from plait.gateway.calls.changed_objectives import ChangedObjectives
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.gate import Gate
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.open_answers import OpenAnswers
from plait.gateway.calls.outgoing import OutgoingBody
from plait.gateway.calls.records import CallLog, CallRecords
from plait.gateway.calls.relay import Relay
from plait.gateway.fleet.metrics import HealthMetrics
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_link import EngineLink
from plait.gateway.membership.recovery import Recovery
from plait.gateway.metrics import new_registry
from plait.gateway.supervision import Supervisor
from plait.gateway.timer import at_loop_time
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.prefix.block_hash import chain, root_hash
from plait.policy.types import Call
from tests.gateway.exposed import samples
from tests.invariants import check

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
HASHES = chain(range(256), 64, root_hash("m"))
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
USAGE = b'"usage":{"prompt_tokens":257,"completion_tokens":9,"prompt_tokens_details":{"cached_tokens":64}}'
USAGE_EVENT = b'data: {"choices":[],' + USAGE + b"}\n\n"
WHOLE = b'{"choices":[{"finish_reason":"stop"}],' + USAGE + b"}"
FINISH = b'data: {"choices":[{"index":0,"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
BODY = b'{"model": "m", "prompt": "x"}'
LOST = EngineError("engine lost")
MAX_OPEN_ANSWER_BYTES = 3_000


class Exchange:
    """An engine's answer: the pieces of its body, then its end; an error among them breaks off there, None stalls."""

    def __init__(self, status: int = 200, headers: Headers = STREAM, pieces: Sequence[bytes | EngineError | None] = ()):
        self.aborted = False
        self.response = Response(self)
        self.response.status = status
        self.response.headers = list(headers)
        for piece in pieces:
            if piece is None:
                return
            if isinstance(piece, EngineError):
                self.response.fail(copy(piece))  # the gateway may add to an error
                return
            self.response.pieces.append(piece)
        self.response.finish()

    def resume(self) -> None:
        pass

    def fail(self, error: EngineError) -> None:
        self.aborted = True
        self.response.fail(error)


class FakeHttp:
    """Answers one call after the other; None never answers."""

    def __init__(self, *answers: Exchange | PlaitError | None) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, dict[bytes, bytes], bytes]] = []
        self.lost: list[tuple[str, bool]] = []

    def lose(self, reason: str, *, waiting_only: bool) -> None:
        self.lost.append((reason, waiting_only))

    def begin(self, _method: str, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> Response:
        self.requests.append((path, dict(headers), body))
        assert len(dict(headers)) == len(headers)
        answer = self.answers.pop(0)
        if answer is None:
            return Exchange(0, pieces=[None]).response
        if isinstance(answer, PlaitError) and not isinstance(answer, EngineError):
            raise copy(answer)
        response = Exchange(0, pieces=[answer]).response if isinstance(answer, EngineError) else answer.response
        asyncio.get_running_loop().call_soon(response.wake)
        return response

    async def request(self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> Response:
        return await self.begin(method, path, headers, body).head()


class Client:
    """The ASGI side: what was sent to it; `stuck_at` is the number of the message that it does not take."""

    def __init__(self, stuck_at: int | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self._stuck_at = stuck_at

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.sent) == self._stuck_at:
            await asyncio.Event().wait()
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        assert len(dict(self.sent[0]["headers"])) == len(self.sent[0]["headers"])
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def ended(self) -> bool:
        return [message.get("more_body", False) for message in self.sent[1:]][-1:] == [False]


class Seen:
    """Takes notice of all calls."""

    def __init__(self) -> None:
        self.ended_calls: list[Delivery] = []

    def placed(self, delivery: Delivery) -> None:
        pass

    def ended(self, delivery: Delivery) -> None:
        self.ended_calls.append(delivery)


class Gateway:
    """A relay over fake engines that all serve m and report empty caches."""

    def __init__(self, engines: dict[str, FakeHttp], *, key: bytes | None = None, forward_client_key: bool) -> None:
        self.engines = engines
        self.router = Router("round_robin")
        for name in engines:
            self.router.add_engine(name, COSTS)
            self.router.health.answered(name, {"m": None})
        self.registry = new_registry()
        links = {name: EngineLink(cast("HttpClient", http), key) for name, http in engines.items()}
        self.supervisor = Supervisor(self.registry)
        health_metrics = HealthMetrics(self.registry)
        self.recovery = Recovery(
            self.router, links, self.supervisor, health_metrics, trial_timeout_s=0.1, hang_timeout_s=0.1
        )
        admission = Admission(self.router, at_loop_time, lambda _: UNLIMITED, max_wait_s=120.0)
        self.gate = Gate(admission, hold_s=60.0)
        self.open_answers = OpenAnswers(MAX_OPEN_ANSWER_BYTES)
        self.metrics = CallMetrics(self.registry)
        self.relay = Relay(
            self.router,
            links,
            self.recovery,
            self.gate,
            self.metrics,
            records=CallRecords((self.metrics, CallLog(str))),
            objectives=ChangedObjectives(self.router, admission, links, self.supervisor, self.registry),
            max_attempts=3,
            open_answers=self.open_answers,
            forward_client_key=forward_client_key,
        )
        self.relay.holdings.watch = self.seen = Seen()

    @property
    def ending(self) -> Ending:
        """How the latest call ended."""
        ending = self.seen.ended_calls[-1].ending
        assert ending is not None
        return ending

    async def deliver(self, client: Client, *, headers: Headers = (), body: bytes = BODY) -> None:
        await unless_gone(
            client.receive, self.relay.deliver(self.asked(headers=headers, body=body), AsgiSink(client.send))
        )

    async def deliver_whole(self, client: Client, *, prompt_tokens: int = 257) -> None:
        """As `deliver`, of a call that is not streamed."""
        await self.deliver_call(client, Call("r1", "m", prompt_tokens, 64, HASHES, streamed=False))

    async def deliver_call(self, client: Client, call: Call) -> None:
        """As `deliver`, of this call."""
        await unless_gone(client.receive, self.relay.deliver(self.asked(call=call), AsgiSink(client.send)))

    def asked(self, *, headers: Headers = (), body: bytes = BODY, **more: Any) -> Asked:
        call = more.pop("call", Call("r1", "m", 257, 64, HASHES, streamed=self._is_streamed))
        outgoing = OutgoingBody(body, parse_request(body, CompletionRequest))
        call = call._replace(arrived_s=asyncio.get_running_loop().time())
        of_slot = {name: more.pop(name) for name in Slot.__struct_fields__ if name in more}
        slot = Slot(**of_slot) if of_slot else NO_SLOT
        return Asked(call, "/v1/completions", headers, outgoing, slot=slot, **more)

    @property
    def _is_streamed(self) -> bool:
        """Whether the next calls ask for a stream: unless an engine is about to answer one as a whole."""
        following = [
            answer.response
            for http in self.engines.values()
            for answer in http.answers[:1]
            if isinstance(answer, Exchange)
        ]
        return not any(response.status == 200 and response.headers[:1] == JSON for response in following)

    def outcomes(self) -> dict[tuple[str, str], int]:
        """How often a call ended how on which engine."""
        counted = {name: n for name, n in samples(self.registry).items() if n and name.startswith("plait_calls_total{")}
        return {(parts[1], parts[5]): int(value) for name, value in counted.items() for parts in (name.split('"'),)}

    def seconds_booked(self, engine: str) -> float:
        return self.router.engines[engine].view.ledger.window_cost_s()


@asynccontextmanager
async def gateway(
    *engines: FakeHttp, key: bytes | None = None, forward_client_key: bool = False
) -> AsyncIterator[Gateway]:
    """Engines a, b, ...; afterwards nothing may be running or left behind."""
    before = asyncio.all_tasks()
    made = Gateway(dict(zip("abc", engines, strict=False)), key=key, forward_client_key=forward_client_key)
    yield made
    await made.supervisor.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    check(made.router)
    assert made.open_answers.buffered_bytes == 0
    assert all(engine.view.outstanding == 0 for engine in made.router.engines.values())


async def until_stuck() -> None:
    """Until everything waits for something that this test has to do."""
    for _ in range(10):
        await asyncio.sleep(0)


async def leaves(made: Gateway, client: Client) -> None:
    """A client sends its call, and goes once nothing happens any more."""
    task = asyncio.create_task(made.deliver(client))
    await until_stuck()
    client.gone.set()
    with pytest.raises(ClientGoneError):
        await task
