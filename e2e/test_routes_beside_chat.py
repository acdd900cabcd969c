"""Routes beside chat as OpenAI's SDK and other clients use them: vectors, classes, images, audio, uploads."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from openai import OpenAI

from e2e.sdk import sync_client
from e2e.server_process import Server, eventually
from e2e.servers import GATEWAYS, Launcher
from e2e.stub_engine import JSON, Received, Script, StubEngine
from plait.lab.embedded.beside_chat import transcript
from tests.call_routes import ROUTES
from tests.waiting import WITHIN_S

AUDIO = bytes(range(256)) * 3_000
SOUNDS = {
    "no bytes": b"",
    "short": b"RIFF",
    "long": AUDIO * 3,
    "like a boundary": b"\r\n--boundary--\r\n--x\r\r\n-" * 50_000,
}
TRANSCRIPTIONS, EDITS = "/v1/audio/transcriptions", "/v1/images/edits"
MOST = 3 * 2**20


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "two workers"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A gateway over two embedded engines."""
    if request.param > 1 and GATEWAYS > 1:
        pytest.skip("gateways that share a store have one worker each")
    with Launcher(tmp_path_factory.mktemp("beside")) as launch:
        engines = [launch.engine("demo-1"), launch.engine("demo-2")]
        gateway = launch.gateway(engines, server={"workers": request.param, "max_multipart_bytes": MOST})
        for server in (*engines, gateway):
            server.start()
        gateway.wait_until_ready()
        eventually(lambda: gateway.metric("plait_engine_up") >= request.param * GATEWAYS * len(engines))
        yield gateway


@pytest.fixture
def sdk(served: Server) -> Iterator[OpenAI]:
    with sync_client(served) as client:
        yield client


def test_openais_sdk_has_its_routes(sdk: OpenAI) -> None:
    assert len(sdk.embeddings.create(model="demo", input=["a", "b"]).data) == 2
    assert [one.flagged for one in sdk.moderations.create(model="demo", input="a").results] == [False]
    assert len(sdk.images.generate(model="demo", prompt="a cat", n=2).data or []) == 2
    assert len(sdk.images.edit(model="demo", prompt="a dog", image=b"\x89PNG").data or []) == 1
    speech = sdk.audio.speech.create(model="demo", voice="alloy", input="hello " * 50).content
    assert speech.startswith(b"RIFF")
    heard = sdk.audio.transcriptions.create(model="demo", file=("a.wav", speech))
    assert heard.text == transcript(speech)


def test_speech_comes_as_it_is_made(sdk: OpenAI) -> None:
    with sdk.audio.speech.with_streaming_response.create(model="demo", voice="alloy", input="hello " * 90) as speech:
        pieces = list(speech.iter_bytes(4096))
        assert speech.headers["content-type"] == "audio/wav"
        assert "plait-engine" in speech.headers
    assert len(pieces) > 100


@pytest.mark.parametrize("path", ["/v1/classify", "/classify", "/pooling", "/v2/rerank", "/v1/score"])
def test_the_engines_own_routes_are_reached(served: Server, path: str) -> None:
    fields = {"model": "demo", "input": "a", "query": "a", "documents": ["b"], "text_1": "a", "text_2": "b"}
    answer = httpx.post(f"{served.url}{path}", json=fields, timeout=WITHIN_S)
    assert answer.status_code == 200, answer.text
    assert answer.headers["plait-engine"].startswith("demo-")


@pytest.mark.parametrize("sound", SOUNDS)
@pytest.mark.parametrize("path", [TRANSCRIPTIONS, "/v1/audio/translations"])
def test_each_byte_of_an_upload_reaches_the_engine(served: Server, path: str, sound: str) -> None:
    """Text fields go first with this client."""
    answer = httpx.post(
        f"{served.url}{path}", data={"model": "demo"}, files={"file": ("a.wav", SOUNDS[sound])}, timeout=WITHIN_S
    )
    assert (answer.status_code, answer.json().get("text")) == (200, transcript(SOUNDS[sound]))


def form(*parts: tuple[str, bytes]) -> bytes:
    """A form whose parts keep their order. A file is named so."""
    made = b""
    for name, value in parts:
        file = b'; filename="a.wav"' if name == "file" else b""
        made += b'--boundary\r\nContent-Disposition: form-data; name="%b"%b' % (name.encode(), file)
        made += b"\r\n\r\n%b\r\n" % value
    return made + b"--boundary--\r\n"


def post(server: Server, body: Any, **headers: str) -> httpx.Response:
    kind = {"content-type": "multipart/form-data; boundary=boundary", **headers}
    return httpx.post(f"{server.url}{TRANSCRIPTIONS}", content=body, headers=kind, timeout=WITHIN_S)


@pytest.mark.parametrize("model", [b"demo", b""], ids=["last", "not named"])
def test_the_model_may_come_last_and_the_body_in_chunks(served: Server, model: bytes) -> None:
    body = BytesIO(form(("file", AUDIO), *([("model", model)] if model else [])))
    answer = post(served, iter(lambda: body.read(10_007), b""))
    assert (answer.status_code, answer.json()["text"]) == (200, transcript(AUDIO))


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (form(("model", b"other"), ("file", b"x")), 404, "model_not_found"),
        (form(("model", b"demo")), 400, None),
        (form(("model", b"demo"), ("model", b"demo")), 400, None),
        (form(("model", b"demo"), ("file", b"x"))[:-6], 400, "malformed_form"),
        (form(("file", bytes(MOST))), 413, "body_too_large"),
        (b'{"model": "demo"}', 400, "malformed_form"),
    ],
)
def test_a_wrong_form_is_refused(served: Server, body: bytes, status: int, code: str | None) -> None:
    answer = post(served, body)
    error = answer.json()["error"]
    assert (answer.status_code, code or error.get("code")) == (status, error.get("code")), answer.text


def test_another_type_and_annotations_are_refused(served: Server) -> None:
    assert httpx.post(f"{served.url}{TRANSCRIPTIONS}", json={"model": "demo"}, timeout=WITHIN_S).status_code == 400
    answer = post(served, form(("file", b"x")), **{"plait-session": "s", "plait-output": "o"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "plait")


def test_a_client_that_leaves_in_the_middle_costs_no_engine_anything(served: Server) -> None:
    head = f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nhost: a\r\ncontent-type: multipart/form-data; boundary=boundary\r\n"
    body = form(("file", AUDIO))
    with socket.create_connection(("127.0.0.1", served.port)) as line:
        line.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:-100])
    eventually(lambda: served.metric("plait_tenant_calls_total", status="499") >= 1)
    assert served.metric("plait_engine_outstanding_calls") == 0


# Engines that fail. What they were sent is kept.


class Uploaded(StubEngine):
    """An engine that answers its first uploads in another way."""

    first: ClassVar[list[Script]] = []

    def answer(self, received: Received) -> Script:
        """How a POST is answered."""
        return self.first.pop() if self.first and received.path == TRANSCRIPTIONS else self.script

    @property
    def uploads(self) -> list[Received]:
        """What it was sent of clients' forms."""
        return [received for received in self.received if received.path == TRANSCRIPTIONS]


@pytest.fixture
def stubs(tmp_path: Path) -> Iterator[tuple[Server, Uploaded, Uploaded]]:
    routes = tuple(ROUTES)
    with Uploaded(routes=routes) as one, Uploaded(routes=routes) as other, Launcher(tmp_path) as launch:
        engines = [{"name": "one", "url": one.url}, {"name": "other", "url": other.url}]
        models = [{"name": "demo", "tokenizer": "embedded", "aliases": ["whisper-1"]}]
        gateway = launch.gateway(engines, models=models)
        gateway.start()
        gateway.wait_until_ready()
        eventually(lambda: gateway.metric("plait_engine_up") == 2 * gateway.processes)
        yield gateway, one, other


TEXT = Script([b'{"text": "hello"}'], headers=JSON)


@pytest.mark.parametrize("failing", [Script(ending="cut"), Script([b"{}"], 500, JSON)], ids=["cut", "status 500"])
@pytest.mark.parametrize("sound", ["short", "long"])
def test_an_upload_is_tried_elsewhere_with_the_same_bytes(
    stubs: tuple[Server, Uploaded, Uploaded], failing: Script, sound: str
) -> None:
    gateway, one, other = stubs
    one.script = other.script = TEXT
    Uploaded.first = [failing]
    body = form(("file", SOUNDS[sound]), ("model", b"demo"))
    assert post(gateway, body).json() == {"text": "hello"}
    assert [upload.body for upload in one.uploads] == [upload.body for upload in other.uploads] == [body]


def test_an_alias_becomes_the_models_own_name(stubs: tuple[Server, Uploaded, Uploaded]) -> None:
    gateway, one, other = stubs
    one.script = other.script = TEXT
    for sound in (b"x", AUDIO * 3):
        assert post(gateway, form(("file", sound), ("model", b"whisper-1"), ("language", b"en"))).status_code == 200
        (received,) = one.uploads + other.uploads
        assert received.body == form(("file", sound), ("model", b"demo"), ("language", b"en"))
        assert received.headers["content-type"] == "multipart/form-data; boundary=boundary"
        one.received.clear()
        other.received.clear()


def test_the_engine_is_freed_when_the_client_goes(stubs: tuple[Server, Uploaded, Uploaded]) -> None:
    gateway, one, other = stubs
    one.script = other.script = Script(ending="silence")
    patience = httpx.Timeout(WITHIN_S, read=0.5)
    with httpx.Client(base_url=gateway.url, timeout=patience) as client, pytest.raises(httpx.ReadTimeout):
        client.post(TRANSCRIPTIONS, data={"model": "demo"}, files={"file": AUDIO})
    eventually(lambda: gateway.metric("plait_engine_outstanding_calls") == 0)
