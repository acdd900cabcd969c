"""Situations of one engine, which is started again as an administrator does: drained, restarted, given calls again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from e2e.oncall.load import unlike_any_other
from e2e.oncall.situation import MODEL, Situation
from e2e.server_process import eventually


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
