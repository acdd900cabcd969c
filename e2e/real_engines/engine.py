"""A real engine's server as a user starts it, whichever engine it is, and what the tests ask of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import httpx
import msgspec

from e2e.ports import free_port
from e2e.server_process import Server, eventually
from plait.backends.protocol.cache_state import CacheState
from tests.waiting import WITHIN_S

MODEL: Final = "tiny"
KV_TOKENS: Final = 16_384
BATCH_TOKENS: Final = 512
MAX_RUNNING_CALLS: Final = 32
OWN_SCHEDULERS: Final = Path(__file__).parents[1] / "own_schedulers"
"""On the path of an engine that has options for its scheduler."""
START_WITHIN_S: Final = 4 * WITHIN_S
"""Several processes that import PyTorch, one after the other: 45 s where nothing else runs."""


@dataclass(frozen=True)
class Step:
    """What one iteration computed, of prompts and of outputs."""

    context_calls: int
    context_tokens: int
    decoding_calls: int
    decoded_tokens: int


class RealEngine(Server, ABC):
    """One engine's server with its processes: `command` starts it."""

    annotations_field: str
    """The field of a body that has the gateway's annotations."""
    prompt_ids_option: str
    """The field of a body that asks for the prompt's token ids."""

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(name, free_port(), (), folder / f"{name}.log", ready_path="/health")
        self.command = [*command, "--port", str(self.port)]
        self._environment = {**os.environ, **(environment or {})}

    def add_flags(self, flags: Sequence[str]) -> None:
        """Start it with more flags; of one given twice, the last counts."""
        self.command += flags

    def set_variable(self, name: str, value: str) -> None:
        """Start it with an environment variable."""
        self._environment[name] = value

    def set_ranks(self, count: int) -> None:
        """Start it with several data-parallel ranks."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it in a process group of its own, so that what it starts can be ended with it.

        Not in a session of its own: Linux shares the CPU out among sessions first. An engine's processes, which spin
        while a call runs, would then starve their clients for seconds on a machine with two cores.
        """
        assert not self.running
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=self.log_path.parent,
                process_group=0,
            )

    def wait_until_ready(self) -> None:
        """Return once it answers; raises `AssertionError` with its log if it ended or the deadline passed."""
        ends_s = time.monotonic() + START_WITHIN_S
        while self.running and time.monotonic() < ends_s:
            try:
                if self.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.2)
        raise AssertionError(f"{self.name} is not ready:\n{self.log_tail(60)}")

    def kill(self) -> None:
        """End it and its workers without warning."""
        assert self._process is not None
        self._kill_group()
        self._process.wait(WITHIN_S)

    def stop(self) -> None:
        """Stop a running server; raises `AssertionError` if it has to be killed or has logged a traceback until now."""
        failed = not self.may_log_tracebacks and "Traceback" in self.log()
        self.may_log_tracebacks = True  # stock engines log one when they are told to stop
        try:
            super().stop()
        finally:
            self._kill_group()
        assert not failed, f"{self.name} failed on the way:\n{self.log()}"

    def _kill_group(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def cache_state(self, **query: str | int) -> CacheState:
        """Its cache-state report."""
        response = self.get("/cache_state", params=query, headers={"accept": "application/msgpack"})
        response.raise_for_status()
        return msgspec.msgpack.decode(response.content, type=CacheState)

    def settled_state(self) -> CacheState:
        """Its whole cache state, once it runs nothing and two reports in a row agree."""
        states = [self.cache_state()]

        def is_settled() -> bool:
            states.append(self.cache_state())
            return _rests(states[-1]) and _rests(states[-2]) and states[-1].cursor == states[-2].cursor

        eventually(is_settled)
        return states[-1]

    def outstanding_calls(self) -> int:
        """Its running and waiting calls, as its scheduler has them."""
        queue = self.cache_state().queue
        return queue.running + queue.waiting

    @abstractmethod
    def computed_prompt_tokens(self) -> float:
        """Prompt tokens it had to compute so far, by its own count."""

    @abstractmethod
    def cached_prompt_tokens(self) -> float:
        """Prompt tokens it found in its cache so far, by its own count."""

    @abstractmethod
    def used_blocks(self) -> int:
        """KV blocks that running calls use, by its own gauge."""

    @abstractmethod
    def steps(self) -> list[Step]:
        """Its iterations so far, by its own log."""

    @abstractmethod
    def token_ids(self, choice: Mapping[str, Any]) -> Sequence[int]:
        """The output's token ids in a choice of an answer to a request with `return_token_ids`."""

    @abstractmethod
    def prompt_ids(self, answer: Mapping[str, Any]) -> Sequence[int]:
        """The prompt's token ids in a chat's answer to a request with `prompt_ids_option`."""


@contextmanager
def started(engines: Collection[RealEngine]) -> Iterator[None]:
    """Engines that answer. They start at the same time, and stop at the same time, because either takes long."""
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_until_ready()
        yield
    finally:
        with ThreadPoolExecutor() as pool:
            stopped = [pool.submit(engine.stop) for engine in engines]
        for end in stopped:
            end.result()


class PlaitEngine(Protocol):
    """Makes an engine with Plait inside, through Plait's launcher; not started yet.

    `scheduler_options` are those of a scheduler in `OWN_SCHEDULERS`. `options` are Plait's, `flags` the engine's own.
    """

    def __call__(
        self,
        name: str,
        python: Path,
        model: Path,
        folder: Path,
        *,
        scheduler_options: Mapping[str, int | str] | None = None,
        options: Sequence[str] = (),
        flags: Sequence[str] = (),
    ) -> RealEngine: ...


@dataclass(frozen=True)
class DocumentSizes:
    """How long the prompts and answers of calls on documents are, so that a CPU computes them in the time there is.

    Documents are cut to some characters. A long text gives several documents. Longer shared parts are left out.
    """

    characters: int
    of_a_text: int
    shared_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class EngineKind:
    """One kind of engine: how to make a stock one and one with Plait, and what it has of its own."""

    name: Literal["vllm", "sglang"]
    stock: Callable[[str, Path, Path, Path], RealEngine]
    plait: PlaitEngine
    distribution: str
    """The name in the package index, and `package` that of its folder."""
    package: str
    log_steps: Sequence[str]
    """The flags that make it log its iterations."""
    long_tokens: int
    """The length of a prompt that takes it long to compute, but not half a minute."""
    overtaken_tokens: int
    """The length of prompts that take many steps, and that calls with objectives overtake."""
    documents: DocumentSizes
    placed_documents: DocumentSizes
    """Those that show what placement saves."""
    agents: int
    """How many recorded trajectories are continued."""
    agent_examples: int
    """How many more are in all prompts of agents, as ReAct's prompts have some."""
    block_tokens: int
    """The size of its KV blocks where no flag says otherwise, as users start it."""
    block_flags: Callable[[int], Sequence[str]]
    """The flags for blocks of some size, of which `KV_TOKENS` fit."""
    kept_blocks: int
    """KV blocks that it keeps for itself."""
    tells_cached: str
    """The flag of a stock one with which its answers say how many prompt tokens were cached."""
    uncached: str
    """The flag that switches its prefix cache off."""
    embedding: Sequence[str] = ()
    """The flags with which it serves a model's vectors instead of its text, if the tests ask it to."""


def _rests(state: CacheState) -> bool:
    return state.queue.running == state.queue.waiting == 0


def stored_blocks(state: CacheState) -> list[int]:
    """The blocks of a report, in its order."""
    return [block for run in state.stored for block in run.hashes]
