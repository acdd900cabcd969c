"""The guest that runs programs: calls that depend on each other by semantic variables."""

from __future__ import annotations

from plait.gateway.doors import Guest, House
from plait.gateway.guests.programs.chained_calls import ChainedCalls
from plait.gateway.guests.programs.core.executor import Executor
from plait.gateway.guests.programs.core.record import Records
from plait.gateway.guests.programs.metrics import ProgramMetrics, SessionCollector
from plait.gateway.guests.programs.program_api import ProgramApi
from plait.gateway.guests.programs.program_calls import ProgramCalls
from plait.gateway.guests.programs.semantic_api import SemanticApi
from plait.gateway.others import Others, SessionsHere
from plait.gateway.timer import at_loop_time


class ProgramsGuest(Guest):
    """Offers `ChainedCalls`, and says which sessions are here. Where a guest offers `Records`, sessions are stored."""

    def __init__(self, house: House) -> None:
        kernel = house.kernel
        self._supervisor, limits = kernel.supervisor, kernel.config.sessions
        self._records = house.find(Records) or Records()
        metrics, others = ProgramMetrics(kernel.registry, kernel.tenants.label), house.find(Others) or Others()
        executor = Executor(
            limits, kernel.router.predicted_s, at_loop_time, metrics.job_ended, self._records, is_own=others.is_own
        )
        kernel.registry.register(SessionCollector(executor.sessions, executor.variables.counts))
        chained = ChainedCalls(executor, kernel.reader, kernel.relay, metrics, kernel.bodies)
        self._chained = house.offer(ChainedCalls, chained)
        house.offer(SessionsHere, executor.sessions)
        self.before = [ProgramCalls(chained, kernel.refusals)]
        self.routes = [
            *SemanticApi(chained, kernel.keys, kernel.bodies, limits.keep_alive_s).routes,
            *ProgramApi(chained, kernel.keys, kernel.bodies, limits.keep_alive_s).routes,
        ]

    def start(self) -> None:
        self._supervisor.start("sessions-expire", self._chained.expire)

    def on_closed(self) -> None:
        """Clients that would wait for another request get a 503."""
        self._chained.give_up_stranded()

    async def stop(self) -> None:
        self._records.freeze()
        await self._chained.close()
