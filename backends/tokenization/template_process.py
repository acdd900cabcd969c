"""A process that renders untrusted chat templates, with limits on time, memory and output.

`template_worker` starts the process, which reads jobs from its standard input. A request's own template is rendered in
a forked child, so that it finds a fresh interpreter and leaves nothing behind. The tokenizer's template, offered by an
engine, is the same in each job. For a short chat it is rendered in this process, which is faster; a rendering beyond
the limits ends the process.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import msgspec

from plait.backends.errors import CallerError, PlaitError, TemplateTimeoutError
from plait.backends.protocol.dialects import ChatForm
from plait.backends.protocol.tokenizer_fingerprint import PROBE_VARIABLES
from plait.backends.tokenization.chat_template import has_transformers, import_transformers
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.tokenizer import Tokenizer

CPU_S: Final = 0.5
"""The CPU time of one rendering. A template of 16 KiB renders 100 messages in 5 ms."""
WALL_S: Final = 10.0
"""How long the answer to one rendering is awaited. A template spends CPU time only, so a rendering that takes longer
waits for the machine: the request is not at fault."""
MEMORY_BYTES: Final = 256 * 2**20
"""The memory that a rendering may add: eight times the largest body."""
MAX_TEXT_BYTES: Final = 32 * 2**20
"""The longest rendered chat: as long as the largest body by default."""

SHORT_BYTES: Final = 64 * 2**10
"""A longer chat is rendered in a child in any case: a client must not end this process for the others."""

LENGTH_BYTES: Final = 8
_SHARE: Final = f"{CPU_S:g} s, {MEMORY_BYTES >> 20} MiB of memory and {MAX_TEXT_BYTES >> 20} MiB of text"
TOO_MUCH: Final = (
    f"The request's 'chat_template' takes more than its share: {_SHARE}. "
    "Make it shorter, or leave it out to use the model's own."
)
OWN_TOO_MUCH: Final = (
    f"The model's chat template takes more than its share: {_SHARE}. An operator who trusts the engine can set "
    "'trust_engine_templates = true' under [server]."
)


class Job(msgspec.Struct, frozen=True):
    """The arguments of `Tokenizer.render_chat`; without `chat_template`, the model's own is rendered.

    A `probe` has those of `render_probe` or `render_requested` instead, with a fixed date.
    """

    messages: list[dict[str, Any]]
    chat_template: str | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] | None = None
    form: ChatForm = "vllm"
    probe: Literal["given", "requested"] | None = None

    @property
    def param(self) -> str:
        return "messages" if self.chat_template is None else "chat_template"

    @property
    def too_much(self) -> str:
        """The message for a template that exceeds the limits."""
        return OWN_TOO_MUCH if self.chat_template is None else TOO_MUCH


class Rendered(msgspec.Struct, frozen=True):
    """The text of a chat, or the error with its `status`: 503 for a rendering that had too little CPU time."""

    text: str | None = None
    refusal: str = ""
    status: int = 400


def serve(tokenizer: Tokenizer, jobs: BinaryIO, answers: BinaryIO) -> None:
    """Answer jobs until there are no more."""
    gc.freeze()  # so that garbage collections in children do not copy the loaded pages
    _limit_memory()
    while length := jobs.read(LENGTH_BYTES):
        frame = jobs.read(int.from_bytes(length, "big"))
        job = msgspec.json.decode(frame, type=Job)
        is_short = job.chat_template is None and len(frame) <= SHORT_BYTES
        answer = _here(tokenizer, job) if is_short else _in_child(tokenizer, job)
        answers.write(len(answer).to_bytes(LENGTH_BYTES, "big") + answer)
        answers.flush()


def _here(tokenizer: Tokenizer, job: Job) -> bytes:
    """The answer by this process, which ends if the rendering takes too long."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        return msgspec.json.encode(_rendered(tokenizer, job))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _in_child(tokenizer: Tokenizer, job: Job) -> bytes:
    """The answer by a child. A child that ends without one has exceeded a limit."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(tokenizer, job, writing)
    os.close(writing)
    try:
        return _read_all(reading, time.monotonic() + WALL_S) or msgspec.json.encode(Rendered())
    except TimeoutError:
        return msgspec.json.encode(Rendered(status=TemplateTimeoutError.status))
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _answer(tokenizer: Tokenizer, job: Job, writing: int) -> None:
    """Render in the child, write the answer, and end. Whatever goes wrong, only the child ends."""
    try:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # ends the process; RLIMIT_CPU knows whole seconds only
        resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
        answer = msgspec.json.encode(_rendered(tokenizer, job))
        if len(answer) <= MAX_TEXT_BYTES:
            with open(writing, "wb") as pipe:
                pipe.write(answer)
    finally:
        os._exit(0)


def _rendered(tokenizer: Tokenizer, job: Job) -> Rendered:
    try:
        text = _text(tokenizer, job)
        return Rendered(text) if len(text) <= MAX_TEXT_BYTES else Rendered()
    except MemoryError:
        return Rendered()
    except PlaitError as error:
        return Rendered(refusal=error.message[:1_000], status=error.status)


def _text(tokenizer: Tokenizer, job: Job) -> str:
    if job.probe is not None:
        render = tokenizer.render_probe if job.probe == "given" else tokenizer.render_requested
        text = render(job.messages, job.tools, PROBE_VARIABLES)
        if text is None:
            raise CallerError("The chat template refuses a probe.")
        return text
    arguments = msgspec.structs.asdict(job)
    del arguments["probe"]
    return tokenizer.render_chat(arguments.pop("messages"), **arguments)


def _limit_memory() -> None:
    """Limit this process and its children to the memory in use now and `MEMORY_BYTES` more."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


def _read_all(reading: int, deadline_s: float) -> bytes:
    """The bytes until the end of the pipe. Raises `TimeoutError`."""
    pieces: list[bytes] = []
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise TimeoutError
        piece = os.read(reading, 1 << 20)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)


def main() -> None:
    """Serve the tokenizer that the arguments name: its specification, and a path of a template or nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which then closes the pipe
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that output of a library is not taken for an answer
    specification, *template = sys.argv[1:]
    if has_transformers():
        import_transformers()  # now, because in a child it would count against the limits
    tokenizer = load_tokenizer(specification, chat_template=template[0] if template else None)
    serve(tokenizer, sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
