"""A chained call on its way through the gateway: a task from the moment that its inputs have values."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import structlog
from starlette.types import Send

from plait.backends.errors import EngineError, NoEngineError, PlaitError, ValueTooLargeError
from plait.gateway.calls.call_reader import OFF_LOOP_BYTES, CallReader
from plait.gateway.calls.completion_text import TextTap
from plait.gateway.calls.relay import Delivery, Outcome, Relay
from plait.gateway.programs.executor import Executor
from plait.gateway.programs.failure_cause import FailureCause
from plait.gateway.programs.held_call import HeldCall, ReadyCall
from plait.gateway.programs.metrics import ProgramMetrics
from plait.gateway.programs.sessions import Session
from plait.gateway.timer import loop_time_s
from plait.gateway.transforms import TransformError

log = structlog.get_logger(__name__)


class BrokenCallError(Exception):
    """The call has ended without its value because of `cause`; `error` is for clients that do not know it yet."""

    def __init__(self, cause: FailureCause, error: PlaitError | None = None) -> None:
        super().__init__(cause.message)
        self.cause = cause
        self.error = error


class Generated(NamedTuple):
    """A text, which engine generated it, and the value that was made of it."""

    engine_id: str
    text: str
    value: str


@dataclass(frozen=True, slots=True)
class CallRunner:
    """What calls run with. `tasks` are those of the calls that run, so that the gateway can end them."""

    executor: Executor
    reader: CallReader
    relay: Relay
    metrics: ProgramMetrics
    tasks: set[asyncio.Task[None]]


class ChainedCall(ABC):
    """Runs one call and tells the executor how it ended: whatever happens, that happens once."""

    def __init__(self, runner: CallRunner, session: Session) -> None:
        self.runner = runner
        self.session = session
        self.call: HeldCall
        self._task: asyncio.Task[None] | None = None
        self._has_ended = False

    @abstractmethod
    async def run(self, ready: ReadyCall) -> None:
        """Run the call. Raises `PlaitError` or `BrokenCallError` if an output did not get its value."""

    @abstractmethod
    def take_back(self) -> bool:
        """Take back what came of a failed delivery, so that the call can be delivered again; False if it was seen."""

    @abstractmethod
    def on_failed(self, error: PlaitError) -> None:
        """The call has ended without an answer of an engine, which its clients may wait for."""

    def on_ready(self, ready: ReadyCall) -> None:
        """Its inputs have values: it gets a task."""
        if self.call.inputs:
            self.runner.metrics.held(ready.ready_s - self.call.arrived_s)
        self._task = asyncio.create_task(self._run(ready), name=f"call-{self.call.call_id}")
        self.runner.tasks.add(self._task)
        self._task.add_done_callback(self.runner.tasks.discard)

    def on_broken(self, error: PlaitError) -> None:
        """It has ended without its own doing."""
        self._end(FailureCause(message=error.message), error)
        if self._task is not None:
            self._task.cancel()

    async def generate(self, delivery: Delivery, send: Send) -> Generated:
        """Deliver a call whose text becomes the next output's value. Raises `BrokenCallError` or `PlaitError`."""
        engine_id = await self.deliver(delivery, send)
        output, text = self.call.output, self.call.text
        assert output is not None, "a step is run for each output"
        try:
            off_loop = output.transform is not None and len(text) > OFF_LOOP_BYTES
            value = await asyncio.to_thread(output.value, text) if off_loop else output.value(text)
            self.runner.executor.produce(self.call, value, loop_time_s())
        except (TransformError, ValueTooLargeError) as error:
            step = error.step if isinstance(error, TransformError) else None
            cause = FailureCause(engine=engine_id, transform=step, message=error.message)
            raise BrokenCallError(cause) from error
        return Generated(engine_id, text, value)

    async def deliver(self, delivery: Delivery, send: Send) -> str:
        """Have the call answered in full, and return the engine's id. Raises `BrokenCallError` or `PlaitError`.

        When an engine fails it, it goes to another one, or to the same where there is no other, as often as is
        configured and as long as nobody has seen what came of it.
        """
        attempts, failed = self.runner.executor.sessions.limits.max_attempts, list[Outcome]()
        while True:
            try:
                outcome = await self._attempt(delivery, send, failed)
            except NoEngineError as error:
                if failed:
                    raise _broken(failed[-1]) from error
                raise
            if outcome.problem is None:
                return outcome.engine_id
            failed.append(outcome)
            if not isinstance(outcome.problem, EngineError) or len(failed) == attempts or not self.take_back():
                raise _broken(outcome)
            self.runner.executor.begin_anew(self.call)
            self.runner.metrics.tried_again(delivery.call.model, outcome.engine_id)

    async def _attempt(self, delivery: Delivery, send: Send, failed: Sequence[Outcome]) -> Outcome:
        text = TextTap(partial(self.runner.executor.generated, self.call)) if self.call.outputs else None
        avoids = frozenset(outcome.engine_id for outcome in failed)
        return await self.runner.relay.run(replace(delivery, text=text, avoids=avoids), send)

    async def _run(self, ready: ReadyCall) -> None:
        try:
            await self.run(ready)
            self._end(None, None)
        except PlaitError as error:
            self._end(FailureCause(message=error.message), error)
        except BrokenCallError as broken:
            self._end(broken.cause, broken.error)
        except asyncio.CancelledError:
            self._end(FailureCause(message="the gateway has stopped"), EngineError("The gateway has stopped."))
            raise
        finally:  # without effect but after what nobody has foreseen
            unforeseen = EngineError("The call was given up because of an internal error.")
            self._end(FailureCause(message="an internal error"), unforeseen)

    def _end(self, cause: FailureCause | None, error: PlaitError | None) -> None:
        """Tell the executor and the clients; the first to know counts."""
        if self._has_ended:
            return
        self._has_ended = True
        executor, call = self.runner.executor, self.call
        if cause is None:
            executor.finish(call, loop_time_s())
        else:
            executor.fail(call, cause, loop_time_s())
        if error is not None:
            self.on_failed(error)
        log.info(
            "chained call",
            request_id=call.call_id,
            session=self.session.session_id,
            outputs=[output.variable for output in call.outputs],
            problem=cause and cause.message,
            held_s=None if call.ready_s is None else round(call.ready_s - call.arrived_s, 4),
        )


def _broken(outcome: Outcome) -> BrokenCallError:
    """For a call that no further engine is to have."""
    engine_id, problem = outcome.engine_id, outcome.problem
    if isinstance(problem, EngineError):
        return BrokenCallError(FailureCause(engine=engine_id, message=problem.message), problem)
    return BrokenCallError(FailureCause(engine=engine_id, message=f"engine {engine_id}: {problem}"))
