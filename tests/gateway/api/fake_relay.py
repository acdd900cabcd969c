"""The completion and forwarding routes over a relay that answers at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx
from starlette.applications import Starlette

from plait.gateway.api.auth import KeyRing
from plait.gateway.api.call_api import CallApi, CompletionApi, Preparer
from plait.gateway.api.refusals import Refusals
from plait.gateway.asgi import OnEnd, Sink
from plait.gateway.calls.call import Asked, Ending
from plait.gateway.calls.call_reader import CallReader, PromptReader
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.gate import Gate
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.outgoing import Recipient
from plait.gateway.calls.records import CallRecords
from plait.gateway.calls.relay import Relay
from plait.gateway.config.sessions import SessionsConfig
from plait.gateway.fleet.router import Router
from plait.gateway.fleet.served_models import ModelNames
from plait.gateway.guests.forms.multipart_api import FORMS, FormApi
from plait.gateway.guests.programs.chained_calls import ChainedCalls
from plait.gateway.guests.programs.core.executor import Executor
from plait.gateway.guests.programs.metrics import ProgramMetrics
from plait.gateway.guests.programs.program_calls import ProgramCalls
from plait.gateway.guests.responses.background_api import BackgroundApi
from plait.gateway.guests.responses.response_calls import RESPONSE_ROUTES, ResponseCalls
from plait.gateway.guests.responses.stored_responses import StoredResponses
from plait.gateway.guests.translation.sealed_thoughts import SealedThoughts
from plait.gateway.guests.translation.translated_api import MESSAGE_ROUTES, TranslatedApi
from plait.gateway.intake.open_bodies import OpenBodies
from plait.gateway.metrics import new_registry
from plait.gateway.others import Others
from plait.gateway.timer import at_loop_time
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import Placement, PlacementReason
from tests.call_routes import ROUTES
from tests.gateway.server.fake_connection import FakeConnection, Read

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
MAX_BODY_BYTES = 100_000
MAX_OPEN_BYTES = 300_000
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def body_for(asked: Asked, kind: str | None = None) -> bytes:
    """What an engine of this kind gets."""
    body = asked.body.for_engine(Recipient(kind, asked.call, Placement("a", PlacementReason.EXPLORE, 0, 0), 0.0))
    assert isinstance(body, bytes)
    return body


class FakeRelay:
    """Takes every call and answers it, or fails as told."""

    def __init__(self) -> None:
        self.deliveries: list[Asked] = []
        self.error: Exception | None = None
        self.answer = b"done"

    async def deliver(self, asked: Asked, sink: Sink) -> None:
        self.deliveries.append(asked)
        if self.error is not None:
            raise self.error
        sink.whole(200, [], self.answer)
        await sink.flush()

    def begin(self, asked: Asked, sink: Sink, on_end: OnEnd) -> None:
        self.deliveries.append(asked)
        if self.error is None:
            sink.whole(200, [], self.answer)
        on_end(self.error)


class NoCalls:
    """Reads how requests ended that were no calls; `spent` has the tenants of those that were wrong."""

    def __init__(self) -> None:
        self.endings: list[Ending] = []
        self.spent: list[str] = []

    def ended(self, _delivery: Delivery) -> None:
        raise AssertionError("the relay is no real one")

    def no_call(self, ending: Ending) -> None:
        self.endings.append(ending)

    def spend(self, tenant: str) -> None:
        self.spent.append(tenant)

    @property
    def statuses(self) -> list[int]:
        return [ending.status for ending in self.endings]


def in_task() -> None:
    """What `CallApi.begin` calls for a request that needs a task after its wait for a turn: none waits here."""
    raise AssertionError


class Api:
    """The routes over a fake relay: model m (exact tokens, context 1,000), model bytes, model down without engines.

    Where it `begins`, requests come as from Plait's own server: those that can be begun without a task are.
    """

    def __init__(self, prompts: PromptReader, *keys: str, isolate_tenants: bool = False, begins: bool = False) -> None:
        self.begins = begins
        self.router = Router(names=ModelNames(["down"]))
        self.router.add_engine("a", COSTS)
        self.router.health.answered("a", {"m": 1_000, "bytes": 1_000})
        self.relay = FakeRelay()
        relay, ring = cast("Relay", self.relay), KeyRing(keys)
        reader = CallReader(self.router, prompts, isolate_tenants)
        self.executor = Executor(SessionsConfig(), reader.router.predicted_s, at_loop_time)
        self.bodies, metrics = OpenBodies(MAX_BODY_BYTES, MAX_OPEN_BYTES), ProgramMetrics(new_registry())
        self.stored = StoredResponses(10_000, 60.0)
        chained = ChainedCalls(self.executor, reader, relay, metrics, self.bodies)
        self.no_calls = NoCalls()
        gate, of_calls = cast("Gate", self.no_calls), CallMetrics(new_registry())
        refusals = Refusals(CallRecords((self.no_calls,)), of_calls, gate, self.router.models, ring, calls=ROUTES)
        completions = CompletionApi(reader, relay, [ProgramCalls(chained, refusals)])
        thoughts, background = SealedThoughts(b"secret"), BackgroundApi(chained, self.stored)
        messages = TranslatedApi(completions, thoughts, refusals, MESSAGE_ROUTES)
        responses = ResponseCalls(completions, thoughts, refusals, RESPONSE_ROUTES, background, Others())
        forms = FormApi(completions)
        self.preparers: dict[str, Preparer] = {
            **dict.fromkeys(MESSAGE_ROUTES, messages),
            **dict.fromkeys(RESPONSE_ROUTES, responses),
            **dict.fromkeys(FORMS, forms),
        }
        self.app = CallApi(completions, ROUTES, self.preparers, ring, self.bodies, refusals, Starlette())
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://gateway")

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps({"model": "m", **body}).encode()
        given = {k.replace("_", "-"): v for k, v in headers.items()}
        begun = await self._begun(path, content, given) if self.begins else None
        return await self.http.post(path, content=content, headers=given) if begun is None else begun

    async def _begun(self, path: str, content: bytes, headers: dict[str, str]) -> httpx.Response | None:
        """The answer to a request that is begun without a task; None if this one cannot be."""
        connection, ended = FakeConnection(content), list[BaseException | None]()
        given = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": path, "headers": given}
        if self.app.begin(scope, content, connection.client, ended.append, in_task) is None:
            assert (ended, connection.transport.written) == ([], [])
            assert not self.bodies.bytes_of("") + self.bodies.requests_of("")
            return None
        while not ended:  # noqa: ASYNC110 - it waits for its turn
            await asyncio.sleep(0)
        assert ended == [None]
        answer = Read(b"".join(connection.transport.written))
        return httpx.Response(answer.status, headers=answer.headers, content=answer.body)

    async def asked(self, path: str, body: Any, **headers: str) -> Asked:
        """What the relay gets of a good request."""
        response = await self.post(path, body, **headers)
        assert (response.status_code, response.content) == (200, b"done"), response.text
        return self.relay.deliveries[-1]


CHAT_ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "blue"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
}
