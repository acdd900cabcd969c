"""An engine's report on how it prepares chats for the chat template, by which a gateway knows that it does the same.

Engines bring a client's messages and tools into a form of their own before the template gets them, and the form changes
between versions. So an engine's own code prepares a few chats once, and the report has the digest of the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from plait.backends.protocol.tokenizer_fingerprint import PROBE_VARIABLES, TOOL, USER, Messages, digest

_ODD_TOOL: Final = {"function": {"parameters": {}, "x": 1, "name": "f"}, "type": "function", "x": 1}
_STRICT_TOOL: Final = {**TOOL, "function": {**TOOL["function"], "strict": True}}
_PARTS: Final = [{"type": "text", "text": "In", "x": 1}, {"type": "text", "text": "parts"}]
_CALL: Final = {
    "role": "assistant",
    "content": None,
    "reasoning": "No.",
    "reasoning_content": "Hm.",
    "tool_calls": [
        {"id": "c1", "x": 1, "type": "function", "function": {"arguments": '{"word": "é<b>"}', "name": "look_up"}}
    ],
}
REQUESTED: Final[tuple[tuple[Messages, Messages | None], ...]] = (
    ([{"role": "user", "content": _PARTS, "name": "bob"}], None),
    ([{"role": "system", "content": _PARTS}, {"role": "developer", "content": "d"}, USER], [TOOL, _ODD_TOOL]),
    ([USER, _CALL, {"role": "tool", "tool_call_id": "c1", "content": _PARTS}, USER], [_STRICT_TOOL]),
    ([USER, {"role": "assistant", "content": "", "name": "a", "reasoning_content": "Hm."}, USER], None),
    ([{"role": "system", "content": "x-anthropic-billing-header: 1\nBe terse."}, USER], []),
)
"""Messages and tools as clients send them."""


class ChatRendering(msgspec.Struct, frozen=True):
    """A part of the cache-state report. `version` is the engine's.

    `requested` is the digest of the texts of `REQUESTED`, rendered in SGLang's form. Empty: the engine is another, or
    treats some chats in a special way. `drops_tools`: the template gets no tools for `tool_choice: none`.
    """

    version: str = ""
    requested: str = ""
    drops_tools: bool = False


class Renderer(Protocol):
    """What the digest needs of a tokenizer."""

    def render_requested(self, messages: Messages, tools: Messages | None, variables: Mapping[str, Any]) -> str | None:
        """A client's chat in SGLang's form, rendered with a generation prompt; None if it is refused.

        `variables` replace the template's own of these names. Raises NotImplementedError without such a form.
        """
        ...


def requested_digest(renderer: Renderer) -> str:
    """The digest of `REQUESTED`; empty without SGLang's form, or if all its chats are refused."""
    try:
        texts = [renderer.render_requested(*chat, PROBE_VARIABLES) for chat in REQUESTED]
    except NotImplementedError:
        return ""
    return "" if texts.count(None) == len(texts) else digest(texts)
