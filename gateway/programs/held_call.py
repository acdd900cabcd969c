"""A call of a session as the executor sees it: inputs, outputs, the owner that runs it, and what it is promised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from plait.backends.errors import PlaitError
from plait.gateway.programs.condition import Condition
from plait.policy.types import Objective, Slo, TaskGroup

PIECES_PER_BLOCK = 1024
"""So many pieces are joined into one. A short string takes about 50 bytes more than its text."""


class GrowingText:
    """A text that only grows. `characters` and `size_bytes` (of UTF-8) are its length so far."""

    __slots__ = ("_blocks", "_pieces", "characters", "size_bytes")

    def __init__(self) -> None:
        self.characters = 0
        self.size_bytes = 0
        self._blocks: list[str] = []
        self._pieces: list[str] = []

    def add(self, text: str) -> int:
        size_bytes = utf8_bytes(text)
        self.characters += len(text)
        self.size_bytes += size_bytes
        self._pieces.append(text)
        if len(self._pieces) == PIECES_PER_BLOCK:
            self._blocks.append("".join(self._pieces))
            self._pieces.clear()
        return size_bytes

    def since(self, start: int) -> str:
        """The text from character `start` on. It costs as much as there are pieces from there on."""
        found, begins = list[str](), self.characters
        for parts in (self._pieces, self._blocks):
            for part in reversed(parts):
                if begins <= start:
                    break
                found.append(part)
                begins -= len(part)
        text = "".join(reversed(found))
        return text[start - begins :] if begins < start else text

    def __str__(self) -> str:
        return "".join([*self._blocks, *self._pieces])


def utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


class ValueTransform(Protocol):
    """Turns a completion's text into a variable's value (`plait.gateway.transforms`)."""

    def apply(self, text: str, /) -> str:
        """The value; raises `TransformError`."""


@dataclass(frozen=True, slots=True)
class Output:
    """A variable that a call produces. `transform` turns the completion's text into its value (None: no change).

    With `must_be_whole`, a text that ended at its length limit fails the variable.
    """

    variable: str
    transform: ValueTransform | None = None
    must_be_whole: bool = False

    def value(self, text: str) -> str:
        """The variable's value for a completion's text; raises `TransformError`."""
        return text if self.transform is None else self.transform.apply(text)


class KeptRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request as it is stored, so that its call can be made again. `headers` have no keys of clients."""

    kind: Literal["submission", "answered", "native", "response"]
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Made(msgspec.Struct, frozen=True):
    """How a value was made. The job began at `begun_s`, with the first call that the value needed.

    `was_cut` is True if the text ended at its length limit.
    """

    begun_s: float
    was_cut: bool


class Promise(msgspec.Struct, frozen=True):
    """What a call that may run is promised: its SLO, its objective, and the task group that it is placed with.

    The SLO's times count from `since_s`: when the call was ready, or when a later get or call changed its objective.
    """

    slo: Slo | None
    objective: Objective | None
    group: TaskGroup | None
    since_s: float

    def slo_from(self, zero_s: float) -> Slo | None:
        return None if self.slo is None else self.slo.from_zero(self.since_s - zero_s)


class ReadyCall(msgspec.Struct, frozen=True):
    """A ready call's input values and its objectives, whose times count from `ready_s` (docs/design/clocks.md).

    `group` is the task group that it is placed with.
    """

    values: Mapping[str, str]
    ready_s: float
    slo: Slo | None = None
    objective: Objective | None = None
    group: TaskGroup | None = None

    @property
    def promise(self) -> Promise:
        return Promise(self.slo, self.objective, self.group, self.ready_s)


class CallOwner(Protocol):
    """The owner runs a call. Each method may call the executor. Only `on_refined` is called more than once."""

    def on_ready(self, ready: ReadyCall) -> None:
        """The call's inputs have values: it may be started."""

    def on_refined(self, promise: Promise) -> None:
        """A later get or call has changed the objectives of the call, which was ready before and has not ended."""

    def on_broken(self, error: PlaitError) -> None:
        """The call was ended in whatever state it was: an input failed, it was cancelled, or its session ended."""


def with_condition(inputs: tuple[str, ...], when: Condition | None) -> tuple[str, ...]:
    """The variables that a call waits for: its inputs and the variable of its condition."""
    return inputs if when is None else tuple(dict.fromkeys((*inputs, when.variable)))


@dataclass(slots=True, eq=False)
class HeldCall:
    """One call of a session, until it has ended."""

    call_id: str
    inputs: tuple[str, ...]

    outputs: tuple[Output, ...]
    """In the order in which it produces them."""

    owner: CallOwner
    model: str = ""

    variables: tuple[str, ...] = field(init=False)
    """That it produces, in order."""

    when: Condition | None = None
    """The call is skipped if this does not hold. Its variable is one of the inputs."""

    slo: Slo | None = None
    """Its own annotation, not a deduced one."""

    objective: Objective | None = None
    """Its own annotation, not a deduced one."""

    prompt_tokens: int = 0
    """Without the inputs; a guess, for `predicted_s`."""

    output_tokens: int | None = None
    """The output limit, for `predicted_s`; None: no limit."""

    native_s: float | None = None
    """The time that a native step takes its client; None: an engine computes the call."""

    held_bytes: int = 0
    """The memory that the call holds."""

    fingerprint: bytes | None = None
    """Equal for a request and its repetition; None if the request may not be repeated."""

    request: Callable[[], KeptRequest] | None = None
    """What the call can be made from again, until it is added; None if it need not be."""

    is_recorded: bool = False
    """Whether it was written to the session's record."""

    attempts: int = 0
    """How often it was given to engines for its next output."""

    clients: int = 1
    """Clients that wait for the call."""

    absent: int = 0
    """Clients that have gone and may come back."""

    is_answered: bool = False
    """Whether its clients get its answer, and not only its outputs."""

    arrived_s: float = 0.0

    ready_s: float | None = None
    """When its inputs had values; None: they have none yet."""

    predicted_s: float = 0.0
    """How long it is expected to run."""

    in_group_s: float = 0.0
    """How long it is expected to run if it is a call of a task group."""

    produced: int = 0
    """How many of its outputs it has produced."""

    text: GrowingText = field(default_factory=GrowingText)
    """The current output's text so far."""

    text_problem: PlaitError | None = None
    """Why the text cannot become a value; it is given up then."""

    promise: Promise | None = None
    """What it runs with; None: it may not run yet."""

    def __post_init__(self) -> None:
        self.variables = tuple([output.variable for output in self.outputs])

    @property
    def output(self) -> Output | None:
        """The output that it produces now or next; None after the last."""
        return self.outputs[self.produced] if self.produced < len(self.outputs) else None

    @property
    def held_s(self) -> float | None:
        """Seconds from its arrival until its inputs had values; None if they have none yet."""
        return None if self.ready_s is None else self.ready_s - self.arrived_s

    @property
    def is_native(self) -> bool:
        """Whether the client computes the output, and no engine."""
        return self.native_s is not None

    @property
    def has_reader(self) -> bool:
        """Whether a client is there that reads the answer, and not only the outputs."""
        return self.is_answered and self.clients > 0

    def mark_recorded(self) -> None:
        self.is_recorded = True

    def add_client(self) -> None:
        self.clients += 1

    def leave(self, *, may_return: bool) -> None:
        """One client has gone. Until `give_up` it may return."""
        self.clients -= 1
        self.absent += may_return

    def give_up(self) -> None:
        self.absent -= 1

    def tell(self, ready: ReadyCall, now_s: float) -> None:
        """Tell the owner that the call may run. If it was told before, tell it of changed objectives.

        A changed SLO counts from now: nothing can be promised for the time before. A call stays in the group that it
        ran with, unless it is in another now.
        """
        before, self.promise = self.promise, ready.promise
        if before is None:
            self.owner.on_ready(ready)
            return
        since_s = before.since_s if before.slo == ready.slo else now_s
        self.promise = Promise(ready.slo, ready.objective, ready.group or before.group, since_s)
        if self.promise != before:
            self.owner.on_refined(self.promise)

    def forget_text(self) -> int:
        """Forget the current output's text; returns its bytes. Getters that stream it may still read it."""
        size_bytes = self.text.size_bytes
        if size_bytes:
            self.text = GrowingText()
        return size_bytes
