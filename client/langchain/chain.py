"""Whole chains: each prompt, model and parser becomes one call. Everything between them stays unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseOutputParser
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
from plait.client.langchain.call import SemanticCall
from plait.client.langchain.models import innermost, read_model
from plait.client.langchain.parsers import ReadParser, read_parser
from plait.client.langchain.templates import read_template
from plait.client.prompt import Output, Prompt

_NEEDS_VALUES = (RunnableBranch, RunnableWithFallbacks, RunnableRetry, RunnableWithMessageHistory)
_ALONE = (BasePromptTemplate, BaseLanguageModel, BaseOutputParser)

Chain = Runnable[Any, Any]


def semantic(chain: Chain) -> Chain:
    """The chain with each `prompt | model | parser` replaced by a `SemanticCall`.

    Sequences, `RunnableParallel`, `RunnablePassthrough.assign` and `map()` are searched. Functions, a `SemanticCall`
    and other steps stay; they get variables instead of values.

    Raises `TemplateError` for a step that needs values before later calls can be submitted. The error names the step.
    """
    if isinstance(chain, RunnableSequence):
        return _sequence(chain)
    if isinstance(chain, RunnableParallel):
        return _parallel(chain)
    if isinstance(chain, RunnableAssign):
        return RunnableAssign(_parallel(chain.mapper))
    if isinstance(chain, RunnableEach):
        return RunnableEach(bound=semantic(chain.bound))
    if isinstance(chain, _NEEDS_VALUES):
        name = type(chain).__name__
        raise TemplateError(f"{name} decides by values, but calls are submitted before there are any; leave it out")
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
        steps.append(_call(todo[:length]) if length else semantic(todo[0]))
        del todo[: max(length, 1)]
    return steps[0] if len(steps) == 1 else RunnableSequence(*steps, name=chain.name)


def _parallel(chain: RunnableParallel[Any]) -> RunnableParallel[Any]:
    return RunnableParallel({name: semantic(step) for name, step in chain.steps__.items()})


def _length_of_call(steps: Sequence[Chain]) -> int:
    """How many of the first steps form one call: a prompt, a model and perhaps a parser. 0 if they form none."""
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
    return SemanticCall(call, read.late, parser.read, None if parser.complete else parser.name)


def _parser(steps: Sequence[Chain], *, is_chat: bool) -> ReadParser:
    if not steps:
        return ReadParser("no parser", read=_message if is_chat else None)
    (parser,) = steps
    assert isinstance(parser, BaseOutputParser)
    return read_parser(parser)


def _message(text: str) -> AIMessage:
    return AIMessage(content=text)
