"""Reads the model's name and the sampling fields of a call from LangChain's models. Their connections are not used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.language_models import BaseChatModel, BaseLanguageModel
from langchain_core.runnables import Runnable
from langchain_core.runnables.base import RunnableBinding

from plait.client.errors import TemplateError

_FIELDS = (
    *("max_tokens", "temperature", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
    "reasoning_effort",
)
"""Fields that have the same name in LangChain's models and in OpenAI's API."""
_NOT_TEXT = frozenset({"tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"})
_TRACING = frozenset({"ls_structured_output_format"})


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model's name (None: it has none), its sampling fields, and whether it takes messages (`chat`)."""

    name: str | None
    sampling: Mapping[str, object]
    chat: bool


def innermost(step: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """The step itself, without what `bind` and `with_config` put around it."""
    while isinstance(step, RunnableBinding):
        step = step.bound
    return step


def read_model(step: Runnable[Any, Any]) -> ReadModel:
    """Read a model. Raises `TemplateError` if its answer would not be one text."""
    bound: dict[str, Any] = {}
    while isinstance(step, RunnableBinding):
        bound = {**step.kwargs, **bound}
        step = step.bound
    assert isinstance(step, BaseLanguageModel)
    own = {name: getattr(step, name, None) for name in _FIELDS}
    extra = [getattr(step, name, None) or {} for name in ("model_kwargs", "extra_body")]
    given = {**own, **extra[0], **extra[1], **bound, **(bound.get("extra_body") or {})}
    fields = {name: value for name, value in given.items() if value is not None and name not in _TRACING}
    fields.pop("extra_body", None)
    fields.setdefault("n", getattr(step, "n", None) or 1)
    _check(fields)
    del fields["n"]
    name = fields.pop("model", None) or getattr(step, "model_name", None) or getattr(step, "model", None)
    return ReadModel(name, fields, isinstance(step, BaseChatModel))


def _check(fields: Mapping[str, Any]) -> None:
    for name in sorted(_NOT_TEXT & fields.keys()):
        raise TemplateError(f"a model bound with {name} answers with more than text; bind it without {name}")
    if fields["n"] != 1:
        raise TemplateError(f"n is {fields['n']}; a variable is one text, so n must be 1")
    if not isinstance(fields.get("response_format", {}), Mapping):
        raise TemplateError("response_format is a class; give its JSON schema, and add a JsonOutputParser at the end")
