"""An HTTP proxy before one engine that keeps what the engine answered, byte by byte."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Final, Self

import httpx

from e2e.server_process import NO_TLS
from plait.gateway.membership.tokenizer_search import TOKENIZE
from tests.waiting import WITHIN_S

_ONE_HOP: Final = frozenset({"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server"})


class RecordingProxy:
    """Listens on a port of its own while it is entered. `answers` has the status and body of each call's answer."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.engine = httpx.Client(base_url=url, trust_env=False, verify=NO_TLS, timeout=WITHIN_S)
        proxy = self

        class Handler(_Handler):
            recorder = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.engine.close()


class _Handler(BaseHTTPRequestHandler):
    recorder: RecordingProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._pass_on("GET", b"")

    def do_POST(self) -> None:
        answer = self._pass_on("POST", self.rfile.read(int(self.headers["content-length"])))
        if self.path != TOKENIZE or "x-request-id" in self.headers:  # else the gateway compares tokenizers
            self.recorder.answers.append(answer)

    def _pass_on(self, method: str, body: bytes) -> tuple[int, bytes]:
        """Send the request on, and the answer back in the pieces in which it comes."""
        headers = {name: value for name, value in self.headers.items() if name.lower() not in {*_ONE_HOP, "host"}}
        with self.recorder.engine.stream(method, self.path, content=body, headers=headers) as response:
            self.send_response(response.status_code)
            for name, value in response.headers.items():
                if name not in _ONE_HOP:
                    self.send_header(name, value)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            whole = b""
            for piece in response.iter_raw():
                whole += piece
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        return response.status_code, whole

    def log_message(self, *args: object) -> None:
        """Log nothing."""
