"""What the gateway says about a call: flat `plait_*` keys among the body's extra parameters, all of them optional.

vLLM takes these in `vllm_xargs`, SGLang in `custom_params`.

A bad value is ignored and counted: an annotation can make a call wait or hurry, but never fail.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from plait.policy.types import Objective, Slo

_log = logging.getLogger("vllm.plait")
"""Below vLLM's own logger, whose handlers print it; in other engines, those of the root do."""


@dataclass(frozen=True, slots=True)
class Annotations:
    """`age_s`: how long the call had waited when it was sent; `cached_tokens`: what the gateway expects cached."""

    age_s: float = 0.0
    slo: Slo | None = None
    objective: Objective | None = None
    priority: int = 0
    cached_tokens: int | None = None


_NONE = Annotations()

T = TypeVar("T")


class AnnotationReader:
    """Reads annotations; `ignored` counts the values that were not understood, by key."""

    def __init__(self) -> None:
        self.ignored: Counter[str] = Counter()

    def read(self, arguments: Mapping[str, Any] | None) -> Annotations:
        """The annotations among a call's extra sampling arguments."""
        if not arguments or not any(key.startswith("plait_") for key in arguments):
            return _NONE
        ttft_s, tpot_s, jct_s = (
            self._value(arguments, f"plait_{name}_ms", _positive_s) for name in ("ttft", "tpot", "jct")
        )
        return Annotations(
            age_s=self._value(arguments, "plait_age_ms", _seconds) or 0.0,
            slo=None if ttft_s is tpot_s is jct_s is None else Slo(ttft_s, tpot_s, jct_s),
            objective=self._value(arguments, "plait_objective", Objective),
            priority=self._value(arguments, "plait_priority", _integer) or 0,
            cached_tokens=self._value(arguments, "plait_cached_tokens", _tokens),
        )

    def _value(self, arguments: Mapping[str, Any], key: str, parse: Callable[[Any], T]) -> T | None:
        given = arguments.get(key)
        if given is None:
            return None
        try:
            return parse(given)
        except (ValueError, TypeError, OverflowError) as error:
            self.ignored[key] += 1
            if self.ignored[key] == 1:
                _log.warning("ignored %s=%r: %s (further ones are only counted)", key, given, error)
            return None


def _seconds(milliseconds: Any) -> float:
    value = float(milliseconds) / 1e3
    if not 0 <= value < math.inf:
        raise ValueError("not a number of milliseconds")
    return value


def _positive_s(milliseconds: Any) -> float:
    value = _seconds(milliseconds)
    if value == 0:
        raise ValueError("an objective is more than nothing")
    return value


def _integer(value: Any) -> int:
    number = int(value)
    if number != float(value):
        raise ValueError("not an integer")
    return number


def _tokens(value: Any) -> int:
    number = _integer(value)
    if number < 0:
        raise ValueError("not a number of tokens")
    return number
