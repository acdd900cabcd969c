"""A collector that keeps the spans that it gets, by OTLP over HTTP."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from e2e.server_process import eventually


@dataclass
class Receiver:
    url: str = ""
    spans: list[Span] = field(default_factory=list)

    def named(self, beginning: str) -> list[Span]:
        return [span for span in self.spans if span.name.startswith(beginning)]

    def wait_for(self, beginning: str, count: int = 1) -> list[Span]:
        eventually(lambda: len(self.named(beginning)) >= count)
        return self.named(beginning)


def attributes(span: Span) -> dict[str, object]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value") or "string_value") for one in span.attributes}


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    receiver.spans += scope.spans
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
