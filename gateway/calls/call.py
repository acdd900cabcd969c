"""The records of a call: `Asked` (the request), `Attempt`, `Answer` and `Ending`. A `Delivery` has them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, Protocol

import msgspec

from plait.backends.errors import EngineError
from plait.gateway.answers.completion_text import TextTap
from plait.gateway.answers.completions import COMPLETION, UNKNOWN, AnswerForm, UsageBounds
from plait.gateway.asgi import Headers, Nowhere, Sink
from plait.gateway.calls.outgoing import EngineBody
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.intake.agents import NOBODY, Agent
from plait.policy.types import Call

CLIENT_CLOSED: Final = 499
"""The status of a call whose client disconnected before the answer (nginx's code)."""

DEFECT: Final = "internal_error"
"""The code of the gateway's own defects."""

NOWHERE: Final = Nowhere()

Outcome = Literal["ok", "refused", "failed", "no_engine", "client_gone", "defect"]
"""How a call or an attempt ended. `refused`: by the engine or by the gateway. `defect`: a bug of the gateway."""


class BufferedBytes(Protocol):
    """A limit on the bytes that are buffered for calls."""

    def hold(self, size_bytes: int) -> None:
        """Add to the count. Raises `PlaitError` beyond the limit."""

    def free(self, size_bytes: int) -> None: ...


class Slot(msgspec.Struct, frozen=True, eq=False):
    """What a guest has to do with a call that it makes itself. A client's own call has `NO_SLOT`."""

    handle: str | None = None
    """Names the call in messages to the engine that change the call's objectives. None: they cannot change."""

    continues_on: str | None = None
    """The engine that ran the previous step, and so has the context of this one in its cache; None: no such step."""

    text: TextTap | None = None
    """Reads the completion's text on its way to the client. The variable named by `output` gets the text."""

    answer_bytes: BufferedBytes | None = None
    """An extra limit that the bytes of an unstreamed answer count against while they arrive."""

    begins_anew: Callable[[Ending], bool] | None = None
    """Called once, when a delivery ends. True: the call is delivered again, so metrics and log do not count it yet."""

    output: str | None = None
    """The semantic variable that gets the completion's text."""

    inputs_s: float | None = None
    """Seconds that the call of a program waited for its inputs."""

    made_by: tuple[str, ...] = ()
    """The calls that made these inputs."""

    program: str = ""
    """Names the program to operators: a digest of its tenant and session."""


NO_SLOT: Final = Slot()


class Asked(msgspec.Struct, frozen=True, eq=False):
    """One call as the client wants it. A program's call is retried with the same record."""

    call: Call
    """The call as policies see it, with the objectives that it arrived with."""

    path: str
    """The HTTP path of the request, here and at the engine."""

    headers: Headers
    """The client's headers."""

    body: EngineBody
    """Makes the body for the engine that gets the call."""

    session: str | None = None
    """Id of the session whose variables the call reads and sets. The answer's header `plait-session` has it."""

    slot: Slot = NO_SLOT
    """What a guest that makes the call has to do with it."""

    avoids: frozenset[str] = frozenset()
    """Engines that get the call only if no other engine takes it."""

    tenant: str = ""
    """The tenant's identity."""

    choices: int = 1
    """Number of completions: prompts times `n`."""

    bounds: UsageBounds = UNKNOWN
    """The most tokens that the engine may report."""

    form: AnswerForm = COMPLETION
    """How the answer is read, and how errors are written into it."""

    route: str | None = None
    """The HTTP route that an engine must have to get the call. None: any engine of the model."""

    wants_tier: bool = False
    """Whether the answer has a `service_tier`."""

    wants_receipt: bool = False
    """Whether the answer includes the reasons for the placement."""

    turn_of: str = ""
    """Conversation id: `plait-session`, or the client's own header or field. Empty: none."""

    agent: Agent = NOBODY
    """The agent that has the conversation, if its software names one and there is no `plait-session`."""

    key: str = ""
    """The id of the client's API key; empty: none, or not known any more."""

    is_line: bool = False
    """Whether it is a line of a batch, for which nobody waits."""

    prefer: str | None = None
    """The engine that should get it, if it takes calls; None: any."""

    @property
    def arrived_s(self) -> float:
        """The zero of the call's times: its arrival, or when its inputs had values."""
        return self.call.arrived_s


FINISHES: Final = frozenset(
    (
        "stop", "length", "tool_calls", "function_call", "content_filter", "end_turn", "max_tokens", "stop_sequence",
        "tool_use", "refusal", "pause_turn", "completed", "incomplete",
    )
)  # fmt: skip
"""The finish reasons of chat completions, responses and Anthropic's messages. Metrics show any other as `other`:
engines may send any text."""


def known_finish(finish: str | None) -> str | None:
    return finish if finish is None or finish in FINISHES else "other"


class Answer(msgspec.Struct, eq=False):
    """What the engine of one attempt has answered so far. The attempt's `Exchange` writes it."""

    outcome: Literal["ok", "refused"] | None = None
    """None until the engine has sent the whole answer. The client may still be reading it."""

    status: int = 200
    """The answer's status as the client gets it."""

    usage: CallUsage | None = None
    """The token counts that the engine reported; None: none so far."""

    is_corrected: bool = False
    """Whether `usage` was out of bounds and was clamped."""

    passed_tokens: int = 0
    """The events of a stream with a piece of text that were passed on: most engines send one for each token."""

    finish: str | None = None
    """Why the first choice ended: one of `FINISHES`, or `other`."""

    problem: EngineError | str | None = None
    """What is wrong with the answer: a text if the caller is at fault, an error if the engine is."""


class OpenExchange(Protocol):
    """An attempt's exchange with its engine."""

    def advance(self) -> bool:
        """Forward the bytes that have arrived. Returns whether the client has the whole answer.

        Raises the engine's error, or the sink's.
        """

    def close(self) -> None:
        """Detach from the response and the sink. Aborts the request if the engine's answer has not ended."""

    def keep(self) -> None:
        """Copy the usage and the finish reason of a stream so far into the `Answer`."""

    @property
    def has_last_event(self) -> bool:
        """Whether the client has the last event of a stream. Nothing may be written behind it."""

    def redirect(self, sink: Sink) -> None:
        """Send the answer to this sink instead. Only before its first byte."""


class Attempt(msgspec.Struct, eq=False):
    """A call on one engine."""

    booking: Booking

    answer: Answer

    exchange: OpenExchange | None = None
    """None until the call is sent (or if sending failed), and once the attempt is closed."""

    is_open: bool = True
    """Whether the booking is not yet settled, released or failed."""

    @property
    def engine_id(self) -> str:
        return self.booking.placement.engine_id


class Ending(msgspec.Struct, frozen=True, eq=False):
    """How a call ended, or a request that was refused before it became a call."""

    outcome: Outcome

    status: int
    """The status that the client gets."""

    engine_id: str = ""
    """The engine of the last attempt; empty if the call was never sent."""

    is_told: bool = False
    """Whether the client got any part of an answer."""

    error: BaseException | None = None
    """The error to raise: one that the client has not been sent yet, or a defect."""

    problem: EngineError | str | None = None
    """An `EngineError`: the engine is at fault, and another one may succeed. A text: the caller is at fault. None:
    nobody is known to be. With the outcome `ok`, the engine sent a whole answer, and `Slot.text`, if set, found its
    text."""

    request_id: str = ""

    path: str = ""

    tenant: str = ""
    """Empty if the request failed before its API key was checked."""

    model: str = ""
    """Empty if the request names no model that is served here."""

    code: str | None = None
    """The error's code. None if the client got an engine's answer, or disconnected."""

    message: str | None = None
    """The error's message for the log. None without an error, or if the message may quote a request or an answer."""

    arrived_s: float = 0.0
    """The call's zero (see `Asked.arrived_s`), in seconds of the event loop's clock, as is `ended_s`."""

    ended_s: float = 0.0

    gateway_s: float | None = None
    """How long the call waited for the gateway itself; None: for no time that matters."""
