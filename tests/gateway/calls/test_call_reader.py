"""What a request says of its call, on its way to placement."""

from __future__ import annotations

from plait.backends.protocol.openai import CompletionRequest, parse_request
from plait.gateway.calls.annotations import Annotations
from plait.gateway.calls.call_reader import TEXT_PATH, CallReader, Incoming
from plait.gateway.calls.tokenization import PromptReader
from plait.gateway.config import Config
from plait.gateway.fleet.router import Router
from plait.policy.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import Call, TaskGroup

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
BODY = b'{"model": "m", "prompt": [1, 2, 3]}'


async def read(tenant: str, session: str | None, group: TaskGroup | None = None) -> Call:
    router = Router()
    router.add_engine("a", COSTS)
    router.health.answered("a", {"m": None})
    reader = CallReader(router, PromptReader(Config(), router.block_tokens))
    incoming = Incoming(TEXT_PATH, [], BODY, "c", 0.0, tenant)
    request = parse_request(BODY, CompletionRequest)
    return (await reader.read(incoming, request, Annotations(session=session), group)).call


async def test_a_call_keeps_its_task_group() -> None:
    assert (await read("t", "s", TaskGroup("g", 3))).group == TaskGroup("g", 3)
    assert (await read("t", "s")).group is None
