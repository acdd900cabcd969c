"""What a proxy that speaks HTTP/1.0 gets, as nginx does unless it is told otherwise: streams without chunks."""

from __future__ import annotations

import json
import socket
from http.client import parse_headers
from io import BytesIO

import pytest

from e2e.server_process import Server
from tests.waiting import WITHIN_S

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 8}
RESPONSE = {"model": "demo", "input": "Count to ten.", "max_output_tokens": 16}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/messages", CHAT), ("/v1/responses", RESPONSE)]
ENDS = {"/v1/chat/completions": "[DONE]", "/v1/messages": "message_stop", "/v1/responses": "response.incomplete"}
"""What is in the last event of a stream."""
KEEP_ALIVE = "Host: gateway\r\nConnection: keep-alive\r\n"


def asked(server: Server, path: str, body: dict[str, object], headers: str) -> tuple[dict[str, str], bytes]:
    """The headers of the answer, and all that comes behind them until the server closes the connection."""
    sent = json.dumps(body)
    with socket.create_connection(("127.0.0.1", server.port), WITHIN_S) as connection:
        head = f"POST {path} HTTP/1.0\r\n{headers}Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
        connection.sendall((head + sent).encode())
        came = b"".join(iter(lambda: connection.recv(65536), b""))
    begun, _, rest = came.partition(b"\r\n\r\n")
    status, _, lines = begun.partition(b"\r\n")
    assert status.split()[1] == b"200", came
    return {name.lower(): value for name, value in parse_headers(BytesIO(lines + b"\r\n\r\n")).items()}, rest


@pytest.mark.parametrize("headers", ["", KEEP_ALIVE], ids=["alone", "keep-alive"])
@pytest.mark.parametrize(("path", "body"), ROUTES, ids=["chat", "messages", "responses"])
def test_a_stream_is_its_events_until_the_connection_closes(
    server: Server, path: str, body: dict[str, object], headers: str
) -> None:
    got, stream = asked(server, path, {**body, "stream": True}, headers)
    assert "transfer-encoding" not in got
    assert got["connection"] == "close"
    events = stream.decode().split("\n\n")
    assert events.pop() == ""
    assert all(line.startswith(("data: ", "event: ")) for event in events for line in event.split("\n"))
    assert ENDS[path] in events[-1]


@pytest.mark.parametrize("headers", ["", KEEP_ALIVE], ids=["alone", "keep-alive"])
@pytest.mark.parametrize(("path", "body"), ROUTES, ids=["chat", "messages", "responses"])
def test_a_whole_answer_has_its_length(server: Server, path: str, body: dict[str, object], headers: str) -> None:
    got, answer = asked(server, path, body, headers)
    assert (got["connection"], int(got["content-length"])) == ("close", len(answer))
    assert json.loads(answer)["id"]
