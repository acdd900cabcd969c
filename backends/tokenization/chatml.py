"""Chats as text for tokenizers that use the shipped ChatML template, or one that the operator has given.

The shipped template is rendered here, by the rules of transformers. Importing transformers takes most of a second of
CPU time, and a gateway of embedded engines has no other use for it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plait.backends.tokenization.chat_template import read_template
from plait.backends.tokenization.late_transformers import import_transformers

EMBEDDED_FOLDER: Final = Path(__file__).parents[1] / "embedded" / "tokenizer"
CHATML: Final = read_template(EMBEDDED_FOLDER / "chat_template.jinja")
"""The embedded engine's template. Tokenizers without a template use it too."""


def render(messages: list[dict[str, Any]], *, chat_template: str, **options: Any) -> str:
    """The text of a chat. Raises what templates raise, such as `jinja2.TemplateError`."""
    if options.get("continue_final_message") and options.get("add_generation_prompt"):
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")
    if chat_template is CHATML and not options.get("continue_final_message"):
        return _chatml().render(messages=messages, **options)
    return _by_transformers(messages, chat_template=chat_template, **options)


@cache
def _chatml() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(CHATML)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _by_transformers(messages: list[dict[str, Any]], **options: Any) -> str:
    import_transformers()
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - imported by now

    prompts = render_jinja_template(conversations=[messages], **options)[0]
    return str(prompts[0])
