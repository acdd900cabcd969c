"""The tokenizer of an engine's API server, and its fingerprint in the reports.

The schedulers report, but only the API server has the tokenizer and the chat template. So its route adds the
fingerprint to each report on the way. The fingerprint itself is made once, when the server starts.
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
"""A child of vLLM's logger, so that vLLM's handlers print it. In other engines the root's handlers do."""

_FIELDS: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])

Prepare = Callable[[Messages, Messages | None], tuple[Messages, Messages | None]]
"""An engine's own code that brings a client's messages and tools into the template's form. May raise anything."""

Render = Callable[[Messages, Messages | None, Mapping[str, Any]], object]
"""The engine's chat template: messages, tools, variables. Raises, or returns no text, for a chat that it refuses."""


@dataclass(slots=True)
class EngineTokenizer:
    """A tokenizer of transformers, or one with the same methods. `name` says where the engine has it from.

    `chat_template` is the text that the engine was given instead of the tokenizer's own. `template_kwargs` are what it
    gives to templates by default. `prepare` is SGLang's; None: the engine is another, or prepares some chats otherwise.
    `drops_tools`: tools are left out for `tool_choice: none`.
    """

    name: str
    tokenizer: Any
    render: Render
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prepare: Prepare | None = None
    drops_tools: bool = False

    def vocabulary(self) -> Mapping[str, int]:
        vocabulary: Mapping[str, int] = self.tokenizer.get_vocab()
        return vocabulary

    def added_tokens(self) -> Iterable[str]:
        """The tokens that are found in a text before all else; none if the tokenizer does not tell."""
        added = getattr(self.tokenizer, "get_added_vocab", None)
        return [] if added is None else list(added())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        ids: Sequence[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def render_probe(self, messages: Messages, tools: Messages | None, variables: Mapping[str, Any]) -> str | None:
        """A chat by the engine's template; None if it refuses the chat."""
        try:
            text = self.render(messages, tools, variables)
        except Exception as error:  # noqa: BLE001 - a template is a program
            _log.info("the chat template refuses one of Plait's probe chats: %r", error)
            return None
        return text if isinstance(text, str) else None

    def render_requested(self, messages: Messages, tools: Messages | None, variables: Mapping[str, Any]) -> str | None:
        """A client's chat by the engine's own code and template; None if it refuses the chat."""
        if self.prepare is None:
            raise NotImplementedError
        try:
            prepared = self.prepare(messages, tools)
        except Exception as error:  # noqa: BLE001 - validators of the engine
            _log.info("the engine refuses one of Plait's probe chats: %r", error)
            return None
        return self.render_probe(*prepared, variables)

    def offer(self, reported: bytes) -> bytes:
        """The tokenizer's files, for `GET /plait/tokenizer`, with what `read_tokenizer` has returned.

        Raises ValueError if that is nothing, and what the tokenizer raises.
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
    """The parts of the report that are about the tokenizer which `find` returns; None: the engine has none.

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


def with_tokenizer(report: bytes, reported: bytes) -> bytes:
    """A report with what `read_tokenizer` has returned, both as msgpack. Only the names of fields are decoded."""
    return msgspec.msgpack.encode(_FIELDS.decode(report) | _FIELDS.decode(reported))
