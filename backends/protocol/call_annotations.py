"""Writes and reads the gateway's annotations of a call for an engine: flat, optional `plait_*` keys.

The annotations are among the body's extra parameters: vLLM's `vllm_xargs`, SGLang's `custom_params`. None is a time
stamp, because clocks differ. A bad value is ignored and counted, so an annotation never fails a call.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from plait.policy.types import NO_SLO, Objective, Slo

_log = logging.getLogger("vllm.plait")
"""A child of vLLM's logger, because vLLM prints only such records. SGLang prints those of any logger."""


_PREFIX = "plait_"
_AGE = "plait_age_ms"
_CACHED_TOKENS = "plait_cached_tokens"
_TTFT, _TPOT, _JCT = "plait_ttft_ms", "plait_tpot_ms", "plait_jct_ms"
_DEDUCED = "plait_deduced"
_OBJECTIVE = "plait_objective"
_PRIORITY = "plait_priority"
_HANDLE = "plait_handle"
_GATEWAY = "plait_gateway"
_LINE = "plait_line"

MAX_HANDLE = 128
"""The longest handle, in characters."""


@dataclass(frozen=True, slots=True)
class EngineAnnotations:
    """`age_s` is the call's age when it was sent. `cached_tokens` is how many the gateway expects to be cached.

    `handle` names the call in later changes of its objectives (`call_objectives`). `gateway` is the id of the sending
    gateway, which the engine repeats in its reports. `is_line`: the call is a line of a batch.
    """

    age_s: float = 0.0
    slo: Slo | None = None
    objective: Objective | None = None
    priority: int = 0
    cached_tokens: int | None = None
    handle: str | None = None
    gateway: str | None = None
    is_line: bool = False


UNANNOTATED = EngineAnnotations()

T = TypeVar("T")


def to_parameters(annotations: EngineAnnotations) -> dict[str, str | float]:
    """The annotations that are set, as parameters.

    Times are in milliseconds, rounded to the microsecond. An objective under half a microsecond becomes 0, which
    readers ignore.
    """
    slo = annotations.slo or NO_SLO
    told: dict[str, str | float | None] = {
        _AGE: _ms(annotations.age_s),
        _CACHED_TOKENS: annotations.cached_tokens,
        _TTFT: _ms(slo.ttft_s),
        _TPOT: _ms(slo.tpot_s),
        _JCT: _ms(slo.jct_s),
        _DEDUCED: int(slo.is_deduced) or None,
        _OBJECTIVE: annotations.objective.value if annotations.objective else None,
        _PRIORITY: annotations.priority or None,
        _HANDLE: annotations.handle,
        _GATEWAY: annotations.gateway,
        _LINE: int(annotations.is_line) or None,
    }
    return {name: value for name, value in told.items() if value is not None}


def is_annotation(key: str) -> bool:
    """Whether a key among the extra parameters is Plait's, and so must not be set by clients."""
    return key.startswith(_PREFIX)


class AnnotationReader:
    """Reads annotations; `ignored` counts the bad values, by key."""

    def __init__(self) -> None:
        self.ignored: Counter[str] = Counter()

    def read(self, arguments: Mapping[str, Any] | None) -> EngineAnnotations:
        """The annotations among a call's extra sampling arguments."""
        if not arguments or not any(map(is_annotation, arguments)):
            return UNANNOTATED
        ttft_s, tpot_s, jct_s = (self._value(arguments, key, _positive_s) for key in (_TTFT, _TPOT, _JCT))
        is_deduced = bool(self._value(arguments, _DEDUCED, _integer))
        return EngineAnnotations(
            age_s=self._value(arguments, _AGE, _seconds) or 0.0,
            slo=None if ttft_s is tpot_s is jct_s is None else Slo(ttft_s, tpot_s, jct_s, is_deduced),
            objective=self._value(arguments, _OBJECTIVE, Objective),
            priority=self._value(arguments, _PRIORITY, _integer) or 0,
            cached_tokens=self._value(arguments, _CACHED_TOKENS, _tokens),
            handle=self._value(arguments, _HANDLE, _handle),
            gateway=self._value(arguments, _GATEWAY, _handle),
            is_line=bool(self._value(arguments, _LINE, _integer)),
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
                _log.warning("ignored %s=%r: %s (further bad values of this key are only counted)", key, given, error)
            return None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _seconds(milliseconds: Any) -> float:
    value = float(milliseconds) / 1e3
    if not 0 <= value < math.inf:
        raise ValueError("must be a finite number of milliseconds, at least 0")
    return value


def _positive_s(milliseconds: Any) -> float:
    value = _seconds(milliseconds)
    if value == 0:
        raise ValueError("must be above 0 milliseconds")
    return value


def _integer(value: Any) -> int:
    number = int(value)
    if number != float(value):
        raise ValueError("must be an integer")
    return number


def _tokens(value: Any) -> int:
    number = _integer(value)
    if number < 0:
        raise ValueError("must be at least 0 tokens")
    return number


def _handle(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_HANDLE:
        raise ValueError(f"must be a text of 1 to {MAX_HANDLE} characters")
    return value
