"""Situations of calls: too many, too urgent, such as break engines, or such as wait for what never comes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from e2e.faults.fleet import ScriptedServer
from e2e.oncall.load import OTHER, THIRD, Crowd, Load, asked, unlike_any_other
from e2e.oncall.situation import MODEL, Situation
from e2e.rolling_load import Ended, client, post
from e2e.server_process import Server, eventually

MARKER: Final = "this breaks engines"
PACE: Final = ("--first-s", "0.05", "--token-s", "0.02")


class Crowded(Situation):
    """Tenants call beside the healthy load."""

    crowds: ClassVar[dict[str, int]]
    """Calls at once, by tenant."""

    ttft_ms: ClassVar[int | None] = None
    """None by default: calls with an SLO wait on their engines, not in the gateway."""

    pause_s: ClassVar[float] = 0.0
    """Of each caller, between two calls."""

    crowd: Sequence[Crowd] = ()

    def body(self, name: str) -> dict[str, Any]:
        """A call of the crowd."""
        return unlike_any_other(name)

    async def begin(self) -> None:
        self.crowd = [
            Crowd(Load(self.servers, self.body, tenant, self.pause_s, self.ttft_ms), callers)
            for tenant, callers in self.crowds.items()
        ]
        for crowd in self.crowd:
            crowd.come()

    async def mend(self) -> None:
        for crowd in self.crowd:
            await crowd.go()

    async def stop(self) -> None:
        await self.mend()


class TenantFloods(Crowded):
    """A tenant has sixty calls at once; others have their turns."""

    part = "a-tenant-floods"
    problems = frozenset({("tenant_floods", OTHER)})
    crowds: ClassVar = {OTHER: 60}

    async def shows(self) -> None:
        """The healthy load goes on beside the flood."""
        before = self.load.ended.total()
        await asyncio.to_thread(eventually, lambda: self.load.ended.total() >= before + self.callers)

    def body(self, name: str) -> dict[str, Any]:
        return unlike_any_other(name, times=200)


class EverythingQueues(Crowded):
    """Two tenants send more than the fleet computes."""

    part = "everything-queues"
    problems = frozenset({("queue_long", MODEL)})
    beside = frozenset({"slo_missed"})
    crowds: ClassVar = {OTHER: 80, THIRD: 80}

    def body(self, name: str) -> dict[str, Any]:
        return unlike_any_other(name, times=400)


class SlosMissed(Crowded):
    """An application asks for times to the first token that no engine keeps."""

    part = "slos-are-missed"
    problems = frozenset({("slo_missed", MODEL)})
    crowds: ClassVar = {OTHER: 2}
    ttft_ms = 20
    pause_s = 0.5


class RequestsBreakEngines(Crowded):
    """A tenant's requests let each engine fail."""

    part = "requests-break-engines"
    problems = frozenset({("requests_break_engines", OTHER)})
    crowds: ClassVar = {OTHER: 2}
    pause_s = 0.5

    def make_engines(self) -> dict[str, Server]:
        self.scripted = ScriptedServer("engines", {name: [MODEL] for name in "abc"}, self.folder, *PACE)
        return {}

    def make_gateways(self) -> list[Server]:
        engines = [engine.entry() for engine in self.scripted.engines.values()]
        return [self.launch.gateway(engines, models=(), **self.sections())]  # they have no tokenizer to agree with

    def start(self) -> None:
        self.scripted.start()
        self.scripted.wait_until_ready()
        self.gateway.start()
        self.gateway.wait_until_ready()

    async def stop(self) -> None:
        await super().stop()
        await asyncio.to_thread(self.scripted.stop)

    async def begin(self) -> None:
        for engine in self.scripted.engines.values():
            await engine.set_mode("status_500_vllm", marker=MARKER)
        await super().begin()

    def body(self, name: str) -> dict[str, Any]:
        return asked(f"{name}: {MARKER}")


class ProgramHangs(Situation):
    """A call waits for an output that no call makes. Nothing is named; the session and the receipt say so."""

    part = "a-program-hangs"

    async def begin(self) -> None:
        self._held = asyncio.create_task(self._send())

    async def _send(self) -> Ended:
        async with client(self.gateway) as http:
            headers = {"authorization": "Bearer red-key", "plait-session": "hangs", "plait-inputs": "never"}
            return await post(http, asked("Use {{never}}"), **headers)

    async def shows(self) -> None:
        headers = {"authorization": "Bearer red-key"}
        await asyncio.to_thread(eventually, lambda: self.gateway.metric("plait_held_calls") == 1)
        session = await asyncio.to_thread(self.gateway.get, "/v1/sessions/hangs", headers=headers)
        assert session.json()["calls"] == {"waiting": 1, "ready": 0, "running": 0}
        assert [(one["semantic_var_id"], one["producer"]) for one in session.json()["variables"]] == [("never", None)]

    async def mend(self) -> None:
        """Give the value."""
        body = {"session_id": "hangs", "semantic_var_id": "never", "value": "late"}
        headers = {"authorization": "Bearer red-key"}
        answer = await asyncio.to_thread(self.gateway.post, "/v1/variables", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert (await self._held).how == "complete"
