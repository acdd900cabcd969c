"""The text that a stream has already sent. After a retry the text begins again; only its new part is sent."""

from __future__ import annotations


class TextChangedError(Exception):
    """The text differs from the text that was shown."""


class ShownText:
    """The text of one stream. A text that begins again must first repeat the text that was shown."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._shown = ""  # the text that must be repeated
        self._repeated = 0  # how many of its characters have been repeated

    def begin_anew(self) -> None:
        """The text begins again."""
        self._shown = "".join(self._pieces)
        self._repeated = 0

    def news(self, text: str) -> str:
        """The part of the next piece `text` that has not been shown. Raises `TextChangedError`."""
        due = self._shown[self._repeated : self._repeated + len(text)]
        if not text.startswith(due):
            raise TextChangedError
        self._repeated += len(due)
        news = text[len(due) :]
        if news:
            self._pieces.append(news)
        return news

    def rest(self, value: str) -> str:
        """The part of the whole text `value` that has not been shown. Raises `TextChangedError`."""
        shown = "".join(self._pieces)
        if not value.startswith(shown):
            raise TextChangedError
        return value[len(shown) :]
