"""The native steps of a session, from when the program makes them until they run."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress

from plait.client import entry
from plait.client.collected import unique
from plait.client.delivery import Delivery
from plait.client.errors import TemplateError
from plait.client.input_watch import InputWatch
from plait.client.native import Native
from plait.client.native_runner import NativeRunner
from plait.client.native_step import NativeStep
from plait.client.variable import Argument, Scope, Text, own_texts

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

        Texts go to the function, not to the gateway, unless there is no variable to wait for. Raises `TemplateError`
        for arguments that are not texts of this session.
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
        """The session ends: no function begins any more in a thread, and what runs in tasks is cancelled."""
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
            while True:  # other threads may take some too
                steps.append(self._new.popleft())
        steps = [step for step in steps if self._delivery.collected.refusal(step.output) is None]
        for first in range(0, len(steps), entry.BATCH_CALLS):
            part = steps[first : first + entry.BATCH_CALLS]
            yield InputWatch(part, self._delivery, self._new.extend)
