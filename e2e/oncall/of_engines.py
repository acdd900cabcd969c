"""Situations of one engine, which is started again as an administrator does: drained, restarted, given calls again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar, Final

from e2e.oncall.load import unlike_any_other
from e2e.oncall.situation import MODEL, Situation
from e2e.ports import free_port
from e2e.server_process import Server, eventually
from plait.backends.http.trust import FILE
from tests.backends.http.certificates import Authority

NO_KEY: Final = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class RestartedEngine(Situation):
    """The engine `b` comes back from a restart with `options`; to mend it, it is started again without them."""

    options: ClassVar[Sequence[str]]

    async def begin(self) -> None:
        await asyncio.to_thread(self.restart, "b", self.options)

    async def mend(self) -> None:
        await asyncio.to_thread(self.restart, "b")

    def restart(self, name: str, options: Sequence[str] = ()) -> None:
        """Drain the engine, stop it once it has no calls, start it, and give it calls."""

        def described() -> dict[str, object]:
            engine: dict[str, object] = self.admin("GET", f"/engines/{name}").json()
            return engine

        self.admin("POST", f"/engines/{name}", json={"state": "draining"})
        eventually(lambda: described()["outstanding_calls"] == 0)
        engine = self.engines[name]
        engine.stop()
        eventually(lambda: described()["health"] == "down")
        self.engines[name] = again = self.launch.engine(name, time_scale=1, options=options, port=engine.port)
        again.start()
        again.wait_until_ready()
        eventually(lambda: described()["health"] == "up")
        self.admin("POST", f"/engines/{name}", json={"state": "active"})


class EnginesOut(Situation):
    """New engines are given, at each of which something else is wrong. To mend it, they are taken away again."""

    part = "an-engine-is-out"
    reasons: ClassVar[Mapping[str, str]] = {
        "refused": "refused the connection",
        "unknown": "the name engine.invalid was not resolved",
        "other": "are not an HTTP/1.1 response",
        "expired": "has a certificate that has expired",
        "closed": "GET /v1/models: the engine asks for a key: see api_key",
    }
    problems = frozenset(("engine_out", name) for name in reasons)
    callers = 1

    def make_engines(self) -> dict[str, Server]:
        return {"a": self.launch.engine("a", time_scale=1)}

    def start(self) -> None:
        """The gateway trusts an issuer of its own, because a certificate that it does not trust is no expired one."""
        self._issuer = Authority(self.folder / "issuer")
        before = os.environ.get(FILE)
        os.environ[FILE] = str(self._issuer.certificate)
        try:
            super().start()
        finally:
            os.environ.pop(FILE) if before is None else os.environ.update({FILE: before})

    async def begin(self) -> None:
        tls = await asyncio.to_thread(self._issuer.server, ends="20210101000000Z")
        answers = {"other": b"SSH-2.0-OpenSSH_9.2\r\n", "closed": NO_KEY, "expired": b""}
        self._listening = {
            name: await asyncio.start_server(
                partial(_answer, said), "127.0.0.1", 0, ssl=tls if name == "expired" else None
            )
            for name, said in answers.items()
        }
        ports = {name: one.sockets[0].getsockname()[1] for name, one in self._listening.items()}
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        urls |= {"refused": f"http://127.0.0.1:{free_port()}", "unknown": "http://engine.invalid:8000"}
        urls["expired"] = f"https://localhost:{ports['expired']}"
        for name in self.reasons:
            await asyncio.to_thread(self.admin, "POST", "/engines", json={"name": name, "url": urls[name]})

    async def shows(self) -> None:
        """Each sentence, and each engine's row, has the reason."""
        status = await asyncio.to_thread(lambda: self.admin("GET", "/status").json())
        sentences = {one["about"]: one["sentence"] for one in status["problems"] if one["code"] == "engine_out"}
        rows = {row["name"]: row["reason"] for row in status["engines"]}
        for name, reason in self.reasons.items():
            assert reason in sentences[name], sentences[name]
            assert reason in rows[name], rows[name]

    async def mend(self) -> None:
        for name in self.reasons:
            await asyncio.to_thread(self.admin, "DELETE", f"/engines/{name}?force=true")
        for listening in self._listening.values():
            listening.close()


async def _answer(said: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        await reader.read(1)
        writer.write(said)
    writer.close()


class EngineSlow(RestartedEngine):
    """A throttled clock."""

    part = "an-engine-is-slow"
    problems = frozenset({("engine_slow", "b")})
    options = ("--time-scale", "0.25")


class EngineStuck(RestartedEngine):
    """The engine answers `/health`, takes calls, and computes nothing. The gateway ejects it after a while."""

    part = "an-engine-is-stuck"
    problems = frozenset({("engine_stuck", "b")})
    beside = frozenset({"engine_out", "slo_missed"})
    options = ("--time-scale", "0.00001")
    loses_calls = True

    async def mend(self) -> None:
        """Kill it: its calls never end."""
        await asyncio.to_thread(self.engines["b"].kill)
        await super().mend()


class EngineWrong(RestartedEngine):
    """Another tokenizer."""

    part = "an-engine-is-not-what-it-seems"
    problems = frozenset({("engine_differs", "b")})
    options = ("--tokenizer", "bytes")


class HitRateFallen(Situation):
    """A new version of an application begins each of its prompts with another line."""

    part = "the-hit-rate-has-fallen"
    problems = frozenset({("hit_rate_fallen", MODEL)})
    before_s = 185.0

    async def begin(self) -> None:
        self.load.body, self._before = unlike_any_other, self.load.body

    async def mend(self) -> None:
        self.load.body = self._before


class Healthy(RestartedEngine):
    """Nothing is wrong: an engine is restarted with a drain."""

    options = ()
    quiet_s = 300.0


class Idle(Situation):
    """Nothing is wrong: nobody calls."""

    callers = 0
    quiet_s = 300.0

    async def begin(self) -> None:
        """There is nothing to bring about."""

    async def mend(self) -> None:
        """There is nothing to mend."""
