"""The valid forms of ids from clients (paths, headers, bodies) and from engines' answers.

An id becomes a key in the store, and a part of log lines and paths. An index takes no long texts, PostgreSQL takes no
NUL, and a lone surrogate cannot be encoded. So an id is checked before its first use.
"""

from __future__ import annotations

import re
from typing import Final, TypeGuard


class IdForm:
    """`pattern` has to match the whole id. `rule` says the same in words, for error messages."""

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
"""Wider than a session's id, as engines and proxies choose it. PostgreSQL's index rows have at most 2,704 bytes."""

LABEL: Final = IdForm(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,256}", "1 to 256 characters, none of them a control character")
"""Names that clients give to requests and conversations in their own ways. Nothing is stored under them."""
