"""Renders chat templates (Jinja) as transformers does. Finds the options that a template reads, and whether it expects
a message's content as text or as a list of parts.

Transformers copies all messages and tools for each rendering, and Jinja's sandbox checks each attribute that a template
reads. `render` needs no copy, because a request's JSON is plain data, and skips the checks of attributes that are known
to be safe. docs/design/chat-templates.md has the reasons.

`CHATML` is the template that is shipped, for tokenizers without one of their own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import BuiltinMethodType
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from plait.backends.errors import CallerError, UnsupportedError

# Template variables that the call itself sets. Template options cannot replace them.
CALL_VARIABLES: Final = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})

OF_TRANSFORMERS: Final = frozenset(
    {
        "conversation", "documents", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "tokenizer_kwargs", "return_assistant_tokens_mask", "sanitize_control_tokens",
    }
)  # fmt: skip
"""Names of transformers' parameters. Transformers can keep a client's option of such a name from the template."""

# Errors that a template can raise for messages that it does not expect. vLLM answers all of them with a 400.
TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
)  # fmt: skip


class _GenerationTag(Extension):
    """Transformers' `{% generation %}` block, which marks the assistant's text. It is rendered as its content."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja reads

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dictionaries:
    """`dict` in a template: calls and `fromkeys`, but no other attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace` in a template: attributes may not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args  # so that an attribute may be called `self`
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may have no attribute {name!r}, which begins with an underscore")


_OF_DICTS: Final = frozenset(dir(dict))
_SAFE: Final[Mapping[type, frozenset[str]]] = {
    str: frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"},
    LoopContext: frozenset(
        {"first", "last", "index", "index0", "length", "revindex", "revindex0", "depth", "depth0"}
    ),
}  # fmt: skip
"""By type: attributes that need no check by the sandbox, which has its own `format` and `format_map`."""
_NONE: Final[frozenset[str]] = frozenset()
_PLAIN: Final = frozenset({str, int, float, bool, list, dict, type(None)})


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox as transformers sets it up, with fast paths for the values of a request's JSON."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _json_filter
        self.globals |= {
            "raise_exception": _refuse, "strftime_now": now, "dict": _Dictionaries(), "namespace": _Namespace
        }  # fmt: skip

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Jinja's `obj.attribute`."""
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in _OF_DICTS:
                return obj[attribute]
        elif attribute in _SAFE.get(kind, _NONE):
            return getattr(obj, attribute)
        elif kind is _Namespace and not attribute.startswith("_"):
            value = getattr(obj, attribute, self)
            if type(value) in _PLAIN:
                return value
        return super().getattr(obj, attribute)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Jinja's `function(...)`."""
        if type(function) is BuiltinMethodType and type(function.__self__) is str:
            kwargs.pop("_loop_vars", None)  # what jinja passes to functions that take the context
            kwargs.pop("_block_vars", None)
            return function(*args, **kwargs)
        return super().call(context, function, *args, **kwargs)


_to_json: Final = json.JSONEncoder(ensure_ascii=False).encode


def _json_filter(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own filter, escapes no HTML. Templates pass these arguments by name."""
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return _to_json(x)
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def now(form: str) -> str:
    """The local time in strftime's `form`."""
    return datetime.now().strftime(form)  # noqa: DTZ005 - the local time, as in transformers


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


_ENVIRONMENT: Final = ChatEnvironment()


def render(
    template: str,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """The text of a chat, as transformers renders the same JSON. Raises one of `TEMPLATE_ERRORS`."""
    for at, message in enumerate(messages):
        reasoning = message.get("reasoning_content")
        if reasoning is not None or None in message.values():
            messages = [*messages[:at], *map(_as_transformers_gives_it, messages[at:])]
            break
    return _compiled(template).render(
        {**variables, "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt},
        documents=None,
    )


_END: Final = "PLAIT_GOES_ON_HERE "
"""Marks the end of the last message in a rendered chat. Without the space, the template has trimmed the message."""


def render_open(
    template: str,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """The text of a chat up to the end of the last message's content, for an answer that goes on with it.

    As `render`, and as transformers: ValueError if the last message has no text, or the template changes it.
    """
    last = dict(messages[-1]) if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _END
    else:
        parts = list(content or ())
        at = max((place for place, part in enumerate(parts) if "text" in part), default=None)
        if at is None:
            raise ValueError("the last message has no text to go on with")
        content = parts[at]["text"]
        parts[at] = {**parts[at], "text": content + _END}
        last["content"] = parts
    text, mark, rest = render(template, [*messages[:-1], last], tools, False, variables).rpartition(_END.rstrip())
    if not mark or content.strip() not in text:
        raise ValueError(
            "the chat template changes or leaves out the text of the last message, so none can go on with it"
        )
    return text if rest.startswith(" ") else text.rstrip()


def _as_transformers_gives_it(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without keys whose value is None, and with its `reasoning_content` also as `thinking`."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = given.get("reasoning_content")
    return given if reasoning is None else {"thinking": reasoning, **given}


@lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    compiled = _ENVIRONMENT.from_string(template)
    compiled.globals = globals_apart(compiled)
    return compiled


def globals_apart(compiled: Template) -> dict[str, Any]:
    """A template's globals as one dict: each rendering copies them, and copying Jinja's chain of maps takes 5 us."""
    return dict(compiled.globals)


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
    """The call's options (`chat_template_kwargs`) that the template reads. vLLM too ignores all other options.

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
    """The variables with the value of `name` or a part of it, directly or through other variables."""
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
    """The parameters of a macro that get a message's content where the template calls the macro."""
    names: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if _dotted(call.node) != macro.name:
            continue
        given = list(zip((parameter.name for parameter in macro.args), call.args, strict=False))
        given += [(keyword.key, keyword.value) for keyword in call.kwargs]
        names |= {name for name, value in given if _reads(value, message_names, "content")}
    return names


def _reads(node: nodes.Node | None, names: set[str], key: str | None = None) -> bool:
    """Whether an expression is a variable in `names` (with `key`: its item), possibly filtered, tested or sliced."""
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


@cache
def has_transformers() -> bool:
    """Whether transformers is installed: the extra `huggingface` brings it."""
    return find_spec("transformers") is not None


def import_transformers() -> None:
    """Import transformers, without its advice to install PyTorch, which tokenizers do not need.

    The import takes half a second, and processes without a tokenizer do not need it.
    """

    def is_no_advice(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("PyTorch was not found")

    logger = logging.getLogger("transformers")
    logger.addFilter(is_no_advice)
    try:
        import transformers  # noqa: F401, PLC0415
    finally:
        logger.removeFilter(is_no_advice)


EMBEDDED_FOLDER: Final = Path(__file__).parent / "embedded"
CHATML: Final = read_template(EMBEDDED_FOLDER / "chat_template.jinja")
"""The embedded engine's template. Tokenizers without a template use it too."""


def render_as_transformers(
    messages: list[dict[str, Any]],
    *,
    chat_template: str,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """The text of a chat, by transformers if it is installed, else by `render`.

    Raises what templates raise, such as `jinja2.TemplateError`, and `UnsupportedError` for features that only
    transformers has.
    """
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")
    if not has_transformers():
        if not OF_TRANSFORMERS.isdisjoint(variables):
            option = min(OF_TRANSFORMERS & variables.keys())
            raise UnsupportedError(f"{option!r} needs a gateway with transformers: pip install 'plait[huggingface]'")
        if continue_final_message:
            return render_open(chat_template, messages, tools, variables)
        return render(chat_template, messages, tools, add_generation_prompt, variables)
    import_transformers()
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - imported by now

    options: dict[str, Any] = {
        "tools": tools,
        "chat_template": chat_template,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    prompts = render_jinja_template(conversations=[messages], **options, **variables)[0]
    return str(prompts[0])
