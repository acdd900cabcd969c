"""The clients of a run: each starts a program, and has it run by the gateway or runs it itself, call by call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.application.program import Launch, ProgramCall, Scenario, ids_of, text_of
from benchmarks.application.systems import BLOCK_TOKENS, MODEL, Machine, System, simulation
from plait.backends.errors import PlaitError
from plait.gateway.config.sessions import SessionsConfig
from plait.gateway.guests.programs.core.executor import Executor
from plait.gateway.guests.programs.core.held_call import HeldCall, Output, Promise, ReadyCall
from plait.gateway.guests.programs.core.session import Getter
from plait.gateway.guests.programs.program import Program, entry
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.simulation.simulate import CallRecord, Prompt, SimulatedCall
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, root_hash
from plait.policy.types import Objective, Slo, TaskGroup
from tests.pieces import at_once

NETWORK_S = 0.25
"""A request's way to the gateway and its answer's way back, half each: Parrot emulates 200 to 300 ms a request."""


@dataclass(slots=True)
class Job:
    """A started program: what became of its calls, by the variable that each makes. Times from the start of the run."""

    launch: Launch
    records: dict[str, CallRecord] = field(default_factory=dict)
    finished_s: float = 0.0

    @property
    def latency_s(self) -> float:
        """From the client's start to all awaited values being with it."""
        return self.finished_s - self.launch.at_s

    @property
    def normalised_s(self) -> float:
        """Latency an output token."""
        return self.latency_s / self.launch.program.output_tokens


Values = Mapping[str, Sequence[int]]
"""Token ids by variable."""

Ended = Callable[[Sequence[int]], None]
"""Told of the ids that a call has generated."""


@dataclass(frozen=True, slots=True)
class Promised:
    """What the gateway knows of a call beside its prompt; fields as in `Call`."""

    slo: Slo | None = None
    objective: Objective | None = None
    group: TaskGroup | None = None


UNPROMISED = Promised()
"""A plain call."""


class Clients:
    """All clients of one run on a fresh fleet."""

    def __init__(self, system: System, machine: Machine, network_s: float = NETWORK_S) -> None:
        self.simulation, self.router = simulation(system, machine)
        self.way_s = network_s / 2
        self._system = system
        self.deduced = system.deduced
        self._executor = Executor(SessionsConfig(), self.router.predicted_s, self.simulation.at)
        self._ids = 0

    def run(self, scenario: Scenario) -> list[Job]:
        """Let everything happen; the jobs in the order of the scenario."""
        jobs = [Job(launch) for launch in scenario]
        for number, job in enumerate(jobs):
            chained = self._system.chained and job.launch.objective is not None
            client = _SessionClient(self, self._executor, job, number) if chained else _LoopClient(self, job)
            self.simulation.at(job.launch.at_s, client.start)
        self.simulation.run()
        return jobs

    def send(self, call: ProgramCall, values: Values, job: Job, ended: Ended, promised: Promised = UNPROMISED) -> None:
        """Send a call whose inputs are there now; `ended` gets the ids that it has generated."""
        first_id, self._ids = self._ids, self._ids + call.output_tokens
        simulated = SimulatedCall(
            self.simulation.now_s,
            self._prompt(call, values),
            call.output_tokens,
            job.launch.kind,
            slo=promised.slo,
            objective=promised.objective,
            group=promised.group,
            first_output_id=first_id,
        )
        job.records[call.output] = self.simulation.send(
            simulated, lambda _record: ended(range(first_id, first_id + call.output_tokens))
        )

    def _prompt(self, call: ProgramCall, values: Values) -> Prompt:
        tokens = call.prompt(values)
        root = root_hash(MODEL, "" if self._system.prefix_caching else f"call-{self._ids}")
        return Prompt(
            len(tokens),
            HashChain(BLOCK_TOKENS, root, tokens),
            HashChain(TREE_BLOCK_TOKENS, root, tokens),
        )


class _LoopClient:
    """Runs its program itself: a call is sent once its inputs have come back, in parallel where nothing forbids it."""

    def __init__(self, clients: Clients, job: Job) -> None:
        self._clients = clients
        self._job = job
        self._values: dict[str, Sequence[int]] = {}
        self._sent: set[str] = set()

    def start(self, now_s: float) -> None:
        """Send what needs nothing, and then what has become possible."""
        clients = self._clients
        for call in self._job.launch.program.calls:
            if call.output not in self._sent and all(name in self._values for name in call.inputs):
                self._sent.add(call.output)
                clients.simulation.at(now_s + clients.way_s, partial(self._arrive, call))

    def _arrive(self, call: ProgramCall, _now_s: float) -> None:
        self._clients.send(call, self._values, self._job, partial(self._ended, call))

    def _ended(self, call: ProgramCall, ids: Sequence[int]) -> None:
        simulation = self._clients.simulation
        simulation.at(simulation.now_s + self._clients.way_s, partial(self._returned, call, ids))

    def _returned(self, call: ProgramCall, ids: Sequence[int], now_s: float) -> None:
        self._values[call.output] = ids
        if all(name in self._values for name in self._job.launch.program.awaited):
            self._job.finished_s = now_s
        self.start(now_s)


class _SessionClient:
    """Gives the gateway the whole program at once and waits for the awaited values."""

    def __init__(self, clients: Clients, executor: Executor, job: Job, number: int) -> None:
        self._clients = clients
        self._executor = executor
        self._job = job
        self._name = f"job-{number}"
        self._awaited = set(job.launch.program.awaited)
        self._mark = job.launch.objective if clients.deduced else None

    def start(self, now_s: float) -> None:
        """Everything is sent at once, as one program."""
        self._clients.simulation.at(now_s + self._clients.way_s, self._arrive)

    def _arrive(self, now_s: float) -> None:
        program, executor = self._job.launch.program, self._executor
        session = executor.sessions.open("benchmark", self._name, now_s)
        getters = [Getter(name, partial(self._got, name), _failed, mark=self._mark) for name in program.awaited]
        calls = {f"calls[{index}]": self._held(call) for index, call in enumerate(program.calls)}
        at_once(entry(executor, session, Program({}, calls, getters), now_s))

    def _held(self, call: ProgramCall) -> HeldCall:
        owner = _Owner(self._clients, self._executor, self._job, call)
        owner.held = HeldCall(
            f"{self._name}-{call.output}",
            call.inputs,
            (Output(call.output),),
            owner,
            MODEL,
            prompt_tokens=call.constant_tokens,
            output_tokens=call.output_tokens,
        )
        return owner.held

    def _got(self, name: str, _value: str) -> None:
        self._awaited.discard(name)
        if not self._awaited:
            simulation = self._clients.simulation
            simulation.at(simulation.now_s + self._clients.way_s, self._returned)

    def _returned(self, now_s: float) -> None:
        self._job.finished_s = now_s
        session = self._executor.sessions.find("benchmark", self._name, now_s)
        self._executor.endings.end(session, "is over", now_s)


class _Owner:
    """Runs one call of a session, as the gateway's shell does (`CallOwner`)."""

    held: HeldCall

    def __init__(self, clients: Clients, executor: Executor, job: Job, call: ProgramCall) -> None:
        self._clients = clients
        self._executor = executor
        self._job = job
        self._call = call

    def on_ready(self, ready: ReadyCall) -> None:
        """Its inputs have values."""
        values = {name: ids_of(text) for name, text in ready.values.items()}
        self._executor.start(self.held, ready.ready_s)
        promised = Promised(ready.slo, ready.objective, ready.group)
        self._clients.send(self._call, values, self._job, self._ended, promised)

    def on_refined(self, promise: Promise) -> None:
        """No effect: the simulated engines keep the objectives that a call was sent with."""

    def on_broken(self, error: PlaitError) -> None:
        """Nothing here fails."""
        _failed(error)

    def _ended(self, ids: Sequence[int]) -> None:
        self._executor.produce(self.held, text_of(ids), self._clients.simulation.now_s)


def _failed(error: PlaitError) -> None:
    raise error
