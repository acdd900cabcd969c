"""How an output is generated: OpenAI's sampling fields, and engine-specific ones in `extra_body`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TypedDict, cast

from plait.client.errors import TemplateError


class Sampling(TypedDict, total=False):
    """Sampling fields as keyword arguments. The fields in `extra_body` are added to the request without a check."""

    max_tokens: int
    temperature: float
    top_p: float
    stop: str | Sequence[str]
    seed: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[str, float]
    response_format: Mapping[str, object]
    extra_body: Mapping[str, object]


def sampling_fields(given: Sampling) -> dict[str, object]:
    """The request's fields, with `extra_body` unpacked. Raises `TemplateError` for an unknown field."""
    fields = dict(cast("Mapping[str, object]", given))
    for name in fields:
        if name not in Sampling.__annotations__:
            nearest = difflib.get_close_matches(name, Sampling.__annotations__, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "put an engine's own fields into extra_body"
            raise TemplateError(f"{name} is not a sampling field; {hint}")
    extra = cast("Mapping[str, object]", fields.pop("extra_body", {}))
    return {**fields, **extra}
