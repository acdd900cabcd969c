"""An engine that follows a script: keeps what it was sent, byte by byte, and answers what the test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

EVENT_STREAM = (("Content-Type", "text/event-stream"),)
JSON = (("Content-Type", "application/json"),)
PAUSE_S = 0.001
"""Between two pieces, so that they arrive as reads of their own; were two of them read as one, no test would fail."""


@dataclass(frozen=True)
class Script:
    """One answer: its body in `pieces` as they are written, then as `ending` says an `end`, a `cut` or `silence`."""

    pieces: Sequence[bytes] = ()
    status: int = 200
    headers: Sequence[tuple[str, str]] = EVENT_STREAM
    ending: str = "end"


@dataclass(frozen=True)
class Received:
    """One request as it came, header names in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes


def listed(*models: str) -> bytes:
    """What an engine with these models answers to `/v1/models`."""
    return json.dumps({"object": "list", "data": [{"id": model, "object": "model"} for model in models]}).encode()


class StubEngine:
    """A server in a thread; `script` is how the next POSTs are answered, `received` the POSTs so far.

    It says which `routes` it has if there are any. It has Plait's adapter if there is a `report` of its cache. `models`
    is what it lists. `answers` has the bodies of other GETs by their paths, and `asked` the paths of all GETs so far.
    """

    def __init__(self, model: str = "demo", routes: Sequence[str] = ()) -> None:
        self.script = Script()
        self.received: list[Received] = []
        self.report: bytes | None = None
        self.stopping = threading.Event()
        self.models = listed(model)
        self.answers: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.openapi = json.dumps({"paths": {route: {} for route in routes}}).encode() if routes else None
        stub = self

        class Handler(_Handler):
            engine = stub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def answer(self, received: Received) -> Script:  # noqa: ARG002 - for engines that answer what they are asked
        """How a POST is answered."""
        return self.script

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    engine: StubEngine
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        engine, path = self.engine, self.path.partition("?")[0]
        engine.asked.append(path)
        known = {"/v1/models": engine.models, "/openapi.json": engine.openapi, "/cache_state": engine.report}
        found = known.get(path) or engine.answers.get(path)
        self._answer(Script([found or b"{}"], 200 if found else 404, JSON))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        received = Received(self.path, headers, body)
        self.engine.received.append(received)
        self._answer(self.engine.answer(received))

    def _answer(self, script: Script) -> None:
        self.send_response(script.status)
        for name, value in (*script.headers, ("Transfer-Encoding", "chunked")):
            self.send_header(name, value)
        self.end_headers()
        for piece in script.pieces:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            time.sleep(PAUSE_S)
        if script.ending == "end":
            self.wfile.write(b"0\r\n\r\n")
            return
        if script.ending == "silence":
            self.engine.stopping.wait()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""
