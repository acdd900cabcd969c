"""What clients send, as a corpus for the fast tests. It is recorded if `PLAIT_RECORD_CLIENTS` is set.

A proxy before the gateway notes each request. The corpus has one request of each form: the same path, and the same
fields with values of the same types. Keys are left out, and so is what says on which machine a client ran.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from e2e.clients.client import Client
from e2e.clients.program_run import Outcome
from e2e.real_engines.environment import ROOT
from e2e.server_process import Server

CORPUS: Final = ROOT / "tests" / "corpus" / "clients"
CONVERSATIONS: Final = ROOT / "tests" / "corpus" / "conversations"
TO_STORED: Final = ("previous_response_id", "item_reference")
"""The gateway has the rest of such a conversation, so its last request shows nothing."""
OF_THE_RUN: Final = {"metadata", "client_metadata", "prompt_cache_key", "safety_identifier", "user"}
SEALS: Final = {"encrypted_content", "signature"}
LONGEST_TEXT: Final = 200
"""Instructions and descriptions are cut there. What clients have to read again is shorter, but for sealed thoughts."""
VARIABLE: Final = "PLAIT_RECORD_CLIENTS"

LEFT_OUT: Final = re.compile(
    r"host|connection|content-length|accept-encoding|authorization|x-api-key|cookie|user-agent|traceparent|"
    r"x-stainless-(os|arch|runtime.*|package-version)|.*request-id|idempotency-key|.*version.*(?<!anthropic-version)"
)
"""Headers that say who asks, where, or with which release; the gateway must read requests whatever they say."""
HOP: Final = {"connection", "transfer-encoding", "content-length"}
PIECE_BYTES: Final = 65_536

Keep = Callable[[Sequence[Outcome]], None]


@contextmanager
def recorded_conversation(name: str | None, gateway: Server, home: Path) -> Iterator[str]:
    """The address for a client. Its last request, which has the whole conversation, becomes `name` in the corpus."""
    if VARIABLE not in os.environ or name is None:
        yield gateway.url
        return
    with _noting(gateway) as proxy:
        yield proxy.url
        CONVERSATIONS.mkdir(parents=True, exist_ok=True)
        asked = [request for _, request in proxy.requests if request["method"] == "POST"]
        last = [request for request in asked if request["body"].get("tools")][-1]
        kept = {"path": last["path"].partition("?")[0], "body": shortened(last["body"])}
        if any(reference in json.dumps(kept) for reference in TO_STORED):
            return
        written = msgspec.json.format(msgspec.json.encode(kept), indent=1).replace(str(home).encode(), b"/home/user")
        (CONVERSATIONS / f"{name}.json").write_bytes(written + b"\n")


@contextmanager
def recorded(client: Client, gateway: Server) -> Iterator[tuple[str, Keep]]:
    """The address for a client, and what keeps its requests once the outcomes say which feature each was for."""
    if VARIABLE not in os.environ or "translating" in gateway.name:
        yield gateway.url, lambda _outcomes: None
        return
    with _noting(gateway) as proxy:
        yield proxy.url, lambda outcomes: proxy.write(client, outcomes)


@contextmanager
def _noting(gateway: Server) -> Iterator[_Proxy]:
    proxy = _Proxy(gateway.url)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()


class _Proxy(ThreadingHTTPServer):
    """Passes requests on, and notes them with their time."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(target).netloc
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[tuple[float, dict[str, Any]]] = []

    def write(self, client: Client, outcomes: Sequence[Outcome]) -> None:
        """Write the client's part of the corpus."""
        found: dict[bytes, dict[str, Any]] = {}
        for arrived_s, request in self.requests:
            feature = next((o.feature for o in outcomes if arrived_s <= o.ended_unix_s), "")
            form = msgspec.json.encode([request["method"], request["path"], _form(request["body"])])
            if not request["path"].startswith("/v1/responses/"):  # names a response, which no other run has
                found.setdefault(form, {"feature": feature, **request})
        CORPUS.mkdir(parents=True, exist_ok=True)
        path = CORPUS / f"{client.file_name}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(list(found.values())), indent=1) + b"\n")


class _Handler(BaseHTTPRequestHandler):
    server: _Proxy

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def do_DELETE(self) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        kept = {name: value for name, value in sorted(headers.items()) if not LEFT_OUT.fullmatch(name)}
        decoded = msgspec.json.decode(body) if body else None
        noted = {"method": self.command, "path": self.path, "headers": kept, "body": decoded}
        self.server.requests.append((time.time(), noted))
        connection = HTTPConnection(self.server.target)
        sent = {name: value for name, value in headers.items() if name not in HOP}
        connection.request(self.command, self.path, body, sent)
        answer = connection.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP:
                self.send_header(name, value)
        self.end_headers()
        while piece := answer.read1(PIECE_BYTES):
            self.wfile.write(piece)
            self.wfile.flush()
        connection.close()


def shortened(value: Any) -> Any:
    """A value without what says whose run it was, with its long texts cut, but for seals and pictures."""
    if isinstance(value, dict):
        kept = {name: part for name, part in value.items() if name not in OF_THE_RUN}
        return {name: part if name in SEALS else shortened(part) for name, part in kept.items()}
    if isinstance(value, list):
        return [shortened(part) for part in value]
    return value[:LONGEST_TEXT] if isinstance(value, str) and not value.startswith("data:") else value


def _form(value: Any) -> Any:
    """A value with its types in the place of its values, but for the types that items and parts name themselves."""
    if isinstance(value, dict):
        return {name: part if name in {"type", "role"} else _form(part) for name, part in sorted(value.items())}
    if isinstance(value, list):
        return [_form(part) for part in value]
    return type(value).__name__
