"""The token ids of a chat on the embedded engine, which replaces a picture by as many words as it would have tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import shake_256
from typing import Any, Final

import msgspec

from plait.backends.errors import CallerError, UnsupportedError
from plait.backends.protocol.openai import ChatRequest
from plait.backends.tokenization.rendered_fields import Renderers, rendered_fields
from plait.backends.tokenization.tokenizer import Tokenizer

PICTURE_TOKENS: Final = 256
"""The tokens that vision models use for a picture of 448 x 448 pixels."""
# A picture becomes its digest in words of one letter, each a token in the usual vocabularies. Another picture has
# other words, so a call never hits blocks behind another picture.
_WORDS: Final = str.maketrans("0123456789abcdef", "ABCDEFGHIJKLMNOP")
_PICTURES: Final = ("image_url", "input_image")


def chat_tokens(request: ChatRequest, tokenizer: Tokenizer) -> list[int]:
    """The ids of a chat. Raises CallerError for messages that the chat template refuses, and for sound and video."""
    rendered = rendered_fields(request, None, Renderers())
    try:
        return tokenizer.encode_chat(
            list(_without_pictures(request.messages)),
            tools=rendered.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=rendered.template_kwargs,
            chat_template=request.chat_template,
        )
    except UnsupportedError as error:
        reads = " The model reads text and pictures." if error.param else ""  # the parameter is a part of a message
        raise CallerError(f"{error.message}{reads}", param=error.param) from error


def _without_pictures(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(map(_is_picture, content)):
            parts = [_as_text(part) if _is_picture(part) else part for part in content]
            yield {**message, "content": parts}
        else:
            yield message


def _is_picture(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _PICTURES


def _as_text(picture: Mapping[str, Any]) -> dict[str, Any]:
    digest = shake_256(msgspec.json.encode(picture, order="deterministic")).hexdigest(PICTURE_TOKENS // 2)
    return {"type": "text", "text": " ".join(digest.translate(_WORDS))}
