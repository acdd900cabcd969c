"""The text that a stream has already sent. After a retry the text begins again; only its new part is sent."""

from __future__ import annotations

from plait.gateway.programs.growing_text import GrowingText


class TextChangedError(Exception):
    """The text differs from the text that was shown."""


class ShownText:
    """How much of a text one stream has shown. It holds no copy of the text while the text only grows.

    A text that begins again must first repeat the text that was shown.
    """

    def __init__(self) -> None:
        self._text = GrowingText()
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
