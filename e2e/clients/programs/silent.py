"""What the programs with silent streams share. Streams are silent before their first event, or amid them.

The arguments are for how many seconds they are, what is asked, and the answer. A stream that breaks off is not asked
for again. `native` models are of engines that have every API themselves. For the others the gateway translates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from program import feature

QUESTION: Final = sys.argv[2]
MESSAGES: Final[Any] = [{"role": "user", "content": QUESTION}]

_SILENT_S: Final = float(sys.argv[1])
_SILENCES: Final = {"before": {"first_s": _SILENT_S}, "amid": {"middle_s": _SILENT_S}}
_ANSWER: Final = sys.argv[3]

Ask = Callable[[str, dict[str, Any]], str]
"""Asks a model, with more fields in the body; returns the text of the answer."""


def reads_silent_streams(ask: Ask) -> Ask:
    """Enter a function as a feature for each model and silence."""
    for apis in ("native", "translated"):
        for when, silence in _SILENCES.items():
            check = partial(_check, ask, f"{apis}-{when}", {"silence": silence})
            feature(f"{ask.__name__} {apis} {when}")(check)
    return ask


def _check(ask: Ask, model: str, more: dict[str, Any]) -> None:
    assert ask(model, more) == _ANSWER
