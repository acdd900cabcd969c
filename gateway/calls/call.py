"""A call's parts: what is asked, one attempt on an engine, what that has answered, and how the call ended.

`Delivery` puts them together.
"""

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
from plait.policy.types import Call, Margin

CLIENT_CLOSED: Final = 499
"""The status of a call whose client went before its answer, as nginx has it."""

DEFECT: Final = "internal_error"
"""The code of the gateway's own defects."""

NOWHERE: Final = Nowhere()

Outcome = Literal["ok", "refused", "failed", "no_engine", "client_gone", "defect"]
"""How a call, or an attempt, ended. `refused`: by the engine, or here. `defect`: the gateway is at fault."""


class HeldBytes(Protocol):
    """Where bytes count that are held for a call."""

    def hold(self, size_bytes: int) -> None:
        """Count this much more. Raises `PlaitError` beyond the limit."""

    def free(self, size_bytes: int) -> None:
        """Count this much less."""


class Asked(msgspec.Struct, frozen=True, eq=False):
    """One call as the client wants it, which can be delivered more than once."""

    call: Call
    """As policies see it, with the objectives that it arrived with."""

    path: str

    headers: Headers
    """The client's."""

    body: EngineBody

    session: str | None = None
    """The session of a program, which a header of the answer repeats."""

    text: TextTap | None = None
    """Reads the completion's text."""

    answer_bytes: HeldBytes | None = None
    """Where an answer that is not streamed counts while it comes."""

    continues_on: str | None = None
    """The engine that has most of the prompt in its cache."""

    avoids: frozenset[str] = frozenset()
    """Engines that get the call only if there is no other."""

    tenant: str = ""

    choices: int = 1
    """Completions in all."""

    bounds: UsageBounds = UNKNOWN
    """The most tokens that it can use."""

    handle: str | None = None
    """Names a call whose objectives may change on its way."""

    form: AnswerForm = COMPLETION

    route: str | None = None
    """Only engines that have this route may get the call."""

    wants_receipt: bool = False
    """Whether the answer says why the call went where it went."""

    turn_of: str = ""
    """Conversation id: `plait-session`, or the client's own header or field."""

    output: str | None = None
    """The variable that the text becomes."""

    begins_anew: Callable[[Ending], bool] | None = None
    """Asked once, at the end: whether another delivery follows in this one's place, so that the call has not ended."""

    inputs_s: float | None = None
    """The time until its inputs had values."""

    @property
    def arrived_s(self) -> float:
        """The call's times count from here: its arrival, or when its inputs had values."""
        return self.call.arrived_s


FINISHES: Final = frozenset(
    (
        "stop", "length", "tool_calls", "function_call", "content_filter", "end_turn", "max_tokens", "stop_sequence",
        "tool_use", "refusal", "pause_turn", "completed", "incomplete",
    )
)  # fmt: skip
"""Why answers end, in the words of the three APIs. Anything else is `other`: an engine may say what it likes."""


def known_finish(finish: str | None) -> str | None:
    """Why an answer ended, as the gateway tells it."""
    return finish if finish is None or finish in FINISHES else "other"


class Answer(msgspec.Struct, eq=False):
    """An engine's answer to one attempt, as far as it has come. The attempt's exchange writes it."""

    outcome: Literal["ok", "refused"] | None = None
    """Set once the engine has said all; the client may not have it yet."""

    status: int = 200
    """The status that the client gets with it."""

    usage: CallUsage | None = None

    is_corrected: bool = False
    """Whether the engine's usage was out of bounds."""

    finish: str | None = None
    """Why the first choice ended: one of `FINISHES`, or `other`."""

    problem: EngineError | str | None = None
    """The fault in the answer: a text if the caller is at fault, an error if an engine is; None without one."""


class OpenExchange(Protocol):
    """An attempt's exchange with its engine."""

    def advance(self) -> bool:
        """Pass on what has come. Returns whether the client has all of the answer; raises what is wrong with it."""

    def close(self) -> None:
        """End it, or give it up."""

    def keep(self) -> None:
        """Keep what the engine has said of a stream so far: its tokens, and how it ended."""

    @property
    def has_last_event(self) -> bool:
        """Whether the client has the last event of a stream. Nothing may follow it."""

    def redirect(self, sink: Sink) -> None:
        """Nothing of the answer has come so far. From now on it goes to this sink."""


class Attempt(msgspec.Struct, eq=False):
    """A call on one engine."""

    booking: Booking

    answer: Answer

    exchange: OpenExchange | None = None
    """None while it is being sent, if that failed, and once it is closed."""

    is_open: bool = True
    """Whether its booking has still to be settled, released or failed."""

    margin: Margin | None = None
    """None until `find_margin` has found it."""

    @property
    def engine_id(self) -> str:
        return self.booking.placement.engine_id

    def find_margin(self) -> Margin:
        found = self.margin = self.booking.placement.margin()
        return found


class Ending(msgspec.Struct, frozen=True, eq=False):
    """How a call ended, or a request to a call's route that was no call."""

    outcome: Outcome

    status: int
    """The status that the client gets."""

    engine_id: str = ""
    """Where it ended; empty if no engine had it."""

    is_told: bool = False
    """Whether the client was sent something of an answer."""

    error: BaseException | None = None
    """The error to raise: one that the client has not been told, or a defect."""

    problem: EngineError | str | None = None
    """None: the engine answered in full, with a text where one is read. An `EngineError`: the engine is at fault, so
    that another one may succeed. A text: what is wrong by the caller's fault."""

    request_id: str = ""

    path: str = ""

    tenant: str = ""
    """Empty before the request's key is known."""

    model: str = ""
    """Empty if it is not known, or not served here."""

    code: str | None = None
    """The error's code; None if an engine's answer is the answer, or the client went."""

    message: str | None = None
    """The error's message for people; None without one, and if it may quote a request or an answer."""

    arrived_s: float = 0.0
    """The event loop's time, as `ended_s`. A chained call's times count from when its inputs had values."""

    ended_s: float = 0.0
