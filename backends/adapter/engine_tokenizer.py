"""The tokenizer of an engine's API server, and its fingerprint in the reports.

The scheduler makes the report, but only the API server has the tokenizer and the chat template. So the API server makes
the fingerprint once, when it starts, and adds it to each report that it passes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from plait.backends.protocol.chat_rendering import ChatRendering, requested_digest
from plait.backends.protocol.tokenizer_files import encoded, saved_files
from plait.backends.protocol.tokenizer_fingerprint import NO_TOKENIZER, Messages, TokenizerFingerprint, fingerprint

_log = logging.getLogger("vllm.plait")
"""A child of vLLM's logger, because vLLM prints only such records. SGLang prints those of any logger."""

_FIELDS: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])

Prepare = Callable[[Messages, Messages | None], tuple[Messages, Messages | None]]
"""An engine's own code that brings a client's messages and tools into the template's form. May raise anything."""

Render = Callable[[Messages, Messages | None, Mapping[str, Any]], object]
"""The engine's chat template: messages, tools, variables. Raises, or returns no text, for a chat that it refuses."""


@dataclass(slots=True)
class EngineTokenizer:
    """A tokenizer of transformers, or one with the same methods, and how the engine renders chats."""

    name: str
    """The folder or Hub name from which the engine has loaded the tokenizer."""
    tokenizer: Any
    render: Render
    chat_template: str | None = None
    """The text given by an engine's option, instead of the tokenizer's own template."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The variables that the engine gives to every template."""
    prepare: Prepare | None = None
    """SGLang's; None in other engines, and where SGLang treats the chats of this model in a special way."""
    drops_tools: bool = False
    """Whether the engine hides tools from the template for `tool_choice: none`."""

    def vocabulary(self) -> Mapping[str, int]:
        vocabulary: Mapping[str, int] = self.tokenizer.get_vocab()
        return vocabulary

    def added_tokens(self) -> Iterable[str]:
        """The tokens that the tokenizer cuts out of a text first; none if it has no method to list them."""
        added = getattr(self.tokenizer, "get_added_vocab", None)
        return [] if added is None else list(added())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        ids: Sequence[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def render_probe(self, messages: Messages, tools: Messages | None, variables: Mapping[str, Any]) -> str | None:
        """A chat rendered by the engine's template; None if the template refuses the chat."""
        try:
            text = self.render(messages, tools, variables)
        except Exception as error:  # noqa: BLE001 - a template is a program
            _log.info("the chat template refuses one of Plait's probe chats: %r", error)
            return None
        return text if isinstance(text, str) else None

    def render_requested(self, messages: Messages, tools: Messages | None, variables: Mapping[str, Any]) -> str | None:
        """A client's chat, prepared by the engine's own code, then rendered; None if either refuses the chat."""
        if self.prepare is None:
            raise NotImplementedError
        try:
            prepared = self.prepare(messages, tools)
        except Exception as error:  # noqa: BLE001 - validators of the engine
            _log.info("the engine refuses one of Plait's probe chats: %r", error)
            return None
        return self.render_probe(*prepared, variables)

    def offer(self, reported: bytes) -> bytes:
        """The answer to `GET /plait/tokenizer`: the tokenizer's files. `reported` is from `read_tokenizer`.

        Raises ValueError if `read_tokenizer` could not read the tokenizer, and what the tokenizer raises.
        """
        found = msgspec.msgpack.decode(reported, type=_Reported).tokenizer
        if found is None:
            raise ValueError("the engine has no tokenizer that it could report")
        return encoded(found, saved_files(self.tokenizer, self.chat_template), self.template_kwargs)


class _Reported(msgspec.Struct, frozen=True):
    """The parts of a report that only the API server knows."""

    tokenizer: TokenizerFingerprint | None
    chats: ChatRendering | None


def read_tokenizer(find: Callable[[], EngineTokenizer | None], version: str) -> bytes:
    """The report's fields `tokenizer` and `chats`, as msgpack. `find` returns None if the engine has no tokenizer.

    `version` is the engine's. If the tokenizer cannot be read, the log has the reason, and the gateway sends text.
    """
    found: TokenizerFingerprint | None = None
    chats = ChatRendering(version)
    try:
        tokenizer = find()
        if tokenizer is None:
            found = NO_TOKENIZER
        else:
            found = fingerprint(tokenizer)
            chats = ChatRendering(version, requested_digest(tokenizer), tokenizer.drops_tools)
    except Exception:  # noqa: BLE001 - some models bring the code of their tokenizer
        _log.warning("Plait cannot read the tokenizer: its gateways will send text, no token ids", exc_info=True)
    return msgspec.msgpack.encode(_Reported(found, chats))


def with_fields(report: bytes, reported: bytes, **more: int) -> bytes:
    """A report with the fields from `read_tokenizer`, both as msgpack, and `more`. A long report stays encoded."""
    return msgspec.msgpack.encode(_FIELDS.decode(report) | _FIELDS.decode(reported) | more)
