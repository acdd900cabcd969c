"""A variable that a response waits for: its text so far, what of it was shown, and how the wait ended.

The criteria of a get are written as in Parrot (section 7): an objective, or figures in milliseconds.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from plait.backends.errors import PlaitError, WaitTimeoutError
from plait.gateway.programs.held_call import GrowingText
from plait.gateway.programs.session import Getter, Session
from plait.gateway.programs.session_errors import text_changed
from plait.policy.programs.needs import Mark
from plait.policy.programs.request_graph_state import VariableState
from plait.policy.types import NO_SLO, Objective, Slo


class TextChangedError(Exception):
    """The text differs from the text that was shown."""


_NO_TEXT: Final = GrowingText()
"""Before any text has come."""


class ShownText:
    """How much of a text one stream has sent. It holds no copy of the text while the text only grows.

    After a retry the text begins again. It must first repeat what was sent; only its new part is sent then.
    """

    def __init__(self) -> None:
        self._text = _NO_TEXT
        self._shown = 0  # characters
        self._repeats = ""  # what the text still has to repeat
        self._repeated = 0  # characters of the text that were compared

    def news(self, text: GrowingText) -> str:
        """The part of the text so far that has not been shown. Raises `TextChangedError`."""
        if text is not self._text:
            if not self._repeats:
                self._repeats = str(self._text)[: self._shown]
            self._text, self._repeated = text, 0
        if self._repeats:
            come = text.since(self._repeated)
            due = self._repeats[self._repeated : self._repeated + len(come)]
            if not come.startswith(due):
                raise TextChangedError
            self._repeated += len(due)
            if self._repeated < len(self._repeats):
                return ""
            self._repeats = ""
        news = text.since(self._shown)
        self._shown += len(news)
        return news

    def rest(self, value: str) -> str:
        """The part of the whole text `value` that has not been shown. Raises `TextChangedError`."""
        if not value.startswith(self._repeats or str(self._text)[: self._shown]):
            raise TextChangedError
        return value[self._shown :]


class AwaitedVariable:
    """Its `getter` asks for `mark`. `value` or `error` is set once the wait is over. `changed` is set at each change.

    `streamed` says that the text is wanted as it grows.
    """

    def __init__(self, variable: str, mark: Mark | None, changed: asyncio.Event, *, streamed: bool) -> None:
        self.value: str | None = None
        self.error: PlaitError | None = None
        self._changed = changed
        self._text = _NO_TEXT
        self._shown = ShownText()
        self._is_shown = False  # the whole value
        self.getter = Getter(variable, self._on_value, self._on_failed, mark, self._on_delta if streamed else None)

    @property
    def name(self) -> str:
        """The variable's name."""
        return self.getter.variable

    @property
    def is_answered(self) -> bool:
        """Whether the wait is over."""
        return self.value is not None or self.error is not None

    def news(self) -> str:
        """The text that was not returned yet. A text that a retry has changed makes the wait fail."""
        if self._is_shown:
            return ""
        try:
            if self.value is None:
                return self._shown.news(self._text)
            self._is_shown = True
            return self._shown.rest(self.value)
        except TextChangedError:
            self.value, self.error = None, text_changed(self.name)
            return ""

    def give_up(self, session: Session, waited_s: float) -> None:
        """The client's time is over."""
        state = session.state_of(self.name)
        hint = "; nobody produces it so far" if state is VariableState.EMPTY else ""
        self.error = WaitTimeoutError(
            f"The variable '{self.name}' is still {state} after {waited_s:g} s{hint}. Get it again."
        )

    def _on_delta(self, text: GrowingText) -> None:
        self._text = text
        self._changed.set()

    def _on_value(self, value: str) -> None:
        self.value = value
        self._changed.set()

    def _on_failed(self, error: PlaitError) -> None:
        self.error = error
        self._changed.set()


Milliseconds = Annotated[float, Meta(gt=0, le=1e12)]


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The objectives of a get, in milliseconds: the fields of a call's `plait`. Their short names are older."""

    slo_ttft_ms: Milliseconds | None = None
    slo_tpot_ms: Milliseconds | None = None
    slo_jct_ms: Milliseconds | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    jct_ms: Milliseconds | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms", "jct_ms"):
            older, newer = getattr(self, name), getattr(self, f"slo_{name}")
            if older is not None and newer not in (None, older):
                raise ValueError(f"slo_{name} and {name} are the same objective; give one of them")

    def slo(self) -> Slo:
        """The same objectives, in seconds."""
        return Slo(
            _seconds(self.slo_ttft_ms or self.ttft_ms),
            _seconds(self.slo_tpot_ms or self.tpot_ms),
            _seconds(self.slo_jct_ms or self.jct_ms),
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


Criteria = Objective | Figures


def mark_of(criteria: Criteria | None) -> Mark | None:
    """The objective that a get with these criteria asks for; None if it asks for none."""
    mark = criteria.slo() if isinstance(criteria, Figures) else criteria
    return None if mark == NO_SLO else mark
