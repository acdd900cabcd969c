"""A call of a session as the executor sees it: inputs, outputs, and the owner that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from plait.backends.errors import PlaitError
from plait.gateway.calls.annotations import Condition
from plait.gateway.programs.growing_text import GrowingText
from plait.gateway.transforms import Transform
from plait.policy.types import Objective, Slo, TaskGroup


@dataclass(frozen=True, slots=True)
class Output:
    """A variable that a call produces. `transform` turns the completion's text into its value (None: no change).

    With `must_be_whole`, a text that ended at its length limit fails the variable.
    """

    variable: str
    transform: Transform | None = None
    must_be_whole: bool = False

    def value(self, text: str) -> str:
        """The variable's value for a completion's text; raises `TransformError`."""
        return text if self.transform is None else self.transform.apply(text)


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
        """The SLO for times that count from `zero_s`."""
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
        """The objectives."""
        return Promise(self.slo, self.objective, self.group, self.ready_s)


class CallOwner(Protocol):
    """The owner runs a call. Each method may call the executor. Only `on_refined` is called more than once."""

    def on_ready(self, ready: ReadyCall) -> None:
        """The call's inputs have values: it may be started."""

    def on_refined(self, promise: Promise) -> None:
        """A later get or call has changed the objectives of the call, which was ready before and has not ended."""

    def on_broken(self, error: PlaitError) -> None:
        """The call was ended in whatever state it was: an input failed, it was cancelled, or its session ended."""


@dataclass(slots=True, eq=False)
class HeldCall:
    """One call. `outputs` are in the order in which it produces them. `slo` and `objective` are its own annotations.
    It is skipped if the condition `when` does not hold, whose variable is one of `inputs`.

    `prompt_tokens` (without the inputs) is a guess and `output_tokens` is the output limit (None: no limit); they are
    used for `predicted_s`. `held_bytes` is the memory that the call holds. `fingerprint` is equal for a request and its
    repetition; None if the request may not be repeated. `clients` counts the clients that wait for the call, `absent`
    those that have gone and may come back. With `is_answered` they get its answer, otherwise only its outputs. `text`
    is the current output's text so far. It is given up if it cannot become a value, because of `text_problem`.
    `native_s` is the time that a native step takes its client (None: the call is no native step). `promise` is what it
    runs with (None: it may not run yet).
    """

    call_id: str
    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    owner: CallOwner
    model: str = ""
    when: Condition | None = None
    slo: Slo | None = None
    objective: Objective | None = None
    prompt_tokens: int = 0
    output_tokens: int | None = None
    native_s: float | None = None
    held_bytes: int = 0
    fingerprint: bytes | None = None
    clients: int = 1
    absent: int = 0
    is_answered: bool = False
    arrived_s: float = 0.0
    ready_s: float | None = None
    predicted_s: float = 0.0
    produced: int = 0
    text: GrowingText = field(default_factory=GrowingText)
    text_problem: PlaitError | None = None
    promise: Promise | None = None

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
        text, self.text = self.text, GrowingText()
        return text.size_bytes
