"""Requests of few bytes that make much work: what others notice of it, in CPU time of the gateway's event loop."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from e2e.server_process import NO_TLS, Server, eventually
from e2e.servers import Launcher
from e2e.stub_engine import JSON, Received, Script, StubEngine
from tests.examples import NIGHTLY
from tests.waiting import WITHIN_S

MIB: Final = 2**20
COSTLY, OTHER = "sk-costly", "sk-other"
MAX_OPEN_BYTES: Final = 256 * MIB
STALL_S: Final = 0.1
LATER_S: Final = 0.2
ATTACKS: Final = 3
LARGE_BYTES: Final = (30 if NIGHTLY else 15) * MIB
"""One piece of work on 30 MiB takes half of what may pass, or all of it if others have the caches of the processor."""
PICTURE: Final = {"type": "input_image", "image_url": f"data:image/png;base64,{'A' * LARGE_BYTES}"}
BOUNDARY: Final = b"b" * 60
TOKENS: Final = 8_000
CALL: Final = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


class Engine(StubEngine):
    """Answers at once, on both of its routes."""

    def __init__(self) -> None:
        super().__init__(routes=["/v1/chat/completions", "/v1/responses", "/v1/audio/transcriptions"])
        self._numbers = count()

    def answer(self, received: Received) -> Script:
        number = next(self._numbers)
        self.received.clear()  # each may have 30 MB
        if received.path == "/v1/responses":
            answer = {"id": f"resp_{number}", "object": "response", "status": "completed", "output": []}
            return Script([json.dumps(answer).encode()], headers=JSON)
        if b'"stream":true' in received.body.replace(b" ", b""):
            return Script(list(_long_answer()))
        message = {"role": "assistant", "content": "hello"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        whole = {"id": f"c{number}", "object": "chat.completion", "model": "demo", "choices": [choice]}
        return Script([json.dumps(whole).encode()], headers=JSON)


def _long_answer() -> Iterator[bytes]:
    """The events of a chat of many tokens, each with its log probability, in a few pieces."""
    tokens: list[dict[str, Any]] = [
        {"token": f"t{number} ", "logprob": -0.5, "bytes": None, "top_logprobs": []} for number in range(TOKENS)
    ]
    for begin in range(0, TOKENS, 100):
        events = []
        for token in tokens[begin : begin + 100]:
            choice = {"index": 0, "delta": {"content": token["token"]}, "logprobs": {"content": [token]}}
            events.append({"id": "c", "object": "chat.completion.chunk", "model": "demo", "choices": [choice]})
        yield b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
    last = {"index": 0, "delta": {}, "finish_reason": "stop"}
    end = {"id": "c", "object": "chat.completion.chunk", "model": "demo", "choices": [last]}
    yield b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(end).encode()


@dataclass
class Noticed:
    """What others notice, in CPU s of the event loop while each request waits. `memory_bytes`: the most."""

    health_s: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)
    memory_bytes: int = 0


@dataclass
class Served:
    gateway: Server
    idle: Noticed

    @property
    def processes(self) -> list[int]:
        """Those that answer."""
        children = Path(f"/proc/{self.gateway.pid}/task/{self.gateway.pid}/children").read_text().split()
        return [int(pid) for pid in children] or [self.gateway.pid]

    @property
    def memory_bytes(self) -> int:
        """Their resident memory."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.processes)
        return pages * resource.getpagesize()

    def cpu_s(self) -> list[float]:
        """CPU time of each event loop's thread."""
        return [int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9 for pid in self.processes]

    def client(self, key: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(
            base_url=self.gateway.url, headers=headers, trust_env=False, verify=NO_TLS, timeout=WITHIN_S
        )

    def noticed_beside(self, attack: Callable[[], object], least: int = 20) -> Noticed:
        """Ask for health and send calls of another key, until the attack has ended."""
        noticed, errors = Noticed(), list[BaseException]()

        def attacks() -> None:
            try:
                attack()
            except BaseException as error:
                errors.append(error)
                raise

        attacking = threading.Thread(target=attacks)
        with self.client(OTHER) as other:
            place = self._place(other)
            attacking.start()
            while attacking.is_alive() or len(noticed.calls_s) < least:
                noticed.health_s.append(self._cost(lambda: other.get("/health"), place))
                noticed.calls_s.append(self._cost(lambda: other.post("/v1/chat/completions", json=CALL), place))
                noticed.memory_bytes = max(noticed.memory_bytes, self.memory_bytes)
                time.sleep(0.002)
        attacking.join()
        assert not errors, errors
        return noticed

    def _cost(self, ask: Callable[[], httpx.Response], place: int) -> float:
        before_s = self.cpu_s()[place]
        assert ask().status_code == 200
        return self.cpu_s()[place] - before_s

    def _place(self, client: httpx.Client) -> int:
        """Which process answers on the client's connection."""
        before_s = self.cpu_s()
        for _ in range(50):
            client.get("/health")
        used_s = [after - before for before, after in zip(before_s, self.cpu_s(), strict=True)]
        return used_s.index(max(used_s))


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.nightly)], ids=["alone", "workers"])
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Served]:
    server = {"workers": request.param, "api_keys": [COSTLY, OTHER], "max_open_body_bytes": MAX_OPEN_BYTES}
    with Engine() as engine, Launcher(tmp_path_factory.mktemp("costly")) as launch:
        gateway = launch.gateway([{"name": "stub", "url": engine.url}], server=server)
        gateway.start()
        gateway.wait_until_ready()
        eventually(lambda: gateway.metric("plait_engine_up") == request.param)
        served = Served(gateway, Noticed())
        served.noticed_beside(lambda: None, least=50)
        served.idle = served.noticed_beside(lambda: None, least=200)
        yield served


def check(served: Served, attack: Callable[[], object], before_bytes: int) -> None:
    """Others notice little of an attack.

    What is too long has to come again: on a virtual machine the CPU time of a thread may include time that the host
    took, once in some thousand requests.
    """
    for _ in range(ATTACKS):
        noticed = served.noticed_beside(attack)
        assert noticed.memory_bytes - before_bytes <= MAX_OPEN_BYTES
        health_s, call_s = max(noticed.health_s), max(noticed.calls_s)
        if health_s <= STALL_S + max(served.idle.health_s) and call_s <= LATER_S + max(served.idle.calls_s):
            return
    pytest.fail(f"{health_s:.3f} s of the event loop beside a look at health, {call_s:.3f} s beside a call")


def _at_once(clients: int, work: Callable[[], object]) -> list[Any]:
    with ThreadPoolExecutor(clients) as pool:
        return [done.result() for done in [pool.submit(work) for _ in range(clients)]]


def _unread(served: Served, path: str, clients: int) -> None:
    """GETs whose clients do not read, for a while."""
    request = f"GET {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {COSTLY}\r\n\r\n".encode()
    sockets = []
    for _ in range(clients):
        one = socket.create_connection(("127.0.0.1", served.gateway.port))
        one.sendall(request)
        sockets.append(one)
    time.sleep(3)
    for one in sockets:
        one.close()


def _stored_picture(client: httpx.Client) -> str:
    content = [PICTURE, {"type": "input_text", "text": "what is it?"}]
    body = {"model": "demo", "input": [{"type": "message", "role": "user", "content": content}]}
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    response_id: str = answer.json()["id"]
    return response_id


def test_continued_conversations_with_large_pictures(served: Served) -> None:
    with served.client(COSTLY) as client:
        previous = _stored_picture(client)
        body = {"model": "demo", "input": "and now?", "previous_response_id": previous}
        before_bytes = served.memory_bytes

        def attack() -> None:
            statuses = _at_once(60, lambda: client.post("/v1/responses", json=body).status_code)
            assert 200 in set(statuses) <= {200, 429}

        check(served, attack, before_bytes)
        longer = {**body, "input": [{"type": "message", "role": "user", "content": [PICTURE, PICTURE]}]}
        assert client.post("/v1/responses", json=longer).status_code == 413


def test_items_that_nobody_reads(served: Served) -> None:
    with served.client(COSTLY) as client:
        previous = _stored_picture(client)
    before_bytes = served.memory_bytes
    check(served, lambda: _unread(served, f"/v1/responses/{previous}/input_items", 60), before_bytes)


def test_replays_of_a_long_answer(served: Served) -> None:
    with served.client(COSTLY) as client:
        body = {"model": "demo", "input": "much", "background": True, "include": ["message.output_text.logprobs"]}
        begun = client.post("/v1/responses", json=body)
        assert begun.status_code == 200, begun.text
        path = f"/v1/responses/{begun.json()['id']}"
        eventually(lambda: client.get(path).json()["status"] == "completed")
        assert len(client.get(path).content) > MIB // 2
        before_bytes = served.memory_bytes

        def attack() -> None:
            replays = _at_once(20, lambda: client.get(path, params={"stream": "true"}))
            assert {replay.status_code for replay in replays} == {200}
            assert {replay.content.count(b"output_text.delta") for replay in replays} >= {2 * TOKENS}

        check(served, attack, before_bytes)


def test_forms_that_look_like_their_boundary(served: Served) -> None:
    line = b"\r\n--" + BOUNDARY[:-1] + b"a"
    form = b"".join((
        b"--", BOUNDARY, b'\r\ncontent-disposition: form-data; name="model"\r\n\r\ndemo\r\n--', BOUNDARY,
        b'\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n',
        line * (LARGE_BYTES // len(line)), b"\r\n--", BOUNDARY, b"--\r\n",
    ))  # fmt: skip
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}
    before_bytes = served.memory_bytes

    def attack() -> None:
        with served.client(COSTLY) as client:
            send = lambda: client.post("/v1/audio/transcriptions", content=form, headers=headers)  # noqa: E731
            statuses = {sent.status_code for sent in _at_once(4, send)}
            assert 200 in statuses <= {200, 429}  # workers divide the bytes among them

    check(served, attack, before_bytes)


def test_a_session_of_many_variables(served: Served) -> None:
    names: Sequence[str] = [f"variable_{number}" for number in range(20_000)]
    with served.client(COSTLY) as client:
        for begin in range(0, len(names), 5_000):
            values = dict.fromkeys(names[begin : begin + 5_000], "1")
            answer = client.post("/v1/programs", json={"session": "large", "values": values, "calls": []})
            assert answer.status_code in {200, 202}, answer.text
        before_bytes = served.memory_bytes

        def attack() -> None:
            answers = _at_once(20, lambda: client.get("/v1/sessions/large"))
            assert {answer.status_code for answer in answers} == {200}
            assert len(answers[0].json()["variables"]) == len(names)

        check(served, attack, before_bytes)
