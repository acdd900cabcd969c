"""Whole chains: each prompt, model and parser becomes one call. Everything between them stays unchanged.

Of LangChain's models only the names and sampling fields are read; their connections are not used. Its output parsers
become transforms for the gateway, and functions that read the value at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.language_models import BaseChatModel, BaseLanguageModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import (
    BaseOutputParser,
    CommaSeparatedListOutputParser,
    JsonOutputParser,
    MarkdownListOutputParser,
    NumberedListOutputParser,
    PydanticOutputParser,
    StrOutputParser,
    XMLOutputParser,
)
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import (
    Runnable,
    RunnableAssign,
    RunnableBranch,
    RunnableParallel,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBinding, RunnableEach
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.runnables.retry import RunnableRetry

from plait.client.errors import TemplateError
from plait.client.langchain.call import SemanticCall, Values
from plait.client.langchain.templates import read_template
from plait.client.prompt import Output, Prompt
from plait.client.variable import Read

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
    """The step without the wrappers of `bind` and `with_config`."""
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


_LISTS: dict[type, str] = {
    CommaSeparatedListOutputParser: "list(comma)",
    NumberedListOutputParser: "list(numbered)",
    MarkdownListOutputParser: "list(bulleted)",
}


@dataclass(frozen=True, slots=True)
class ReadParser:
    """A parser's replacement. `read` turns the variable's text into LangChain's result; None: the text is the result.

    The gateway applies `transforms`. If they do only a part of the parser's work, `complete` is False: the result is
    then only in the client, so no other call can take it as an input.
    """

    name: str
    transforms: str | None = None
    read: Read | None = None
    complete: bool = True


def read_parser(parser: BaseOutputParser[Any]) -> ReadParser:
    """Read a parser. A subclass of a known parser counts as unknown, since it may parse in another way."""
    kind, name = type(parser), type(parser).__name__
    if kind is StrOutputParser:
        return ReadParser(name)
    if kind in _LISTS:
        return ReadParser(name, _LISTS[kind], json.loads)
    if kind in (JsonOutputParser, PydanticOutputParser):
        return ReadParser(name, "json", parser.parse)
    if isinstance(parser, XMLOutputParser) and kind is XMLOutputParser and parser.tags:
        return ReadParser(name, _element(parser.tags[0]), parser.parse)
    return ReadParser(name, None, parser.parse, complete=False)


def _element(root: str) -> str:
    """The transforms that return the root element without the text around it."""
    around = json.dumps(f"<{root}>{{{{value}}}}</{root}>")
    return f"xml({json.dumps(root)}) | template({around})"


_ALONE = (BasePromptTemplate, BaseLanguageModel, BaseOutputParser)

Chain = Runnable[Any, Any]


def semantic(chain: Chain) -> Chain:
    """The chain with each `prompt | model | parser` replaced by a `SemanticCall`.

    Sequences, `RunnableParallel`, `RunnablePassthrough.assign` and `map()` are searched. A branch, a fallback and a
    retry decide by values, so a step before each of them waits for values. Functions, `SemanticCall`s and other steps
    stay as they are; they get variables instead of values, except after a fallback or a retry.

    Raises `TemplateError` for a step that cannot run in the gateway. The error names the step.
    """
    replaced = next((replace for kind, replace in _REPLACED.items() if isinstance(chain, kind)), None)
    if replaced is not None:
        return replaced(chain)
    if isinstance(chain, RunnableWithMessageHistory):
        raise TemplateError(
            "a history is stored when its values are there: put RunnableWithMessageHistory around Program"
        )
    if isinstance(innermost(chain), _ALONE):
        name = type(innermost(chain)).__name__
        raise TemplateError(f"{name} is not a call by itself; write prompt | model, or prompt | model | parser")
    if isinstance(chain, RunnableBinding):
        return chain.model_copy(update={"bound": semantic(chain.bound)})
    return chain


def _sequence(chain: RunnableSequence[Any, Any]) -> Chain:
    steps: list[Chain] = []
    todo = list(chain.steps)
    while todo:
        length = _length_of_call(todo)
        if length:
            steps.append(_call(todo[:length]))
            del todo[:length]
            continue
        step = todo.pop(0)
        if isinstance(step, BasePromptTemplate) and todo and isinstance(todo[0], _SETTLED):
            step = _with_prompt(step, todo.pop(0))
        is_value = bool(steps) and isinstance(steps[-1], _SETTLED)
        steps.append(step if is_value and isinstance(step, BaseOutputParser) else semantic(step))
    return steps[0] if len(steps) == 1 else RunnableSequence(*steps, name=chain.name)


def _parallel(chain: RunnableParallel[Any]) -> RunnableParallel[Any]:
    return RunnableParallel({name: semantic(step) for name, step in chain.steps__.items()})


def _assign(chain: RunnableAssign) -> RunnableAssign:
    return RunnableAssign(_parallel(chain.mapper))


def _each(chain: RunnableEach[Any, Any]) -> Chain:
    return RunnableEach(bound=semantic(chain.bound))


def _with_fallbacks(chain: RunnableWithFallbacks[Any, Any]) -> Chain:
    tried = {"runnable": _settled(chain.runnable), "fallbacks": [_settled(one) for one in chain.fallbacks]}
    return chain.model_copy(update=tried)


def _with_retries(chain: RunnableRetry[Any, Any]) -> Chain:
    return chain.model_copy(update={"bound": _settled(chain.bound)})


def _branch(chain: RunnableBranch[Any, Any]) -> Chain:
    branches = [(_settled(condition), semantic(branch)) for condition, branch in chain.branches]
    return Values() | chain.model_copy(update={"branches": branches, "default": semantic(chain.default)})


def _settled(chain: Chain) -> Chain:
    """The chain in the gateway, with values at its end."""
    return semantic(chain) | Values()


def _with_prompt(prompt: Chain, models: Chain) -> Chain:
    """`prompt | models`, where `models` are a model with fallbacks or retries: the prompt goes to each."""
    if isinstance(models, RunnableWithFallbacks):
        tried = {"runnable": prompt | models.runnable, "fallbacks": [prompt | one for one in models.fallbacks]}
        return models.model_copy(update=tried)
    assert isinstance(models, RunnableRetry)
    return models.model_copy(update={"bound": prompt | models.bound})


_SETTLED = (RunnableWithFallbacks, RunnableRetry)
"""Steps that have values at their end."""
_REPLACED: Mapping[type, Callable[[Any], Chain]] = {
    RunnableSequence: _sequence,
    RunnableParallel: _parallel,
    RunnableAssign: _assign,
    RunnableEach: _each,
    RunnableWithFallbacks: _with_fallbacks,
    RunnableRetry: _with_retries,
    RunnableBranch: _branch,
}


def _length_of_call(steps: Sequence[Chain]) -> int:
    """How many of the first steps form one call: a prompt, a model and, if there is one, a parser. 0 for no call."""
    if len(steps) == 1 or not isinstance(steps[0], BasePromptTemplate):
        return 0
    if not isinstance(innermost(steps[1]), BaseLanguageModel):
        return 0
    return 3 if len(steps) > 2 and isinstance(steps[2], BaseOutputParser) else 2


def _call(steps: Sequence[Chain]) -> SemanticCall:
    prompt, model = steps[0], read_model(steps[1])
    assert isinstance(prompt, BasePromptTemplate)
    read = read_template(prompt, chat=model.chat)
    parser = _parser(steps[2:], is_chat=model.chat)
    (output,) = read.template.outputs
    said = {} if parser.transforms is None else {output: Output(output, transforms=parser.transforms)}
    name = prompt.name or "a call"
    call = Prompt(name, read.template, said, model.name, model.sampling, chat=model.chat)
    return SemanticCall(call, read, parser.read, None if parser.complete else parser.name)


def _parser(steps: Sequence[Chain], *, is_chat: bool) -> ReadParser:
    if not steps:
        return ReadParser("no parser", read=_message if is_chat else None)
    (parser,) = steps
    assert isinstance(parser, BaseOutputParser)
    return read_parser(parser)


def _message(text: str) -> AIMessage:
    return AIMessage(content=text)
