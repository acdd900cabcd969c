"""Chat templates, in Jinja: which options a template reads, and which form of messages it expects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plait.backends.errors import CallerError

# Template variables that the call itself sets. Template options cannot replace them.
CALL_VARIABLES: Final = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


class _GenerationTag(Extension):
    """Transformers' `{% generation %}` block, which marks the assistant's text. It is parsed as its content."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT: Final = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
)


def read_template(path: Path) -> str:
    """The text of a template's file. Raises ValueError; its message has the path."""
    try:
        template = path.read_text(encoding="utf-8")
        loops_over_content(template)
    except OSError as error:
        raise ValueError(f"chat template {path} cannot be read: {error.strerror}") from error
    except TemplateSyntaxError as error:
        raise ValueError(f"chat template {path}, line {error.lineno}: {error.message}") from error
    return template


def template_options(template: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The call's options (`chat_template_kwargs`) that the template reads. vLLM ignores the others too.

    Raises CallerError for `chat_template` and `tokenize`, which vLLM refuses.
    """
    for name in ("chat_template", "tokenize"):
        if name in given:
            raise CallerError(
                f"{name!r} is not allowed in 'chat_template_kwargs'; leave it out.", param="chat_template_kwargs"
            )
    if not given:
        return {}
    read = _variables(template) - CALL_VARIABLES
    return {name: value for name, value in given.items() if name in read}


@lru_cache(maxsize=32)
def _variables(template: str) -> frozenset[str]:
    return frozenset(meta.find_undeclared_variables(_ENVIRONMENT.parse(template)))


@lru_cache(maxsize=32)
def loops_over_content(template: str) -> bool:
    """Whether a template loops over a message's content, and so expects a list of parts.

    Raises jinja2.TemplateSyntaxError.
    """
    tree = _ENVIRONMENT.parse(template)
    lists = _aliases(tree, "messages")
    loops = [loop for loop in tree.find_all(nodes.For) if isinstance(loop.target, nodes.Name)]
    message_names = {loop.target.name for loop in loops if _reads(loop.iter, lists)}  # type: ignore[attr-defined]
    in_macros: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        content_names = _parameters_given_content(tree, macro, message_names)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in content_names:
                return True
    return any(
        _reads(loop.iter, message_names, "content")
        or (id(loop) not in in_macros and isinstance(loop.iter, nodes.Name) and loop.iter.name == "content")
        for loop in loops
    )


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """The variables that hold `name` or a part of it, directly or through other variables."""
    names = {name}
    assigned = list(_assignments(tree))
    while found := {target for target, value in assigned if target not in names and _reads(value, names)}:
        names |= found
    return names


def _assignments(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    """`{% set a = b %}`, `{% set ns.a = b %}` and `{% set ns = namespace(a=b) %}` as (dotted name, value)."""
    for assign in tree.find_all(nodes.Assign):
        target = _dotted(assign.target)
        if target is None:
            continue
        yield target, assign.node
        if isinstance(assign.node, nodes.Call) and _dotted(assign.node.node) == "namespace":
            for given in assign.node.kwargs:
                yield f"{target}.{given.key}", given.value


def _parameters_given_content(tree: nodes.Template, macro: nodes.Macro, message_names: set[str]) -> set[str]:
    """The parameters of a macro that get a message's content in some call."""
    names: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if _dotted(call.node) != macro.name:
            continue
        given = list(zip((parameter.name for parameter in macro.args), call.args, strict=False))
        given += [(keyword.key, keyword.value) for keyword in call.kwargs]
        names |= {name for name, value in given if _reads(value, message_names, "content")}
    return names


def _reads(node: nodes.Node | None, names: set[str], key: str | None = None) -> bool:
    """Whether an expression is one of the variables (or its item `key`), possibly filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return _dotted(node) in names
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key and _dotted(node.node) in names
    return isinstance(node, nodes.Getattr) and node.attr == key and _dotted(node.node) in names


def _dotted(node: nodes.Node | None) -> str | None:
    """The name of a variable or of its attribute, as in `ns.a`; None for any other expression."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    if isinstance(node, nodes.Getattr):
        owner = _dotted(node.node)
        return None if owner is None else f"{owner}.{node.attr}"
    return None
