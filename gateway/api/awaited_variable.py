"""A variable that a response waits for: its text so far, what of it was shown, and how the wait ended."""

from __future__ import annotations

import asyncio
from typing import Final

from plait.backends.errors import PlaitError, WaitTimeoutError
from plait.gateway.programs.held_call import GrowingText
from plait.gateway.programs.session import Getter, Session
from plait.gateway.programs.session_errors import text_changed
from plait.policy.programs.needs import Mark
from plait.policy.programs.request_graph_state import VariableState


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
