"""The native steps of a session: collected (`NativeSteps`), watched until their inputs have values, then run.

An `InputWatch` has a stream from the gateway that brings inputs. A `NativeRunner` reads the streams and runs functions,
in threads for a blocking program and in tasks for an asynchronous one. The function's result goes to the gateway in a
request of its own.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from plait.client.collected import BATCH_CALLS, Entry, unique
from plait.client.delivery import PATH, Delivery
from plait.client.errors import AnswerError, ClientError, GetTimeoutError, TemplateError
from plait.client.flow import MAY_PASS, POLL_S, Flow, Request, answered
from plait.client.gets import ProgramStream
from plait.client.native import Failure, Native
from plait.client.transport import AsyncTransport, BlockingTransport
from plait.client.variable import Argument, Scope, Text, own_texts

_VARIABLES = "/variables"
_LONGEST_ERROR = 2000  # characters; what the gateway takes
_IN_VAIN = frozenset({404, 409, 410})
"""Statuses for a value that comes too late: the session has ended, or the variable has a value."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeStep:
    """A native function with a text, or several for a list, for each parameter. `entry` declares the step."""

    native: Native
    arguments: Mapping[str, Text | tuple[Text, ...]]
    inputs: tuple[str, ...]
    output: str
    entry: Entry

    def given(self, values: Mapping[str, str]) -> dict[str, str | list[str]]:
        """The function's arguments: a string for a text, a list of strings for several."""

        def value(text: Text) -> str:
            return text if isinstance(text, str) else values[text.name]

        return {
            name: [value(text) for text in argument] if isinstance(argument, tuple) else value(argument)
            for name, argument in self.arguments.items()
        }

    def reported(self, result: str | Failure, delivery: Delivery) -> Flow[None]:
        """Send the gateway the value, or an error, which fails the output and all that needs it.

        A value that the gateway refuses, such as one that is too large, becomes an error too.
        """
        variable = {"session_id": delivery.session["session"], "semantic_var_id": self.output}
        if isinstance(result, str):
            try:
                yield from answered(Request("POST", _VARIABLES, {**variable, "value": result}), delivery.retries)
            except AnswerError as error:
                if error.status in _IN_VAIN:
                    raise
                result = Failure(f"the result of {self.native.name} was refused: {error.message}", error)
        if isinstance(result, Failure):
            delivery.failures[self.output] = result.error
            told = result.message[:_LONGEST_ERROR].encode(errors="replace").decode()
            yield from answered(Request("POST", _VARIABLES, {**variable, "error": told}), delivery.retries)
        delivery.collected.settle([self.entry])


STREAM_S = 600.0
"""How long one stream waits for inputs. Then the next one begins."""


class Job(NamedTuple):
    """A step whose inputs have values, with the function's arguments."""

    step: NativeStep
    given: dict[str, str | list[str]]


class InputWatch:
    """The steps of one program, and the streams that bring their inputs. No I/O.

    A stream declares the steps too, because it may overtake the program, and a value must not come before its step. A
    gateway takes each step once. `give_back` gets the steps that are left if the gateway does not answer.

    Once no step waits, the stream ends. `last` has the jobs that begin after its end, so that their values can go over
    the stream's connection.
    """

    def __init__(
        self, steps: Iterable[NativeStep], delivery: Delivery, give_back: Callable[[Iterable[NativeStep]], None]
    ) -> None:
        self.delivery = delivery
        self.last: list[Job] = []
        self._open = list(steps)
        self._give_back = give_back
        self._values: dict[str, str] = {}
        self._failures = 0
        self._stream = ProgramStream(STREAM_S)

    def request(self) -> Request:
        self._stream = ProgramStream(STREAM_S)
        inputs = list(dict.fromkeys(name for step in self._open for name in step.inputs))
        body = {
            **self.delivery.session,
            "natives": [step.entry.content for step in self._open],
            "external": inputs,
            "gets": {name: None for name in inputs if name not in self._values},
            "timeout_s": STREAM_S,
            "stream": True,
        }
        return Request("POST", PATH, body, POLL_S)  # the gateway's comments come more often

    def feed(self, line: str) -> list[Job]:
        """The jobs to begin after a line of the stream. Raises `AnswerError` if the stream as a whole has failed.

        A step with a failed or skipped input never runs: the gateway has already failed the step's output.
        """
        news = self._stream.feed(line)
        if news is None:
            return []
        self._failures = 0
        if news.value is not None:
            self._values[news.name] = news.value
            ready = [step for step in self._open if self._values.keys() >= set(step.inputs)]
            self._open = [step for step in self._open if step not in ready]
            jobs = [Job(step, step.given(self._values)) for step in ready]
            if self._open:
                return jobs
            self.last = jobs
        if news.error is not None and not isinstance(news.error, GetTimeoutError):
            self.delivery.collected.settle(step.entry for step in self._open if news.name in step.inputs)
            self._open = [step for step in self._open if news.name not in step.inputs]
        return []

    def pause_after(self, error: ClientError | None) -> float | None:
        """The seconds until the next stream, after one that has ended or failed. None if no stream is needed.

        A refusal is final: the gateway refuses the program for the same reason.
        """
        is_refused = isinstance(error, AnswerError) and error.status is not None and error.status not in MAY_PASS
        is_given_up = is_refused or self.delivery.ended.is_set() or self._failures > self.delivery.retries.most
        if self._open and not is_given_up:
            self._failures += 1
            return self.delivery.retries.pause_s(self._failures - 1)
        self._give_back(self._open)
        self._open = []
        return None


_THREADS = 32
"""How many functions of a client run in threads at once. A thread mostly waits for the request that sends its value."""
_LAST_S = 5.0
"""How long a closing client waits for a stream's end. A session's end ends its streams at once."""


class NativeRunner:
    """Runs native steps: a thread or task for each watch, and tasks or a pool of threads for functions."""

    def __init__(self, blocking: BlockingTransport, asynchronous: AsyncTransport) -> None:
        self._blocking = blocking
        self._asynchronous = asynchronous
        self._functions = ThreadPoolExecutor(_THREADS, "plait-native")
        self._watches: set[threading.Thread] = set()
        self._closed = threading.Event()

    def start(self, watch: InputWatch) -> None:
        """Watch in a thread of the client's own."""
        thread = threading.Thread(target=self._watch, args=(watch,), name="plait-watch", daemon=True)
        self._watches.add(thread)
        thread.start()

    async def arun(self, watch: InputWatch) -> None:
        """Watch in this task, until all functions have run."""
        async with asyncio.TaskGroup() as functions:
            pause_s: float | None = 0.0
            while pause_s is not None:
                await asyncio.sleep(pause_s)
                error = None
                try:
                    async with self._asynchronous.lines(watch.request()) as lines:
                        async for line in lines:
                            for job in watch.feed(line):
                                functions.create_task(self._arun(job, watch.delivery))
                except ClientError as failure:
                    error = failure
                for job in watch.last:
                    functions.create_task(self._arun(job, watch.delivery))
                pause_s = watch.pause_after(error)

    def close(self) -> None:
        """Wait for the functions that run, and drop those that have not begun."""
        self._closed.set()
        for thread in list(self._watches):
            thread.join(_LAST_S)
        self._functions.shutdown(cancel_futures=True)

    def _watch(self, watch: InputWatch) -> None:
        pause_s: float | None = 0.0
        while pause_s is not None and not self._closed.wait(pause_s):
            error = None
            try:
                with self._blocking.lines(watch.request()) as lines:
                    for line in lines:
                        for job in watch.feed(line):
                            self._functions.submit(self._run, job, watch.delivery)
            except ClientError as failure:
                error = failure
            for job in watch.last:
                self._functions.submit(self._run, job, watch.delivery)
            pause_s = watch.pause_after(error)
        self._watches.discard(threading.current_thread())

    def _run(self, job: Job, delivery: Delivery) -> None:
        if not delivery.ended.is_set():
            result = job.step.native.compute(job.given)
            with suppress(ClientError):  # the gateway fails a step that is not computed
                self._blocking.run(job.step.reported(result, delivery))

    async def _arun(self, job: Job, delivery: Delivery) -> None:
        result = await job.step.native.acompute(job.given)
        with suppress(ClientError):
            await self._asynchronous.run(job.step.reported(result, delivery))


_NO_NAME = re.compile(r"[^A-Za-z0-9_]+")


class NativeSteps:
    """Collects steps, and starts to watch their inputs when the program is sent. Several threads may use it."""

    def __init__(self, runner: NativeRunner, delivery: Delivery) -> None:
        self._runner = runner
        self._delivery = delivery
        self._new: deque[NativeStep] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_starting = False

    def add(self, session: Scope, native: Native, arguments: Mapping[str, Argument]) -> str:
        """Collect a step; returns its output.

        Constant texts do not go to the gateway. But without any variable, they become the inputs to wait for. Raises
        `TemplateError` for arguments that are not texts of this session.
        """
        collected = self._delivery.collected
        lists = {name: own_texts(session, given, f"{native.name}: {name}") for name, given in arguments.items()}
        texts = [text for given in lists.values() for text in given]
        if not texts:
            raise TemplateError(f"{native.name} gets no text, so it has nothing to wait for: call it yourself")
        inputs = tuple(dict.fromkeys(text.name for text in texts if not isinstance(text, str)))
        inputs = inputs or tuple(dict.fromkeys(collected.names(texts)))
        output = unique(_NO_NAME.sub("_", native.name))
        made = collected.call(native.name, native.body(inputs, output), inputs, [output], "natives")
        if made is not None:
            given = {name: one if isinstance(one, Text) else lists[name] for name, one in arguments.items()}
            self._new.append(NativeStep(native, given, inputs, output, made))
        return output

    def start(self) -> None:
        """The program is about to be sent: watch the inputs of the new steps, and run each in the background."""
        for watch in self._watches():
            self._runner.start(watch)

    def astart(self) -> None:
        """`start` in an event loop. The steps of one turn of the loop are watched together."""
        if self._new and not self._is_starting:
            self._is_starting = True
            task = asyncio.get_running_loop().create_task(self._arun())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def end(self) -> None:
        """The session ends: no further function begins in a thread, and tasks are cancelled."""
        self._delivery.ended.set()
        for task in list(self._tasks):
            if not task.get_loop().is_closed():
                task.get_loop().call_soon_threadsafe(task.cancel)

    async def aend(self) -> None:
        """`end`, and wait for the tasks."""
        self.end()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _arun(self) -> None:
        self._is_starting = False
        await asyncio.gather(*map(self._runner.arun, self._watches()))

    def _watches(self) -> Iterator[InputWatch]:
        """The new steps that were not refused, in parts that fit into a request."""
        steps: list[NativeStep] = []
        with suppress(IndexError):
            while True:  # until empty: other threads take steps at the same time
                steps.append(self._new.popleft())
        steps = [step for step in steps if self._delivery.collected.refusal(step.output) is None]
        for first in range(0, len(steps), BATCH_CALLS):
            part = steps[first : first + BATCH_CALLS]
            yield InputWatch(part, self._delivery, self._new.extend)
