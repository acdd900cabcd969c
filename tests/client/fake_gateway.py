"""A gateway that does not think: it writes down what it is asked and answers from a script, or as if all went well."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


@dataclass(frozen=True)
class Asked:
    """One request."""

    what: str
    body: dict[str, Any]
    headers: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """One answer; without a body the connection is cut instead."""

    status: int = 200
    body: object = None
    headers: dict[str, str] = field(default_factory=dict)


PROGRAMS = "POST /v1/programs"
CUT = Answer()


def error(status: int, code: str, message: str = "no", param: str | None = None, **headers: str) -> Answer:
    """A refusal in OpenAI's shape; headers with _ for -."""
    body = {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}
    return Answer(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


def failed(name: str, code: str, *causes: str, status: int = 424) -> Answer:
    """The answer to a program of whose variables only this one was got, and has failed; messages are its causes."""
    problem = {"message": "no", "code": code, "causes": [{"message": cause} for cause in causes]}
    return Answer(status, {"object": "program", "values": {}, "errors": {name: problem}, "error": problem})


def events(*told: tuple[str, dict[str, Any]]) -> Answer:
    """A stream of events, with a comment before them; `done` comes by itself after a value or a failure."""
    told = (*told, ("done", {"object": "program"})) if told[-1][0] in ("value", "failed") else told
    text = "".join(f"event: {kind}\ndata: {msgspec.json.encode(data).decode()}\n\n" for kind, data in told)
    return Answer(200, f": waiting\n\n{text}".encode(), {"content-type": "text/event-stream"})


class FakeGateway:
    """On a port of its own while it is entered."""

    def __init__(self) -> None:
        self.connections: set[tuple[str, int]] = set()
        self.asked: list[Asked] = []
        self.values: dict[str, str] = {}
        self.values_in_turn: list[str] = []
        self._script: defaultdict[str, deque[Answer]] = defaultdict(deque)
        methods = ["GET", "POST", "DELETE"]
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=methods)])
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def script(self, what: str, *answers: Answer) -> None:
        """Answer the next requests of a kind, as in `POST /v1/programs`, with these."""
        self._script[what].extend(answers)

    def forget(self) -> None:
        """Everything asked, set and scripted so far."""
        self.asked.clear()
        self.connections.clear()
        self.values.clear()
        self.values_in_turn.clear()
        self._script.clear()

    def bodies(self, what: str) -> list[dict[str, Any]]:
        """What was asked in requests of a kind."""
        return [asked.body for asked in self.asked if asked.what == what]

    @property
    def programs(self) -> list[dict[str, Any]]:
        """The programs."""
        return self.bodies(PROGRAMS)

    @property
    def submitted(self) -> list[dict[str, Any]]:
        """The calls of all programs."""
        return [call for program in self.programs for call in program.get("calls", [])]

    @property
    def base_url(self) -> str:
        """What a client is given."""
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _answer(self, request: Request) -> Response:
        what = f"{request.method} {request.url.path}"
        raw = await request.body()
        body = msgspec.json.decode(raw) if raw else {}
        self.asked.append(Asked(what, body, dict(request.headers)))
        assert request.client is not None
        self.connections.add((request.client.host, request.client.port))
        queue = self._script[what]
        answer = queue.popleft() if queue else self._default(what, body)
        if answer is CUT:
            return StreamingResponse(iter([b"{"]), headers={"content-length": "100"})  # more than comes
        content = answer.body if isinstance(answer.body, bytes) else msgspec.json.encode(answer.body)
        return Response(content, answer.status, answer.headers)

    def _default(self, what: str, body: dict[str, Any]) -> Answer:
        if what != PROGRAMS:
            return Answer(200, {})
        self.values.update(body.get("values", {}))
        texts = iter(self.values_in_turn)
        values = {name: self.values.get(name) or next(texts, f"text of {name}") for name in body.get("gets", {})}
        if body.get("stream"):
            return events(*(("value", {"name": name, "value": value}) for name, value in values.items()))
        return Answer(200, {"object": "program", "session": body["session"], "values": values, "errors": {}})
