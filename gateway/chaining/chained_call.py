"""A chained call on its way through the gateway: held, then a task in a slice of the event loop, then deliveries.

It becomes a task when its inputs have values. Each delivery gets what the call is promised then (`StandingPromise`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import structlog

from plait.backends.errors import (
    CallerError,
    EngineError,
    GatewayStoppingError,
    LimitError,
    NoEngineError,
    PlaitError,
    ValueTooLargeError,
)
from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.gateway.answers.completion_text import TextTap
from plait.gateway.asgi import Headers, Sink
from plait.gateway.calls.call import Asked, Ending
from plait.gateway.calls.call_reader import OFF_LOOP_BYTES, CallReader
from plait.gateway.calls.outgoing import unhurried
from plait.gateway.calls.relay import Relay
from plait.gateway.calls.stored_responses import StoredResponses
from plait.gateway.chaining.filled_prompts import FilledPrompts
from plait.gateway.chaining.metrics import ProgramMetrics
from plait.gateway.chaining.recorded_answer import AnswerBytes
from plait.gateway.chaining.slices import Entrance, Slices
from plait.gateway.chaining.standing_promise import StandingPromise
from plait.gateway.programs.executor import Executor
from plait.gateway.programs.held_call import HeldCall, Promise, ReadyCall
from plait.gateway.programs.session import Session
from plait.gateway.programs.session_errors import FailureCause
from plait.gateway.timer import loop_time_s
from plait.gateway.transforms import TransformError

log = structlog.get_logger(__name__)

_KEYS = frozenset((b"api-key", b"authorization", b"cookie", b"proxy-authorization", b"x-api-key"))


def without_keys(headers: Headers) -> tuple[tuple[bytes, bytes], ...]:
    """The headers that may be stored: no keys of clients."""
    return tuple((name, value) for name, value in headers if name not in _KEYS)


@dataclass(frozen=True, slots=True)
class CallRunner:
    """The parts of the gateway that a call needs, and a program."""

    executor: Executor
    """Says when a call may run."""

    reader: CallReader
    """Tokenizes its prompt."""

    relay: Relay
    """Delivers it."""

    metrics: ProgramMetrics

    prompts: FilledPrompts
    """Count the prompt with its values."""

    slices: Slices
    """In which calls are read, entered and started."""

    entrance: Entrance
    """Where programs enter their sessions."""

    stored: StoredResponses
    """Has responses in the background when they have ended."""

    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """The task of each running call."""

    handed_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the next gateway goes on with the durable sessions: none of their calls is started any more."""


class BrokenCallError(Exception):
    """The call ended without its value because of `cause`, which the log calls a `problem`.

    `error` goes to clients that have not seen it yet.
    """

    def __init__(self, cause: FailureCause, problem: str, error: PlaitError | None = None) -> None:
        super().__init__(cause.message)
        self.cause = cause
        self.problem = problem
        self.error = error


class Generated(NamedTuple):
    """A generated text, the engine that generated it, and the variable's value after the transform."""

    engine_id: str
    text: str
    value: str


class ChainedCall(ABC):
    """Runs one call. The executor gets each of its outputs, and is told once if the call ends in another way.

    `path` is the route of the engine that answers it. The current output does not begin with the `space` that the model
    writes first.
    """

    __slots__ = (
        "_after",
        "_has_ended",
        "_is_begun_anew",
        "_is_delivered",
        "_task",
        "_was_cut",
        "answer_bytes",
        "call",
        "path",
        "promise",
        "runner",
        "session",
        "space",
    )

    def __init__(self, runner: CallRunner, session: Session, path: str) -> None:
        self.runner = runner
        self.session = session
        self.path = path
        self.space = ""
        self.call: HeldCall
        self.promise = StandingPromise(runner.relay)
        self.answer_bytes = AnswerBytes(runner.executor.sessions, session)
        self._after: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_ended = False
        self._is_begun_anew = False
        self._is_delivered = False  # to an engine, as a call that has a line of its own
        self._was_cut = False

    @abstractmethod
    async def run(self, ready: ReadyCall) -> None:
        """Run the call. Raises `PlaitError` or `BrokenCallError` if an output did not get its value."""

    @abstractmethod
    def take_back(self) -> bool:
        """Discard the answer of a failed delivery before a retry; False if a client has seen a part of it."""

    @abstractmethod
    def on_failed(self, error: PlaitError) -> None:
        """The call failed. Clients that still wait for its answer get `error`."""

    @property
    def has_ended(self) -> bool:
        """Whether the executor was told of the call's end."""
        return self._has_ended

    def kept_answer(self) -> bytes | None:
        """The body of the answer that the call's clients get, if it is to be kept with its value."""
        return None

    def start_after(self, event: asyncio.Event) -> None:
        self._after = event

    def on_ready(self, ready: ReadyCall) -> None:
        """Start the call's task: its inputs have values."""
        if self.runner.handed_over.is_set() and self.session.record.stores:
            return
        self.promise.set(ready.promise)
        if self.call.inputs:
            self.runner.metrics.held(ready.ready_s - self.call.arrived_s)
        self._task = asyncio.create_task(self._run(ready), name=f"call-{self.call.call_id}")
        self.runner.tasks.add(self._task)
        self._task.add_done_callback(self.runner.tasks.discard)

    def on_refined(self, promise: Promise) -> None:
        self.promise.set(promise)

    def on_broken(self, error: PlaitError) -> None:
        """The call ended for a reason outside it: an input failed, it was cancelled, or its session ended."""
        self._fail(_cause_of(error), _problem(error), error)
        if self._task is not None:
            self._task.cancel()

    def unless_watched(self, request: ChatRequest | CompletionRequest) -> ChatRequest | CompletionRequest:
        """A request for a stream. Its engine need not hurry with each token if no getter streams the next output."""
        return request if self.session.streaming(self.call.output) else unhurried(request)

    async def generate(self, asked: Asked, sink: Sink) -> Generated:
        """Deliver a call whose text becomes the next output's value. Raises `BrokenCallError` or `PlaitError`."""
        engine_id = await self.deliver(asked, sink)
        output, text = self.call.output, str(self.call.text)
        assert output is not None, "a step is run for each output"
        if self._was_cut and output.must_be_whole:
            cut = "the text was cut at its length limit"
            raise BrokenCallError(FailureCause(engine=engine_id, message=cut), cut)
        if (wrong := self.call.text_problem) is not None:
            raise BrokenCallError(FailureCause(engine=engine_id, message=wrong.message), _problem(wrong))
        try:
            off_loop = output.transform is not None and len(text) > OFF_LOOP_BYTES
            value = await asyncio.to_thread(output.value, text) if off_loop else output.value(text)
            self.runner.executor.produce(
                self.call, value, loop_time_s(), was_cut=self._was_cut, answer=self.kept_answer()
            )
        except (TransformError, ValueTooLargeError) as error:
            step = error.step if isinstance(error, TransformError) else None
            cause = FailureCause(engine=engine_id, transform=step, message=error.message)
            raise BrokenCallError(cause, _problem(error)) from error
        return Generated(engine_id, text, value)

    async def deliver(self, asked: Asked, sink: Sink) -> str:
        """Deliver the call until an engine answers it in full; return that engine's id.

        The relay retries a call that has no byte of its answer. If the answer breaks off later, the call starts anew,
        on another engine if there is one. It is started at most `max_attempts` times, also across restarts of the
        gateway, and not again once a client has seen a part of its answer. Raises `BrokenCallError` or `PlaitError`.
        """
        self.promise.begin(asked)
        try:
            failed = list[Ending]()
            while True:
                try:
                    tried = await self._attempt(sink, failed)
                except NoEngineError as error:
                    if failed:
                        raise _broken(failed[-1]) from error
                    raise
                if tried.problem is None:
                    return tried.engine_id
                failed.append(tried)
                if not self._is_begun_anew:
                    raise _broken(tried)
                self.runner.executor.begin_anew(self.call)
                self.runner.metrics.tried_again(asked.call.model, tried.engine_id)
        finally:
            self.promise.end()

    async def _attempt(self, sink: Sink, failed: Sequence[Ending]) -> Ending:
        output = self.call.output
        self.runner.executor.attempt(self.call, loop_time_s())
        if self.call.attempts > 1:  # so that the log has counted it, whatever comes
            await self.session.record.settled()
        asked = msgspec.structs.replace(
            self.promise.asked,
            answer_bytes=self.answer_bytes,
            avoids=frozenset([tried.engine_id for tried in failed]),
            output=None if output is None else output.variable,
            inputs_s=self.call.held_s,
            text=None if output is None else TextTap(self._on_text, self.space),
            begins_anew=self._begins_anew,
        )
        self._is_delivered, self._is_begun_anew = True, False
        ending = await self.runner.relay.run(asked, sink)
        self._was_cut = asked.text is not None and asked.text.was_cut
        return ending

    def _begins_anew(self, ending: Ending) -> bool:
        """Whether a delivery that has ended so is followed by another one."""
        broke_off = isinstance(ending.problem, EngineError) and ending.is_told
        attempts = self.runner.executor.sessions.limits.max_attempts
        self._is_begun_anew = broke_off and self.call.attempts < attempts and self.take_back()
        return self._is_begun_anew

    def _on_text(self, text: str) -> None:
        """Raises `PlaitError` if the text cannot become a value any more and nobody reads the rest."""
        self.runner.executor.generated(self.call, text)
        if self.call.text_problem is not None and not self.call.has_reader:
            raise self.call.text_problem

    async def _run(self, ready: ReadyCall) -> None:
        try:
            if self._after is not None:
                await self._after.wait()
            await self.runner.slices.take(self.session.tenant.name)  # a thousand may become ready in one event
            await self.run(ready)
            if not self._has_ended:  # it has its answer; one with outputs has finished with the last
                self._has_ended = True
                if not self.call.outputs:
                    self.runner.executor.finish(self.call, loop_time_s())
        except PlaitError as error:
            self._fail(_cause_of(error), _problem(error), error)
        except BrokenCallError as broken:
            self._fail(broken.cause, broken.problem, broken.error)
        except asyncio.CancelledError:
            stopped = "the gateway has stopped"
            self._fail(FailureCause(message=stopped, transient=True), stopped, GatewayStoppingError())
            raise
        finally:
            if not self._has_ended:  # an unforeseen exception was raised
                unforeseen = EngineError("The call failed because of an internal error of the gateway; see its log.")
                defect = "an internal error of the gateway"
                self._fail(FailureCause(message=defect), defect, unforeseen)
            self._task = None
            self._let_go()

    def _let_go(self) -> None:
        """Refer to the call no more: the call refers to its owner, and nothing is left to the collector."""
        del self.call

    def _fail(self, cause: FailureCause, problem: str, error: PlaitError | None) -> None:
        """Tell the executor that the call has failed, and the clients that have not seen the `error`.

        The log has the `problem`. No effect on a call that has ended.
        """
        if self._has_ended:
            return
        self._has_ended = True
        call = self.call
        self.runner.executor.fail(call, cause, loop_time_s())
        if error is not None:
            self.on_failed(error)
        log.info(
            "chained call",
            request_id=call.call_id,
            path=self.path,
            session=self.session.session_id,
            outputs=[output.variable for output in call.outputs],
            problem=problem,
            held_s=call.held_s and round(call.held_s, 4),
        )
        if self._task is None:
            self._let_go()


def _cause_of(error: PlaitError) -> FailureCause:
    is_transient = not isinstance(error, CallerError) or isinstance(error, LimitError)
    return FailureCause(message=error.message, transient=is_transient)


def _problem(error: PlaitError) -> str:
    """The error as the log has it."""
    return error.logged_message or error.shown_code


def _broken(tried: Ending) -> BrokenCallError:
    engine_id, problem = tried.engine_id, tried.problem
    if isinstance(problem, EngineError):
        cause = FailureCause(engine=engine_id, message=problem.message, transient=True)
        return BrokenCallError(cause, _problem(problem), problem)
    cause = FailureCause(engine=engine_id, message=f"engine {engine_id}: {problem}")
    return BrokenCallError(cause, "the engine's answer gives no value")
