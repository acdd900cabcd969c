"""Runs a situation: what is named, in which time, that nothing else is known to be wrong, and that it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from e2e.oncall.load import sending
from e2e.oncall.of_calls import EverythingQueues, ProgramHangs, RequestsBreakEngines, SlosMissed, TenantFloods
from e2e.oncall.of_engines import EngineSlow, EnginesOut, EngineStuck, EngineWrong, Healthy, HitRateFallen, Idle
from e2e.oncall.of_gateways import GatewayDies, GatewaysApart, MemoryGrows, ReloadRefused, RollingUpdate, StoreDown
from e2e.oncall.situation import Named, Situation
from e2e.oncall.told import check, events
from e2e.server_process import eventually
from e2e.servers import Launcher

SITUATIONS: Final[Mapping[str, type[Situation]]] = {
    "memory_grows": MemoryGrows,
    "hit_rate_fallen": HitRateFallen,
    "engine_slow": EngineSlow,
    "engine_stuck": EngineStuck,
    "engine_wrong": EngineWrong,
    "tenant_floods": TenantFloods,
    "everything_queues": EverythingQueues,
    "slos_missed": SlosMissed,
    "requests_break_engines": RequestsBreakEngines,
    "program_hangs": ProgramHangs,
    "gateway_dies": GatewayDies,
    "gateways_apart": GatewaysApart,
    "engines_out": EnginesOut,
    "reload_refused": ReloadRefused,
    "store_down": StoreDown,
    "rolling_update": RollingUpdate,
}
"""The longest first."""

SILENT: Final[Mapping[str, type[Situation]]] = {"healthy": Healthy, "idle": Idle}
"""In these nothing is named."""


OF_THE_MACHINE: Final = frozenset({"loop_late"})
"""May be named in each: the machine that runs them may be busy with others."""


class Times(NamedTuple):
    """Seconds until the problem was named, and from mending until it was over."""

    named_s: float
    over_s: float


async def run(
    kind: type[Situation], folder: Path, *, before_s: float | None = None, quiet_s: float | None = None
) -> Times:
    """Raises `AssertionError` if the gateway names something else, or at another time, or knows more than it names.

    The situation is brought about after `before_s` of healthy load, its own if None. So is `quiet_s`, in which nothing
    is named in a healthy fleet.
    """
    with Launcher(folder) as launch:
        situation = kind(launch, folder)
        await asyncio.to_thread(situation.start)
        looking = asyncio.create_task(situation.watch.look())
        try:
            async with sending(situation.load, situation.callers):
                times = await _through(
                    situation,
                    situation.before_s if before_s is None else before_s,
                    situation.quiet_s if quiet_s is None else quiet_s,
                )
            assert situation.loses_calls or not situation.load.lost(), situation.load.ended
        except AssertionError as failure:
            failure.add_note("\n".join(map(str, events(situation.gateway))))
            raise
        finally:
            looking.cancel()
            await situation.stop()
    return times


async def _through(situation: Situation, before_s: float, quiet_s: float) -> Times:
    watch, problems = situation.watch, situation.problems
    await asyncio.sleep(before_s)
    early = {named: said for named, said in watch.seen.items() if named[0] not in OF_THE_MACHINE}
    assert not early, f"before it began: {early}"
    await situation.begin()
    named_s = await watch.until(problems, there=True)
    for code, about in problems:
        await asyncio.to_thread(_is_told, situation, code, about)
    await situation.shows()
    for server in [server for server in situation.servers if server.running]:
        await asyncio.to_thread(check, server)
    await asyncio.sleep(quiet_s)
    await situation.mend()
    over_s = await watch.until(problems, there=False)
    unrelated = {named: said for named, said in watch.seen.items() if not _is_related(situation, named)}
    assert not unrelated, unrelated
    return Times(named_s, over_s)


def _is_related(situation: Situation, named: Named) -> bool:
    return named in situation.problems or named[0] in situation.beside | OF_THE_MACHINE


def _is_told(situation: Situation, code: str, about: str) -> None:
    """The metric and the log have the problem."""
    about = "" if about == situation.gateway.url else about
    assert situation.gateway.metric("plait_problem", code=code, about=about) == 1

    def is_logged() -> bool:
        told = [line for line in events(situation.gateway) if line["event"] == "problem"]
        return (code, about) in [(line["code"], line["about"]) for line in told]

    eventually(is_logged)
