"""Regular expressions for the names that clients choose. Each matches a whole name."""

from __future__ import annotations

from typing import Final

SESSION_ID: Final = r"[A-Za-z0-9._:-]{1,128}"
"""A session's id."""

VARIABLE_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
"""A semantic variable's name."""
