"""A call of a session as the executor sees it: inputs, outputs, the owner that runs it, and what it is promised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from plait.backends.errors import PlaitError
from plait.gateway.calls.condition import Condition
from plait.policy.types import Objective, Slo, TaskGroup

PIECES_PER_BLOCK = 1024
"""Pieces are joined in blocks of this many, because a short string takes about 50 bytes more than its text."""


class GrowingText:
    """An append-only text. `characters` and `size_bytes` (of UTF-8) are its length so far."""

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
        """The text from character `start` on, in time linear in the pieces from there on."""
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
    """Turns a completion's text into a variable's value (`plait.gateway.guests.programs.transforms`)."""

    def apply(self, text: str, /) -> str:
        """The value; raises `TransformError`."""


@dataclass(frozen=True, slots=True)
class Output:
    """A variable that a call produces. `transform` turns the completion's text into its value (None: no change).

    With `must_be_whole`, a text that was cut at the output limit fails the variable.
    """

    variable: str
    transform: ValueTransform | None = None
    must_be_whole: bool = False

    def value(self, text: str) -> str:
        """The value of a completion's text. Raises `TransformError`."""
        return text if self.transform is None else self.transform.apply(text)


class KeptRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request as the log has it, so that a replay can make its call. `headers` are without API keys."""

    kind: Literal["submission", "answered", "native", "response"]
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Made(msgspec.Struct, frozen=True):
    """How a call made a value."""

    begun_s: float
    """When the job began: the earliest arrival of the calls that the value depends on."""
    was_cut: bool
    """Whether the text ended at the output limit."""


class Promise(msgspec.Struct, frozen=True):
    """The SLO, the objective and the task group of a call that may run."""

    slo: Slo | None
    objective: Objective | None
    group: TaskGroup | None
    since_s: float
    """The zero of the SLO's times: when the call was ready, or when a later get or call changed its objective."""


class ReadyCall(msgspec.Struct, frozen=True):
    """A ready call's input values and objectives. The SLO's times count from `ready_s` (docs/design/clocks.md)."""

    values: Mapping[str, str]
    ready_s: float
    slo: Slo | None = None
    objective: Objective | None = None
    group: TaskGroup | None = None

    @property
    def promise(self) -> Promise:
        return Promise(self.slo, self.objective, self.group, self.ready_s)


class CallOwner(Protocol):
    """The shell that runs a call. Each method may call the executor. Only `on_refined` is called more than once."""

    def on_ready(self, ready: ReadyCall) -> None:
        """The call's inputs have values: the call may be started."""

    def on_refined(self, promise: Promise) -> None:
        """A later get or call has changed the objectives of a call for which `on_ready` was called."""

    def on_broken(self, error: PlaitError) -> None:
        """The call was ended, in any state: an input failed, it was cancelled or skipped, or its session ended."""


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
    """The names of `outputs`."""

    when: Condition | None = None
    """The call is skipped unless this holds. Its variable is one of the inputs."""

    slo: Slo | None = None
    """The client's annotation; a deduced SLO is in `promise`."""

    objective: Objective | None = None
    """The client's annotation; a deduced objective is in `promise`."""

    prompt_tokens: int = 0
    """A guess, without the inputs, for `predicted_s`."""

    output_tokens: int | None = None
    """The output limit, for `predicted_s`; None: no limit."""

    native_s: float | None = None
    """The declared duration of a native step at its client; None: an engine computes the call."""

    held_bytes: int = 0
    """The bytes of the body and the filled prompt, which count against the tenant's limit."""

    fingerprint: bytes | None = None
    """A digest that a repetition of the request shares; None if repetitions are not recognized."""

    request: Callable[[], KeptRequest] | None = None
    """Makes the request for the log. None once the call is added, or if it need not be logged."""

    is_recorded: bool = False
    """Whether the call is in the session's log."""

    attempts: int = 0
    """How often the current output was sent to engines."""

    clients: int = 1
    """Connected clients that wait for the call."""

    absent: int = 0
    """Disconnected clients in their grace period."""

    is_answered: bool = False
    """Whether clients get the call's answer, and not only its outputs."""

    arrived_s: float = 0.0

    ready_s: float | None = None
    """When all inputs had values."""

    predicted_s: float = 0.0
    """The predicted duration, alone on an engine."""

    in_group_s: float = 0.0
    """The predicted duration as a call of a task group."""

    produced: int = 0
    """The number of outputs that have values."""

    text: GrowingText = field(default_factory=GrowingText)
    """The current output's text so far."""

    text_problem: PlaitError | None = None
    """Why the text was discarded and cannot become a value."""

    promise: Promise | None = None
    """Set when the call may run."""

    def __post_init__(self) -> None:
        self.variables = tuple([output.variable for output in self.outputs])

    @property
    def output(self) -> Output | None:
        """The output that the call produces now or next; None after the last."""
        return self.outputs[self.produced] if self.produced < len(self.outputs) else None

    @property
    def held_s(self) -> float | None:
        """Seconds from arrival until all inputs had values; None before."""
        return None if self.ready_s is None else self.ready_s - self.arrived_s

    @property
    def is_native(self) -> bool:
        """Whether the client computes the output instead of an engine."""
        return self.native_s is not None

    @property
    def has_reader(self) -> bool:
        """Whether a connected client reads the answer, and not only the outputs."""
        return self.is_answered and self.clients > 0

    def mark_recorded(self) -> None:
        self.is_recorded = True

    def add_client(self) -> None:
        self.clients += 1

    def leave(self, *, may_return: bool) -> None:
        """One client has disconnected. With `may_return`, the call waits for it until `give_up`."""
        self.clients -= 1
        self.absent += may_return

    def give_up(self) -> None:
        self.absent -= 1

    def tell(self, ready: ReadyCall, now_s: float) -> None:
        """Call the owner's `on_ready`, or if the call may run already, `on_refined` if its objectives changed.

        A changed SLO counts from now: the time before passed without it. A call keeps its task group unless it has a
        new one, because it was placed with that group.
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
        """Discard the current output's text, and return its bytes. Getters that stream it keep the old object."""
        size_bytes = self.text.size_bytes
        if size_bytes:
            self.text = GrowingText()
        return size_bytes
