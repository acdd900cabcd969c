"""A call of a session as its executor sees it: what it takes, what it makes, and whom to tell about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from plait.backends.errors import PlaitError
from plait.gateway.transforms import Transform
from plait.policy.programs.variable_prefix import NO_OUTLINE, Outline
from plait.policy.types import Objective, Slo, TaskGroup


@dataclass(frozen=True, slots=True)
class Output:
    """A variable that a call gives its value, and what is made of the completion on the way; None: nothing."""

    variable: str
    transform: Transform | None = None

    def value(self, text: str) -> str:
        """The variable's value for a completion's text; raises `TransformError`."""
        return text if self.transform is None else self.transform.apply(text)


@dataclass(frozen=True, slots=True)
class ReadyCall:
    """What a call runs with: its inputs' values and what it is promised, from `ready_s` on (docs/design/clocks.md).

    `group` is the task group that it is placed with.
    """

    values: Mapping[str, str]
    ready_s: float
    slo: Slo | None = None
    objective: Objective | None = None
    group: TaskGroup | None = None


class CallOwner(Protocol):
    """Whoever runs a call. Each method is called once at most, and may call the executor in turn."""

    def on_ready(self, ready: ReadyCall) -> None:
        """The call's inputs have values: it may be started."""

    def on_broken(self, error: PlaitError) -> None:
        """The call has ended, whatever it was doing: an input failed, it was cancelled, or its session ended."""


@dataclass(slots=True, eq=False)
class HeldCall:
    """One call. `outputs` are in the order in which it makes them; `slo` and `objective` are its own annotations.

    `prompt_tokens`, without its inputs, and `output_tokens` (None: not limited) are guesses that weigh it against
    others; `outline` is what is known of its prompt until it has ended. `held_bytes` is what it keeps in memory;
    `fingerprint` is equal for a request and its repetition, None if it may not be repeated. `clients` have asked for it
    and are there; `pieces` are the current output's text so far.
    """

    call_id: str
    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    owner: CallOwner
    model: str = ""
    slo: Slo | None = None
    objective: Objective | None = None
    prompt_tokens: int = 0
    output_tokens: int | None = None
    outline: Outline = NO_OUTLINE
    held_bytes: int = 0
    fingerprint: bytes | None = None
    clients: int = 1
    arrived_s: float = 0.0
    ready_s: float | None = None
    predicted_s: float = 0.0
    produced: int = 0
    pieces: list[str] = field(default_factory=list)

    @property
    def output(self) -> Output | None:
        """What it makes now, or will next."""
        return self.outputs[self.produced] if self.produced < len(self.outputs) else None

    @property
    def text(self) -> str:
        """The current output's text so far."""
        return "".join(self.pieces)
