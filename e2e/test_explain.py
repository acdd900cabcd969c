"""Receipts of two workers: each request ends in one line, counts once, and either worker says what became of it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.sdk import asking
from e2e.server_process import NO_TLS, PLAIT, Server, eventually
from e2e.servers import Launcher
from e2e.stub_engine import Script, StubEngine
from plait.gateway.guests.peers.forwarding import ALL_S
from tests.waiting import WITHIN_S

WORKERS: Final = 2
CHAT: Final = "/v1/chat/completions"
ADMIN: Final = {"authorization": "Bearer admin"}
ASKED: Final = 5
"""So many connections reach both workers."""

BUSY_TOKENS: Final = 20_000
"""An engine with one slot answers for longer than a test lasts."""

HOLD_S: Final = 1.0
STOPPED_S: Final = 1.5
AT_ONCE: Final = 6
FAILS: Final = Script(ending="cut")
"""Nothing of an answer, so that another engine gets the call."""

TENANTS: Final[list[Mapping[str, Any]]] = [
    {"name": "free", "api_keys": ["free"]},
    {"name": "calls", "api_keys": ["calls"], "calls_per_s": 0.2},
    {"name": "tokens", "api_keys": ["tokens"], "tokens_per_s": 2},
    {"name": "patient", "api_keys": ["patient"], "max_waiting": 2},
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two engines of `demo`, two with one slot, three of `flaky` of which one answers, and none of `nowhere`."""
    with Launcher(tmp_path_factory.mktemp("explain")) as launch, StubEngine("flaky") as one, StubEngine("flaky") as two:
        one.script = two.script = FAILS
        narrow = ["--max-running-calls", "1"]
        engines = [
            *(launch.engine(name) for name in ("a", "b")),
            *(launch.engine(name, model="narrow", time_scale=1, options=narrow) for name in ("n1", "n2")),
            launch.engine("good", model="flaky"),
        ]
        stubs = [{"name": name, "url": stub.url} for name, stub in (("bad1", one), ("bad2", two))]
        nowhere = {"name": "none", "url": "http://127.0.0.1:9", "models": ["nowhere"]}
        server = launch.gateway(
            [*engines, *stubs, nowhere],
            models=["demo", "narrow", "flaky", "nowhere"],
            server={"workers": WORKERS, "admin_key": "admin", "max_body_bytes": 100_000},
            admission={"hold_s": HOLD_S},
            sessions={"gone_grace_s": 0},
            tenants=TENANTS,
        )
        for process in (*engines, server):
            process.start()
        for engine in engines:
            engine.wait_until_ready()
        eventually(lambda: server.metric("plait_engine_up") == WORKERS * 7)
        yield server


def send(gateway: Server, body: dict[str, Any], *, key: str = "free", **headers: str) -> tuple[str, httpx.Response]:
    """The request's id, and its answer over a connection of its own."""
    request_id = uuid4().hex
    given = {"authorization": f"Bearer {key}", "x-request-id": request_id}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    return request_id, gateway.post(CHAT, json=body, headers=given)


def busy(text: str, **fields: Any) -> dict[str, Any]:
    return asking(text, model="narrow", max_tokens=BUSY_TOKENS, ignore_eos=True, **fields)


def counted(gateway: Server, tenant: str) -> float:
    """The calls of a tenant that have ended, from a scrape in which no worker is missing."""
    found: list[float] = []

    def is_whole() -> bool:
        names = ("plait_worker_up", "plait_tenant_calls_total")
        lines = [line for line in gateway.get("/metrics").text.splitlines(keepends=True) if line.startswith(names)]
        samples = [one for family in text_string_to_metric_families("".join(lines)) for one in family.samples]
        found.append(sum(one.value for one in samples if one.labels.get("tenant") == tenant))
        return sum(one.value for one in samples if one.name == "plait_worker_up") == WORKERS

    eventually(is_whole)
    return found[-1]


@contextmanager
def counting(gateway: Server, tenant: str, calls: int = 1) -> Iterator[None]:
    """So many calls of the tenant end meanwhile."""
    before = counted(gateway, tenant)
    yield
    eventually(lambda: counted(gateway, tenant) >= before + calls)
    assert counted(gateway, tenant) == before + calls


def lines(gateway: Server, request_id: str) -> list[dict[str, Any]]:
    rows = [json.loads(row) for row in gateway.log().splitlines() if request_id in row]
    return [row for row in rows if row["event"] == "call"]


def receipt(gateway: Server, request_id: str) -> dict[str, Any]:
    """The receipt of a request, which is the same from both workers, and has one line in the log."""
    eventually(lambda: bool(lines(gateway, request_id)))
    (line,) = lines(gateway, request_id)
    answers = [gateway.get(f"/admin/receipts/{request_id}", headers=ADMIN) for _ in range(ASKED)]
    assert {answer.status_code for answer in answers} == {200}
    found: dict[str, Any] = answers[0].json()
    assert all(answer.json() == found for answer in answers)
    assert (found["status"], found["code"], found["outcome"]) == (line["status"], line["code"], line["outcome"])
    return found


@pytest.mark.parametrize("is_sent", [True, False], ids=["running", "unread"])
def test_a_call_whose_gateway_was_stopped(tmp_path: Path, is_sent: bool) -> None:
    """The gateway had sent it to its engine, or has not read it yet."""
    with Launcher(tmp_path) as launch, ThreadPoolExecutor(1) as pool:
        engine = launch.engine("a", time_scale=1)
        server = launch.gateway([engine], server={"admin_key": "admin"})
        for process in (engine, server):
            process.start()
            process.wait_until_ready()
        eventually(lambda: server.metric("plait_engine_up") == 1)
        body = asking("hello", max_tokens=64, ignore_eos=True)
        if is_sent:
            call = pool.submit(send, server, body)
            eventually(lambda: server.metric("plait_engine_outstanding_calls") == 1)
        server.signal(signal.SIGSTOP)
        if not is_sent:
            call = pool.submit(send, server, body)
        time.sleep(STOPPED_S)
        server.signal(signal.SIGCONT)
        request_id, answer = call.result()
        assert answer.status_code == 200
        found = receipt(server, request_id)
        (wait,) = found["waits"]
        assert wait["why"] == "gateway"
        assert STOPPED_S * 0.8 <= wait["for_s"] <= found["e2e_s"]
        assert lines(server, request_id)[0]["waited_for"] == {"gateway": round(wait["for_s"], 3)}
        asked = subprocess.run(
            [PLAIT, "explain", request_id, f"--url={server.url}", "--key=admin"],
            check=True,
            capture_output=True,
            text=True,
        )
        assert "for the gateway itself, which had too little CPU time or was stopped." in asked.stdout
        assert f"0 of {found['prompt_tokens']} tokens were cached (0 expected)." in asked.stdout


def test_an_answered_call(gateway: Server) -> None:
    with counting(gateway, "free"):
        request_id, answer = send(gateway, asking("hello"))
    found = receipt(gateway, request_id)
    assert found.pop("sentences")[0].startswith(f"{request_id}: a request to ")
    (attempt,) = found["attempts"]
    assert (found["status"], found["outcome"], found["tenant"]) == (200, "ok", "free")
    assert attempt["engine"] == answer.headers["plait-engine"]
    assert {one["engine"] for one in attempt["candidates"]} == {"a", "b"}
    for _ in range(ASKED):
        own = gateway.get(f"/v1/receipts/{request_id}", headers={"authorization": "Bearer free"})
        others = gateway.get(f"/v1/receipts/{request_id}", headers={"authorization": "Bearer calls"})
        assert (own.status_code, others.status_code) == (200, 404)
        listed = gateway.get("/admin/receipts?tenant=free&limit=200", headers=ADMIN).json()["data"]
        assert [one for one in listed if one["request_id"] == request_id] == [found]


@pytest.mark.parametrize(("tenant", "limit"), [("calls", "calls_per_s"), ("tokens", "tokens_per_s")])
def test_a_rate_that_is_reached(gateway: Server, tenant: str, limit: str) -> None:
    """Each worker has its part of it."""
    for number in range(2 * WORKERS + 2):
        with counting(gateway, tenant):
            request_id, answer = send(gateway, asking(f"call {number}"), key=tenant)
        if answer.status_code == 429:
            break
    found = receipt(gateway, request_id)
    assert (found["status"], found["code"]) == (429, f"{tenant}_per_second")
    assert found["refusal"]["limit"] == limit
    assert found["refusal"]["used"] > 0
    assert found["refusal"]["retry_after_s"] >= 1


def working(gateway: Server) -> int:
    """Of the engines with one slot, how many have a call."""
    return sum(gateway.metric("plait_engine_outstanding_calls", engine=name) > 0 for name in ("n1", "n2"))


@contextmanager
def engines_busy(gateway: Server) -> Iterator[ExitStack]:
    """While both engines with one slot answer calls, until these are closed by the stack.

    The second call is sent once both workers know of the first.
    """
    with ExitStack() as calls:
        client = calls.enter_context(httpx.Client(trust_env=False, verify=NO_TLS, timeout=WITHIN_S))
        for number in range(2):
            body = busy(f"busy {number} {uuid4()}", stream=True)
            headers = {"authorization": "Bearer free"}
            call = calls.enter_context(client.stream("POST", gateway.url + CHAT, json=body, headers=headers))
            assert call.status_code == 200
            eventually(lambda number=number: working(gateway) == number + 1)  # type: ignore[misc]
            time.sleep(0.3)
        yield calls


def test_calls_that_wait_for_engines(gateway: Server) -> None:
    """A call that is not streamed goes after a second. Others are refused at once, as two of their tenant wait."""
    with ThreadPoolExecutor(10) as threads, counting(gateway, "patient", 6), engines_busy(gateway):
        sent = [threads.submit(send, gateway, busy(f"{uuid4()}"), key="patient") for _ in range(6)]
        answers = [one.result() for one in sent]
    found = [receipt(gateway, request_id) for request_id, _ in answers]
    codes = [one["code"] for one in found]
    assert {"waiting", "too_many_waiting"} <= set(codes)
    for one in found:
        if one["code"] == "too_many_waiting":
            assert (one["refusal"]["limit"], one["waits"]) == ("max_waiting", [])
        if one["code"] == "waiting":
            assert one["waits"]
            waited_s = sum(wait["for_s"] for wait in one["waits"])
            assert 0.9 * HOLD_S < waited_s <= one["e2e_s"] + 0.01
            assert one["attempts"][0]["sent_s"] is None


def test_a_call_that_goes_to_another_line(gateway: Server) -> None:
    """The engine in whose line it waits is drained."""
    with ThreadPoolExecutor(10) as threads, counting(gateway, "free", 6), engines_busy(gateway) as busy_calls:
        sent = [threads.submit(send, gateway, asking(f"{uuid4()}", model="narrow", stream=True)) for _ in range(4)]
        eventually(lambda: gateway.metric("plait_waiting_calls", model="narrow") == len(sent))
        draining = gateway.post("/admin/engines/n1", json={"state": "draining"}, headers=ADMIN)
        assert draining.status_code == 200
        busy_calls.close()
        answers = [one.result() for one in sent]
    assert gateway.post("/admin/engines/n1", json={"state": "active"}, headers=ADMIN).status_code == 200
    found = [receipt(gateway, request_id) for request_id, _ in answers]
    moved = [one for one in found if one["moves"]]
    assert moved
    for one in moved:
        assert (one["moves"][-1]["from"], one["moves"][-1]["to"]) == ("n1", "n2")
        assert (one["status"], one["attempts"][-1]["engine"], one["attempts"][-1]["failed"]) == (200, "n2", None)
        assert one["attempts"][-1]["rule"] in {"moved", "hand_over"}
        assert one["waits"]


def test_no_engine(gateway: Server) -> None:
    with counting(gateway, "free"):
        request_id, answer = send(gateway, asking("hello", model="nowhere"))
    found = receipt(gateway, request_id)
    assert answer.status_code == 503
    assert (found["status"], found["code"], found["outcome"]) == (503, "no_engine_available", "no_engine")
    assert found["attempts"] == []


def test_the_third_engine_answers(gateway: Server) -> None:
    """While the one that can answers others, calls go to the two that fail first."""
    long = {"model": "flaky", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(AT_ONCE) as threads, counting(gateway, "free", AT_ONCE):
        sent = [threads.submit(send, gateway, asking(f"{uuid4()}", **long)) for _ in range(AT_ONCE)]
        answers = [one.result() for one in sent]

    found = [receipt(gateway, request_id)["attempts"] for request_id, _ in answers]
    attempts = max(found, key=len)
    assert {one["engine"] for one in attempts[:2]} == {"bad1", "bad2"}
    assert [bool(one["failed"]) for one in attempts] == [True, True, False]
    assert (attempts[2]["engine"], attempts[2]["rule"]) == ("good", "after_failure")


def test_a_wrong_request(gateway: Server) -> None:
    with counting(gateway, "free"):
        request_id, answer = send(gateway, asking("hello", messages="hello"))
    found = receipt(gateway, request_id)
    assert answer.status_code == 400
    assert (found["status"], found["code"], found["message"]) == (400, "invalid_request_error", None)


def test_a_body_that_is_too_large(gateway: Server) -> None:
    """It is refused by its head."""
    request_id = uuid4().hex
    with counting(gateway, "free"), socket.create_connection(("127.0.0.1", gateway.port), WITHIN_S) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer free\r\nx-request-id: {request_id}\r\n"
        connection.sendall(f"{head}content-length: 1000000\r\n\r\n".encode())
        assert b" 413 " in connection.recv(4096)
    assert receipt(gateway, request_id)["code"] == "body_too_large"


def test_a_client_that_goes(gateway: Server) -> None:
    request_id = uuid4().hex
    headers = {"authorization": "Bearer free", "x-request-id": request_id}
    with counting(gateway, "free"), httpx.Client(trust_env=False, verify=NO_TLS, timeout=WITHIN_S) as client:
        asked = client.build_request("POST", gateway.url + CHAT, json=busy("x", stream=True), headers=headers)
        stream = client.send(asked, stream=True)
        next(stream.iter_lines())
        stream.close()
    found = receipt(gateway, request_id)
    assert (found["status"], found["outcome"], found["code"]) == (499, "client_gone", None)
    assert found["first_token_s"] > 0


def test_an_input_that_failed(gateway: Server) -> None:
    session = f"s-{uuid4().hex}"
    with counting(gateway, "free", 2):
        first, _ = send(gateway, asking("hello", max_tokens=0), plait_session=session, plait_output="x")
        second, answer = send(gateway, asking("{{x}}"), plait_session=session, plait_inputs="x")
    assert answer.status_code == 424
    assert receipt(gateway, first)["code"] == "invalid_request_error"
    assert receipt(gateway, second)["code"] == "input_failed"


def test_a_request_that_nobody_has_sent(gateway: Server) -> None:
    """Neither worker waits for the other until its patience ends."""
    took_s = []
    for _ in range(ASKED):
        began_s = time.monotonic()
        assert gateway.get(f"/admin/receipts/{uuid4().hex}", headers=ADMIN).status_code == 404
        took_s.append(time.monotonic() - began_s)
    assert min(took_s) < ALL_S
