"""Each request to a call's route ends in one line `call` and counts once, whatever ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from structlog.testing import capture_logs

from tests.gateway.api.served_gateway import CHAT, IMPATIENT, LIMITS, SECRET, Served, request, serving
from tests.waiting import WITHIN_S


async def answered(made: Served) -> None:
    await made.send(request())


async def refused_by_the_engine(made: Served) -> None:
    made.answer = (422, {"error": {"message": f"I do not like {SECRET}", "type": "x"}})
    await made.send(request())


async def failed_by_the_engine(made: Served) -> None:
    made.answer = (503, {"error": {"message": f"I fail at {SECRET}", "type": "x"}})
    await made.send(request())


async def no_engine(made: Served) -> None:
    made.gateway.kernel.router.health.unreachable("a")
    await made.send(request())


async def gone_while_waiting(made: Served) -> None:
    made.answer = None
    await made.send(request(), answered=False)


async def cut(made: Served, data: bytes) -> None:
    made.answer = None
    task = asyncio.create_task(made.send(data))
    await asyncio.sleep(0.1)
    made.gateway.cut()
    assert b"503" in (await task).split(b"\r\n")[0]


async def defective(made: Served, data: bytes) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    setattr(made.gateway.kernel.router, "select", broken)  # noqa: B010 - a type checker refuses to assign a method
    setattr(made.gateway.kernel.router, "book", broken)  # noqa: B010
    assert b"500" in (await made.send(data)).split(b"\r\n")[0]


async def defective_key_ring(made: Served) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("a defect")

    setattr(made.gateway.kernel.keys, "check", broken)  # noqa: B010
    await made.send(request())


async def input_failed(made: Served) -> None:
    await made.send(request({"messages": 3}, "plait-session: s", "plait-output: x"))
    await made.send(request(None, "plait-session: s", "plait-inputs: x"))


LONG = b" " * 20_000
CHAINED = ("plait-session: s", "plait-output: y")
IN_PROGRAM = ("plait-session: s", "plait-inputs: x")
Line = tuple[int, str | None, str, str, str]
OK: Line = (200, None, "ok", "m", CHAT)


def plain(data: bytes, *, is_answered: bool = True) -> Callable[[Served], Awaitable[object]]:
    return lambda made: made.send(data, answered=is_answered)


def of_cut(data: bytes) -> Callable[[Served], Awaitable[object]]:
    return lambda made: cut(made, data)


def of_defect(data: bytes) -> Callable[[Served], Awaitable[object]]:
    return lambda made: defective(made, data)


CASES: dict[str, tuple[Callable[[Served], Awaitable[object]], list[Line]]] = {
    "answered": (answered, [OK]),
    "answered in a task": (plain(request({"plait": {}})), [OK]),
    "a translated call": (
        plain(request({"max_tokens": 5}, path="/v1/messages")),
        [(200, None, "ok", "m", CHAT)],
    ),
    "refused by the engine": (refused_by_the_engine, [(422, None, "refused", "m", CHAT)]),
    "failed by the engine": (failed_by_the_engine, [(503, "engine_error", "no_engine", "m", CHAT)]),
    "no engine": (no_engine, [(503, "no_engine_available", "no_engine", "m", CHAT)]),
    "a wrong key": (plain(request(key="two")), [(401, "invalid_api_key", "refused", "", CHAT)]),
    "a wrong method": (plain(request(method="GET")), [(405, "method_not_allowed", "refused", "", CHAT)]),
    "too long by its head": (plain(request(b"", length=10**6)), [(413, "body_too_large", "refused", "", CHAT)]),
    "no JSON": (plain(request(b"{")), [(400, "invalid_json", "refused", "", CHAT)]),
    "an unknown model": (plain(request({"model": SECRET})), [(404, "model_not_found", "refused", "", CHAT)]),
    "a wrong field": (plain(request({"messages": SECRET})), [(400, "invalid_request_error", "refused", "m", CHAT)]),
    "a wrong field, in a task": (
        plain(request({"messages": SECRET, "plait": {}})),
        [(400, "invalid_request_error", "refused", "m", CHAT)],
    ),
    "a wrong field of another route": (
        plain(request({"plait": {"inputs": ["a"]}}, path="/v1/embeddings")),
        [(400, "invalid_annotation", "refused", "m", "/v1/embeddings")],
    ),
    "gone while an engine has it": (gone_while_waiting, [(499, None, "client_gone", "m", CHAT)]),
    "gone while its body comes": (
        plain(request(LONG, length=50_000), is_answered=False),
        [(499, None, "client_gone", "", CHAT)],
    ),
    "a long body that does not come": (
        plain(request(LONG, length=50_000)),
        [(408, "request_timeout", "refused", "", CHAT)],
    ),
    "a short body that does not come": (
        plain(request(b"{", length=50)),
        [(408, "request_timeout", "refused", "", CHAT)],
    ),
    "cut while an engine has it": (of_cut(request()), [(503, "gateway_stopping", "refused", "m", CHAT)]),
    "cut in a task": (of_cut(request({"plait": {}})), [(503, "gateway_stopping", "refused", "m", CHAT)]),
    "cut while its body comes": (
        of_cut(request(LONG, length=50_000)),
        [(503, "gateway_stopping", "refused", "", CHAT)],
    ),
    "cut while it waits for an input": (
        of_cut(request(None, *IN_PROGRAM)),
        [(503, "gateway_stopping", "refused", "m", CHAT)],
    ),
    "a defect": (of_defect(request()), [(500, "internal_error", "defect", "m", CHAT)]),
    "a defect in a task": (of_defect(request({"plait": {}})), [(500, "internal_error", "defect", "m", CHAT)]),
    "a defect before it is read": (defective_key_ring, [(500, "internal_error", "defect", "", CHAT)]),
    "a chained call": (plain(request(None, *CHAINED)), [OK]),
    "a chained call with a wrong field": (
        plain(request({"n": 2}, *CHAINED)),
        [(400, "invalid_request_error", "refused", "m", CHAT)],
    ),
    "gone while it waits for an input": (
        plain(request(None, *IN_PROGRAM), is_answered=False),
        [(499, None, "client_gone", "m", CHAT)],
    ),
    "an input that failed": (
        input_failed,
        [(400, "invalid_request_error", "refused", "m", CHAT), (424, "input_failed", "refused", "m", CHAT)],
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_request_ends_in_one_line_and_counts_once(case: str) -> None:
    make, expected = CASES[case]
    comes_late = any(code == "request_timeout" for _, code, *_ in expected)
    with capture_logs() as logs:
        async with serving(limits=IMPATIENT if comes_late else LIMITS) as made:
            await make(made)
            async with asyncio.timeout(WITHIN_S):
                while made.counted < len(expected):  # noqa: ASYNC110 - nothing tells when the last one is counted
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.02)  # no other one comes
            counted, refusals = made.counted, made.refusals
    lines = [line for line in logs if line["event"] == "call"]
    found = [(line["status"], line["code"], line["outcome"], line["model"], line["path"]) for line in lines]
    assert found == expected
    assert counted == len(expected)
    assert len(refusals) == sum(code is not None for _, code, *_ in expected)
    assert all(f'path="{line[4]}"' in name for line, name in zip([e for e in expected if e[1]], refusals, strict=True))
    assert not [line for line in logs if line["event"] in {"refused", "client gone", "request refused"}]
    of_calls = [line for line in logs if line["event"] != "defect"]
    assert SECRET not in repr(of_calls)
    assert all((line["tenant"] == "") == (case in {"a wrong key", "a defect before it is read"}) for line in lines)


async def test_a_request_that_repeats_a_call_has_a_line_of_its_own() -> None:
    with capture_logs() as logs:
        async with serving() as made:
            await made.send(request(None, *CHAINED))
            await made.send(request(None, *CHAINED))
            counted = made.counted
    lines = [line for line in logs if line["event"] == "call"]
    assert [(line["status"], line["outcome"]) for line in lines] == [(200, "ok"), (200, "ok")]
    assert (len({line["request_id"] for line in lines}), counted) == (2, 2)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"no HTTP\r\n\r\n", (400, "invalid_http", None)),
        (request(path="/v1/nothing"), (404, "not_found", "/v1/nothing")),
        (request(path="/v1/get"), (400, "invalid_request_error", "/v1/get")),
    ],
)
async def test_a_request_that_is_for_no_calls_route_has_another_line(
    data: bytes, line: tuple[int, str, str | None]
) -> None:
    with capture_logs() as logs:
        async with serving() as made:
            await made.send(data)
            (refusal,), counted = made.refusals, made.counted
    found = [(entry["event"], entry["status"], entry["code"], entry["path"]) for entry in logs if "code" in entry]
    assert found == [("request refused", *line)]
    assert ('path=""' in refusal, counted) == (True, 0)
