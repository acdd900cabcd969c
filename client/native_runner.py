"""Runs native steps in the background: in threads of blocking programs, in tasks of asynchronous ones."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from plait.client.delivery import Delivery
from plait.client.errors import ClientError
from plait.client.input_watch import InputWatch, Job
from plait.client.transport import AsyncTransport, BlockingTransport

_THREADS = 32
"""The most functions of a client that run in threads at once: most of a thread's time is the request for its value."""
_LAST_S = 5.0
"""How long a closing client waits for a stream to end. The end of a session ends its streams at once."""


class NativeRunner:
    """One thread or task for each watch, and one for each function that runs. Threads that run functions are shared."""

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
        """Wait for the functions that run. Those that have not begun do not run."""
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
