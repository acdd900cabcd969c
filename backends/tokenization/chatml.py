"""The template that is shipped, for tokenizers without one of their own; and chats as transformers renders them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from plait.backends.tokenization.chat_template import read_template
from plait.backends.tokenization.late_transformers import import_transformers

EMBEDDED_FOLDER: Final = Path(__file__).parents[1] / "embedded" / "tokenizer"
CHATML: Final = read_template(EMBEDDED_FOLDER / "chat_template.jinja")
"""The embedded engine's template. Tokenizers without a template use it too."""


def render_by_transformers(messages: list[dict[str, Any]], **options: Any) -> str:
    """The text of a chat. Raises what templates raise, such as `jinja2.TemplateError`."""
    if options.get("continue_final_message") and options.get("add_generation_prompt"):
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")
    import_transformers()
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - imported by now

    prompts = render_jinja_template(conversations=[messages], **options)[0]
    return str(prompts[0])
