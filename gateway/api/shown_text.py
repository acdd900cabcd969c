"""What a stream has shown of a text that may begin anew: from then on only what goes beyond it is news."""

from __future__ import annotations


class TextChangedError(Exception):
    """The text is another than was shown."""


class ShownText:
    """The text of one stream. A text that begins anew has to repeat what was shown, before there is more to show."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._shown = ""  # what has to be repeated
        self._repeated = 0  # how many of its characters have been

    def begin_anew(self) -> None:
        """The text comes again from its beginning."""
        self._shown = "".join(self._pieces)
        self._repeated = 0

    def news(self, text: str) -> str:
        """What is to be shown of more text, often all of it. Raises `TextChangedError`."""
        due = self._shown[self._repeated : self._repeated + len(text)]
        if not text.startswith(due):
            raise TextChangedError
        self._repeated += len(due)
        news = text[len(due) :]
        if news:
            self._pieces.append(news)
        return news

    def rest(self, value: str) -> str:
        """What is to be shown of the whole text beyond what was. Raises `TextChangedError`."""
        shown = "".join(self._pieces)
        if not value.startswith(shown):
            raise TextChangedError
        return value[len(shown) :]
