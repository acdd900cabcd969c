"""Tokenizers turn texts and chats into the engine's token ids, so that prefix hashes agree with the engine's cache.

There are four kinds: Hugging Face files, as the engines load them; tiktoken's encodings; the embedded engine's own; and
bytes, as a fallback. `loading` makes each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import jinja2

from plait.backends.errors import CallerError
from plait.backends.tokenization.chat_messages import template_messages, template_tools
from plait.backends.tokenization.chat_template import template_options
from plait.backends.tokenization.cuts import Cuts

# Errors that a template can raise for messages that it does not expect. vLLM answers all of them with a 400.
TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
)  # fmt: skip


class Tokenizer(Protocol):
    """A tokenizer, as the gateway and the embedded engine use it.

    `name` is for logs. `exact` says whether the ids are the engine's; only the byte-level fallback has False.
    `longest_token_bytes` is the most bytes of text that one token can stand for; None if there is no bound.
    `cuts` says where a text may be encoded in parts; None if it may not. Then `ids_around` are the ids that are put
    before and behind a plain prompt, and `encode_parts` adds none. `special_ids` are those that end a turn, and others.
    """

    name: str
    exact: bool
    longest_token_bytes: int | None
    cuts: Cuts | None
    ids_around: tuple[Sequence[int], Sequence[int]]
    special_ids: frozenset[int]

    def __hash__(self) -> int: ...  # caches are keyed by tokenizers

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a plain prompt. The text of a special token becomes that token, as in the engines.

        Raises CallerError for text that is not valid Unicode.
        """
        ...

    def encode_array(self, text: str, *, add_special_tokens: bool = True) -> array[int]:
        """The ids of `encode` as unsigned 32-bit integers: a list takes nine times as much memory."""
        ...

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        """The ids of each part of a text; errors are those of `encode`."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """The text of a chat, as vLLM renders it. `chat_template` is the text of a template.

        It has its special tokens: encode it without adding any. Raises CallerError for a chat that the template
        refuses, UnsupportedError for content that is not text.
        """
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of a rendered chat; `options` and errors are those of `render_chat`."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of known ids, with special tokens. Bytes that are not UTF-8 become U+FFFD."""
        ...

    # What a tokenizer is told apart by (`plait.backends.protocol.tokenizer_fingerprint`).

    def vocabulary(self) -> Mapping[str, int]:
        """All tokens with their ids, added ones among them."""
        ...

    def added_tokens(self) -> Iterable[str]:
        """The tokens that are found in a text before all else."""
        ...

    def render_probe(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str | None:
        """A chat by the model's template, given to it as it is; None if it refuses the chat."""
        ...


class ChatTokenizer(ABC):
    """Turns a chat into ids with `encode`, in the same way for every kind of tokenizer. Methods are `Tokenizer`'s."""

    name: str
    exact = True
    longest_token_bytes: int | None = None
    cuts: Cuts | None = None
    ids_around: tuple[Sequence[int], Sequence[int]] = ((), ())
    special_ids: frozenset[int] = frozenset()

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a plain prompt."""

    def encode_array(self, text: str, *, add_special_tokens: bool = True) -> array[int]:
        """The ids of `encode` as unsigned 32-bit integers."""
        return array("I", self.encode(text, add_special_tokens=add_special_tokens))

    @abstractmethod
    def vocabulary(self) -> Mapping[str, int]:
        """All tokens with their ids."""

    @abstractmethod
    def added_tokens(self) -> Iterable[str]:
        """The tokens that are found in a text before all else."""

    def render_probe(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str | None:
        """A chat by the model's template, given to it as it is; None if it refuses the chat."""
        try:
            template = self._template(None, tools)
            return self._render(messages, tools=tools, chat_template=template, add_generation_prompt=True, **variables)
        except (CallerError, *TEMPLATE_ERRORS):
            return None

    @abstractmethod
    def _template(self, chat_template: str | None, tools: list[dict[str, Any]] | None) -> str:
        """The template to render. `chat_template` is the template in the call."""

    @abstractmethod
    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str: ...

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        """The ids of each part of a text."""
        return [self.encode(part, add_special_tokens=False) for part in parts]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of a rendered chat."""
        # The template has written the special tokens. Encoding must not add a second BOS.
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """The text of a chat."""
        if not messages:
            raise CallerError("A chat needs at least one message.", param="messages")
        prepared_tools = template_tools(tools)
        try:
            template = self._template(chat_template, prepared_tools)
            return self._render(
                template_messages(messages, template),
                tools=prepared_tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_options(template, template_kwargs or {}),
            )
        except TEMPLATE_ERRORS as error:
            raise CallerError(f"The chat template refused the messages: {error}", param="messages") from error


def not_unicode() -> CallerError:
    """The error for text that is not valid Unicode."""
    return CallerError("The prompt is not valid Unicode: it has half of a surrogate pair.", param="prompt")
