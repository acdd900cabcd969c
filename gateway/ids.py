"""What an id may be, wherever it comes from: a path, a header or a body of a client, or an answer of an engine.

An id becomes a key of a store, a part of log lines and of paths. A store's index takes no long texts, PostgreSQL takes
no NUL, and half a surrogate pair has no bytes. So an id is checked before anything is asked or told by it.
"""

from __future__ import annotations

import re
from typing import Final, TypeGuard


class IdForm:
    """The ids that match `pattern` as a whole. `rule` says the same in words, for error messages."""

    def __init__(self, pattern: str, rule: str) -> None:
        self.pattern: Final = pattern
        self.rule: Final = rule
        self._whole: Final = re.compile(pattern)

    def __repr__(self) -> str:
        return f"IdForm({self.pattern!r})"

    def fits(self, given: object) -> TypeGuard[str]:
        return isinstance(given, str) and self._whole.fullmatch(given) is not None


SESSION_ID: Final = IdForm(r"[A-Za-z0-9._:-]{1,128}", "1 to 128 letters, digits or any of . _ : -")
VARIABLE_NAME: Final = IdForm(r"[A-Za-z_][A-Za-z0-9_]{0,63}", "a letter or _, then at most 63 letters, digits or _")

RESPONSE_ID: Final = IdForm(r"[!-~]{1,512}", "1 to 512 printable ASCII characters without spaces")
"""Engines and the proxies before them choose it, so it may be more than a session's. A row of PostgreSQL's index has
2,704 bytes at most.
"""

LABEL: Final = IdForm(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,256}", "1 to 256 characters, none of them a control character")
"""What clients call a request or a conversation in ways of their own. Nothing is stored by it."""
