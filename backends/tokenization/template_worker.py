"""Renders chat templates of clients and engines in a process of its own, because a template is a program."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO, Final

import msgspec

from plait.backends.errors import CallerError, PlaitError, TemplateTimeoutError, UnsupportedError
from plait.backends.tokenization.template_process import LENGTH_BYTES, WALL_S, Job, Rendered

START_S: Final = 30.0
"""How long the process may take to load the tokenizer."""

MARGIN_S: Final = 1.0
"""How long after `WALL_S` the process counts as broken."""


class TemplateWorker:
    """One process with one tokenizer. Several threads may call it; their jobs run one after the other.

    `specification` and `template_path` are those of `load_tokenizer`. The process starts with the first job, or at
    `start`, and ends with the caller's process.
    """

    def __init__(self, specification: str, template_path: str | None = None) -> None:
        self._command = [sys.executable, "-m", "plait.backends.tokenization.template_process", specification]
        self._command += [] if template_path is None else [template_path]
        self._process: subprocess.Popen[bytes] | None = None
        self._is_new = True
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process, so that the first job does not wait for it."""
        with self._lock:
            self._running()

    def render(self, job: Job) -> str:
        """The rendered chat. Raises `CallerError` for a template that fails or exceeds the limits.

        Raises `TemplateTimeoutError` if the machine gave the process too little time.
        """
        frame = msgspec.json.encode(job)
        with self._lock:
            process = self._running()
            wait_s = WALL_S + MARGIN_S + (START_S if self._is_new else 0.0)
            try:
                answer = _exchange(process, frame, time.monotonic() + wait_s)
            except OSError as error:
                process.kill()
                ended = process.wait()
                if ended == -signal.SIGPROF:
                    raise CallerError(job.too_much, param=job.param) from error
                if isinstance(error, TimeoutError):
                    raise TemplateTimeoutError from error
                raise PlaitError("The process that renders chat templates failed. Try again.") from error
            self._is_new = False
        rendered = msgspec.json.decode(answer, type=Rendered)
        if rendered.text is not None:
            return rendered.text
        if rendered.status == TemplateTimeoutError.status:
            raise TemplateTimeoutError
        kind = UnsupportedError if rendered.status == UnsupportedError.status else CallerError
        raise kind(rendered.refusal or job.too_much, param=job.param)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
            self._is_new = True
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(BrokenPipeError):  # the pipe may still have a job that the process did not read
                self._process.communicate()


def _exchange(process: subprocess.Popen[bytes], frame: bytes, deadline_s: float) -> bytes:
    """Send a job, read its answer. Raises `OSError` if the process has ended or does not answer in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
    process.stdin.flush()
    if not select.select([process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
        raise TimeoutError("no answer")
    return _read(process.stdout, int.from_bytes(_read(process.stdout, LENGTH_BYTES), "big"))


def _read(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise ConnectionError("the process has ended")
    return data
