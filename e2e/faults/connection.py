"""A connection to a scripted engine: HTTP/1.1 in, and whatever the mode says out."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httptools
import msgspec

from e2e.faults.actions import Altered, Ending, Models, Raw, Report, response
from e2e.faults.answering import answer, write_raw
from e2e.faults.completions import LARGE_MODEL
from e2e.faults.engine_state import TRIAL_ID, Engine
from e2e.faults.plan import ModeRequest, Plan
from plait.backends.translation.translation import TRANSLATIONS, Translation

_RESET_AT_CLOSE = struct.pack("ii", 1, 0)
_ROUTES = {"/v1/chat/completions", "/v1/completions"}


class Connection(asyncio.Protocol):
    """Answers one request after the other."""

    def __init__(self, engine: Engine, *, is_control: bool = False) -> None:
        self._engine = engine
        self._is_control = is_control
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._lost = False
        self._url, self._body, self._is_trial = b"", b"", False

    # asyncio's callbacks.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._writable.set()
        if self._is_control:
            return
        self._engine.stats.accepted_s.append(time.monotonic())
        self._engine.connections[self] = False
        action = self._engine.plan.accept()
        if action is None:
            return
        self._engine.stats.hits += 1
        if action.ending is Ending.HANG:
            transport.pause_reading()
        else:
            self._leave(action.ending)

    def connection_lost(self, _error: Exception | None) -> None:
        self._lost = True
        self._engine.connections.pop(self, None)
        self._writable.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    # httptools' callbacks.

    def on_message_begin(self) -> None:
        self._url, self._body, self._is_trial = b"", b"", False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._is_trial = value.startswith(TRIAL_ID)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._engine.connections[self] = True
        self._task = asyncio.get_running_loop().create_task(self._respond())

    # How an answer is written.

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    async def drained(self) -> None:
        await self._writable.wait()
        if self._lost:
            raise asyncio.CancelledError

    async def end(self, ending: Ending) -> None:
        if ending is Ending.HANG:
            await asyncio.Event().wait()
        elif ending is not Ending.KEEP:
            self._leave(ending)

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def _leave(self, ending: Ending) -> None:
        if ending is Ending.RESET:
            own: socket.socket = self._transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
            self._transport.abort()
        else:
            self._transport.close()

    # What is answered.

    async def _respond(self) -> None:
        split = urlsplit(self._url.decode("latin-1"))
        path, method = split.path, self._parser.get_method()
        try:
            if method == b"POST" and path in (*_ROUTES, *self._engine.routes):
                await self._call(TRANSLATIONS.get(path))
            elif path in {"/mode", "/stats"}:
                self._control(path, split.query)
            else:
                await self._probe(path, split.query)
        finally:
            if not self._lost:
                self._engine.connections[self] = False

    async def _call(self, translation: Translation | None) -> None:
        """Answer a call, well or as the mode says. A `translation` is that of its API."""
        engine, is_trial = self._engine, self._is_trial
        body = msgspec.json.decode(self._body)
        translator = None if translation is None else translation.answer(body)
        if translation is not None:
            body = translation.to_chat(body)
            engine.stats.native += 1
        mode = engine.plan.call(self._body, streamed=bool(body.get("stream")))
        action = None if mode is None else mode.action
        engine.stats.begin(is_trial=is_trial)
        engine.stats.hits += mode is not None
        is_aborted = True
        try:
            if isinstance(action, Raw):
                await write_raw(self, action)
            else:
                altered = action if isinstance(action, Altered) else Altered()
                await answer(self, body, altered, engine.pace, translator)
            is_aborted = False
        finally:
            engine.stats.end(is_aborted=is_aborted, is_good=mode is None and not is_trial)

    async def _probe(self, path: str, query: str) -> None:
        action = self._engine.plan.probe(path)
        self._engine.stats.hits += action is not None
        if isinstance(action, Report) and action.build is not None:
            fields = parse_qs(query)
            if "since" in fields:
                await asyncio.sleep(float(fields.get("wait_ms", ["0"])[0]) / 1e3)
            self.write(response(200, action.build(), media=b"application/msgpack"))
            return
        raw = action.raw if isinstance(action, Report | Models) else action
        if raw is None:
            self.write(self._good_probe(path))
        else:
            await write_raw(self, raw)

    def _good_probe(self, path: str) -> bytes:
        if path == "/v1/models":
            contexts = {model: None if model == LARGE_MODEL else 32_768 for model in self._engine.models}
            data = [{"id": model, "object": "model", "max_model_len": most} for model, most in contexts.items()]
            return response(200, msgspec.json.encode({"object": "list", "data": data}))
        if path == "/openapi.json" and self._engine.routes:
            paths: dict[str, dict[str, Any]] = {key: {} for key in (*_ROUTES, *self._engine.routes)}
            return response(200, msgspec.json.encode({"paths": paths}))
        if path == "/health":
            return response(200, b"{}")
        if path == "/metrics" and self._engine.has_metrics:
            return response(200, self._engine.metrics(), media=b"text/plain")
        if path in {"/get_model_info", "/get_server_info", "/model_info", "/server_info"}:
            return response(200, msgspec.json.encode({"model_path": self._engine.models[0], "version": "1"}))
        return response(404, b'{"detail": "Not Found"}')

    def _control(self, path: str, query: str) -> None:
        if path == "/stats":
            self.write(response(200, msgspec.json.encode(self._engine.stats.report(times="times" in query))))
            return
        try:
            self._engine.change(Plan.of(msgspec.json.decode(self._body, type=ModeRequest)))
        except (KeyError, msgspec.ValidationError) as error:
            self.write(response(400, msgspec.json.encode({"error": repr(error)})))
        else:
            self.write(response(200, b"{}"))
