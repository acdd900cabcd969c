"""The owner of a call of a program: it runs the call when the executor says that its inputs have values.

`on_ready` starts a task. The task waits for its slice of the event loop, fills the prompt, and delivers the call by the
relay, once for each output and again if an answer breaks off. Each delivery gets the call's present objectives
(`StandingPromise`). The invariant: the executor learns of each call's end exactly once (`has_ended`), by its last
`produce`, by `finish`, or by `fail`, unless the executor itself has ended the call (`on_broken`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import islice
from math import inf
from typing import ClassVar, Final, NamedTuple

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
from plait.gateway.answers.completion_text import TextTap
from plait.gateway.asgi import Sink
from plait.gateway.calls.call import NOWHERE, Asked, Ending, Slot
from plait.gateway.calls.call_reader import OFF_LOOP_BYTES, CallReader
from plait.gateway.calls.outgoing import unhurried
from plait.gateway.calls.relay import Relay
from plait.gateway.guests.programs.asked_step import AskedStep
from plait.gateway.guests.programs.core.executor import Executor
from plait.gateway.guests.programs.core.held_call import HeldCall, Promise, ReadyCall
from plait.gateway.guests.programs.core.session import Session
from plait.gateway.guests.programs.core.session_errors import FailureCause
from plait.gateway.guests.programs.entrance import Entrance
from plait.gateway.guests.programs.filled_prompts import FilledPrompts, Request
from plait.gateway.guests.programs.metrics import ProgramMetrics
from plait.gateway.guests.programs.recorded_answer import AnswerBytes
from plait.gateway.guests.programs.standing_promise import StandingPromise
from plait.gateway.guests.programs.transforms import TransformError
from plait.gateway.intake.turns import LoopTurns
from plait.gateway.timer import loop_time_s

log = structlog.get_logger(__name__)

THROTTLED_S: Final = 60.0
"""The longest wait of a call for a queue that is full, by its `Retry-After`. Without it, all calls that need the value
would fail for a limit that has passed a second later, and no SDK sends them again.
"""

OF_RATES: Final = frozenset(("calls_per_second", "tokens_per_second"))
"""The codes of limits that a call waits for as long as its program may run. A gateway alone has such calls wait in
order (`Admission`); the leases of several refuse them.
"""

MOMENTARY: Final = OF_RATES | {"too_many_waiting", "overloaded"}
"""The codes of limits that a call waits for."""

MOST_MAKERS: Final = 64
"""A call's receipt and span name at most so many steps that made its inputs."""


@dataclass(frozen=True, slots=True)
class CallRunner:
    """The parts of the gateway that calls of programs use."""

    executor: Executor
    """Decides when a call may run."""

    reader: CallReader
    """Tokenizes prompts."""

    relay: Relay
    """Delivers calls."""

    metrics: ProgramMetrics

    prompts: FilledPrompts
    """Limits the bytes of filled prompts."""

    turns: LoopTurns
    """The time of the event loop for reading, entering and starting calls."""

    entrance: Entrance
    """Serializes the programs that enter sessions."""

    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """The tasks of running calls."""

    handed_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the next gateway takes the durable sessions: their calls are not started here any more."""


class BrokenCallError(Exception):
    """The call ended without its value because of `cause`; `problem` is the text for the log.

    `error` is for clients that have no answer yet.
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


class ChainedCall:
    """Runs one step, whose outputs are read by name. Subclasses have clients that read the answer.

    `path` is the engine's route. `space` is stripped from the beginning of the current output. Without `asked`, the
    step has run in an earlier process, and the caller sets `call`.
    """

    __slots__ = (
        "_after",
        "_asked",
        "_has_ended",
        "_is_begun_anew",
        "_is_delivered",
        "_made",
        "_task",
        "_was_cut",
        "answer_bytes",
        "call",
        "path",
        "promise",
        "runner",
        "session",
        "sink",
        "space",
    )

    is_answered: ClassVar[bool] = False
    """Whether clients get the answer itself."""

    def __init__(self, runner: CallRunner, session: Session, asked: AskedStep | None, path: str = "") -> None:
        self.runner = runner
        self.session = session
        self.path = path if asked is None else asked.prompts.path
        self.space = ""
        self.sink: Sink = NOWHERE
        """Gets the engine's answer."""
        self.call: HeldCall
        self.promise = StandingPromise(runner.relay)
        self.answer_bytes = AnswerBytes(runner.executor.sessions, session)
        self._asked = asked
        self._made: list[tuple[str, str]] = []
        self._after: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_ended = False
        self._is_begun_anew = False
        self._is_delivered = False  # the relay has had the call, so the relay logs its end
        self._was_cut = False
        if asked is not None:
            self.call = asked.held_call(session, self, is_answered=self.is_answered)

    async def run(self, ready: ReadyCall) -> None:
        """Run the step: fill a prompt and generate its output, one after the other.

        Raises `PlaitError` or `BrokenCallError` if an output gets no value.
        """
        asked, self._asked = self._asked, None  # frees the body: a session may keep the call long after it ran
        assert asked is not None, "a call runs once"
        prompts, call, engine_id = asked.prompts, self.call, None
        values, texts = dict(ready.values), [text for text, _ in self._made]
        values |= {output.variable: value for output, (_, value) in zip(prompts.outputs, self._made, strict=False)}
        count = max(1, len(prompts.outputs))
        for number in range(len(texts), count):
            incoming = msgspec.structs.replace(
                asked.incoming,
                path=self.path,
                request_id=_step_id(call.call_id, number),
                arrived_s=loop_time_s() if number else ready.ready_s,
            )
            self.promise.steps_left = count - number
            self.space = prompts.space(number)
            with self.runner.prompts.of(incoming.tenant, call) as prompt:
                unfilled = prompts.unfilled(number, values, texts)
                filled = await prompt.read(incoming, unfilled, asked.annotations, self.adapt)
                if number == 0:
                    self.runner.executor.start(call, loop_time_s())
                if not call.outputs:
                    await self.deliver(filled)
                    return
                here = msgspec.structs.replace(
                    filled, slot=Slot(continues_on=engine_id), session=self.session.session_id
                )
                engine_id, text, values[prompts.outputs[number].variable] = await self.generate(here)
                texts.append(text)

    def adapt(self, request: Request) -> Request:
        """The streaming request; with fewer, larger events (`unhurried`) if no getter streams the current output."""
        return request if self.session.streaming(self.call.output) else unhurried(request)

    def take_back(self) -> bool:
        """Discard the partial answer before a retry. False, and no retry, if a client has seen a part of it.

        Getters that stream an output get an error if the new text differs.
        """
        return True

    def on_failed(self, error: PlaitError) -> None:
        """Nobody waits for the answer: those who wait for outputs get what has failed them."""

    def go_on_after(self, text: str, value: str) -> None:
        """Skip an output that an earlier process has generated: its text, and the value after its transform."""
        self._made.append((text, value))

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def kept_answer(self) -> bytes | None:
        """The body of the answer to clients, to be logged with the value; None: it can be made from the value."""
        return None

    def start_after(self, event: asyncio.Event) -> None:
        self._after = event

    def on_ready(self, ready: ReadyCall) -> None:
        if self.runner.handed_over.is_set() and self.session.record.stores:
            return
        self.promise.set(ready.promise)
        if self.call.inputs:
            self.runner.metrics.held(ready.ready_s - self.call.arrived_s)
        self._task = asyncio.create_task(self._charged(ready), name=f"call-{self.call.call_id}")
        self.runner.tasks.add(self._task)
        self._task.add_done_callback(self.runner.tasks.discard)

    def on_refined(self, promise: Promise) -> None:
        self.promise.set(promise)

    def on_broken(self, error: PlaitError) -> None:
        self._fail(_cause_of(error), _problem(error), error)
        if self._task is not None:
            self._task.cancel()

    async def generate(self, asked: Asked) -> Generated:
        """Deliver the call, and produce the current output from its text. Raises `BrokenCallError` or `PlaitError`."""
        engine_id = await self.deliver(asked)
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

    async def deliver(self, asked: Asked) -> str:
        """Deliver the call until an engine answers in full. Returns that engine's id.

        The relay retries as long as no byte of the answer has come. If an answer breaks off later, this method delivers
        the call anew, on another engine if there is one, unless a client has seen a part of the answer. The limit is
        `max_attempts`, which counts across restarts of the gateway. Raises `BrokenCallError` or `PlaitError`.
        """
        self.promise.begin(asked)
        try:
            failed = list[Ending]()
            while True:
                try:
                    tried = await self._attempt(failed)
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

    async def _attempt(self, failed: Sequence[Ending]) -> Ending:
        output = self.call.output
        self.runner.executor.attempt(self.call, loop_time_s())
        if self.call.attempts > 1:  # a call that crashes the gateway must not run again without limit
            await self.session.record.settled()
        self._is_delivered, self._is_begun_anew = True, False
        until_s, was_refused = loop_time_s() + THROTTLED_S, False
        while True:  # until the tenant's limits allow the call
            promised, text = self.promise.asked, None if output is None else TextTap(self._on_text, self.space)
            slot = msgspec.structs.replace(
                promised.slot,
                text=text,
                answer_bytes=self.answer_bytes,
                begins_anew=partial(self._begins_anew, was_refused),
                output=None if output is None else output.variable,
                inputs_s=self.call.held_s,
                made_by=_makers(self.session, self.call),
                program=_program_id(promised.tenant, self.session.session_id),
            )
            avoids = frozenset([tried.engine_id for tried in failed])
            asked = msgspec.structs.replace(promised, slot=slot, avoids=avoids)
            try:
                ending = await self.runner.relay.run(asked, self.sink)
            except LimitError as error:
                pause_s = error.retry_after_s
                most_s = inf if error.code in OF_RATES else until_s
                if error.code not in MOMENTARY or pause_s is None or loop_time_s() + pause_s > most_s:
                    raise
                was_refused = True
                await asyncio.sleep(pause_s)
            else:
                self._was_cut = text is not None and text.was_cut
                return ending

    def _begins_anew(self, was_refused: bool, ending: Ending) -> bool:
        """Whether another delivery follows the one with this `ending`. The first of several refusals is logged."""
        broke_off = isinstance(ending.problem, EngineError) and ending.is_told
        attempts = self.runner.executor.sessions.limits.max_attempts
        self._is_begun_anew = broke_off and self.call.attempts < attempts and self.take_back()
        return self._is_begun_anew or (was_refused and isinstance(ending.error, LimitError))

    def _on_text(self, text: str) -> None:
        """Raises `PlaitError`, which ends the delivery, if the text is too large and no client reads the answer."""
        self.runner.executor.generated(self.call, text)
        if self.call.text_problem is not None and not self.call.has_reader:
            raise self.call.text_problem

    async def _charged(self, ready: ReadyCall) -> None:
        await self.runner.turns.charged(self.session.tenant.name, self._run(ready))

    async def _run(self, ready: ReadyCall) -> None:
        try:
            if self._after is not None:
                await self._after.wait()
            # One event may make a thousand calls ready.
            await self.runner.turns.take(self.session.tenant.name, may_refuse=False)
            await self.run(ready)
            if not self._has_ended:  # a call with outputs was finished by its last `produce`
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
            if not self._has_ended:  # any other exception is a bug of the gateway
                unforeseen = EngineError("The call failed because of an internal error of the gateway; see its log.")
                defect = "an internal error of the gateway"
                self._fail(FailureCause(message=defect), defect, unforeseen)
            self._task = None
            self._let_go()

    def _let_go(self) -> None:
        """Break the reference cycle with the call, so that the garbage collector has nothing to do."""
        del self.call

    def _fail(self, cause: FailureCause, problem: str, error: PlaitError | None) -> None:
        """Fail the call in the executor, send `error` to its clients, and log the `problem`.

        No effect on a call that has ended.
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


def _step_id(call_id: str, number: int) -> str:
    """The request id of the step that generates a call's output of this number."""
    return f"{call_id}.{number}" if number else call_id


def _makers(session: Session, call: HeldCall) -> tuple[str, ...]:
    """The request ids of the steps that made a call's inputs, without what clients set; none once the session ended."""
    made = [(maker, name) for name in call.inputs if (maker := session.outputs.get(name)) is not None]
    ids = dict.fromkeys(_step_id(maker.call_id, maker.variables.index(name)) for maker, name in made)
    return tuple(islice(ids, MOST_MAKERS))


def _program_id(tenant: str, session_id: str) -> str:
    return blake2b(f"{tenant}\0{session_id}".encode(errors="replace"), digest_size=8).hexdigest()


def _cause_of(error: PlaitError) -> FailureCause:
    is_transient = not isinstance(error, CallerError) or isinstance(error, LimitError)
    return FailureCause(message=error.message, transient=is_transient)


def _problem(error: PlaitError) -> str:
    """The error's text for the log."""
    return error.logged_message or error.shown_code


def _broken(tried: Ending) -> BrokenCallError:
    engine_id, problem = tried.engine_id, tried.problem
    if isinstance(problem, EngineError):
        cause = FailureCause(engine=engine_id, message=problem.message, transient=True)
        return BrokenCallError(cause, _problem(problem), problem)
    cause = FailureCause(engine=engine_id, message=f"engine {engine_id}: {problem}")
    return BrokenCallError(cause, "the engine's answer gives no value")
