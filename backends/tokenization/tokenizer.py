"""Tokenizers turn texts and chats into the engine's token ids, so that prefix hashes agree with the engine's cache.

There are four kinds: Hugging Face files, as the engines load them; tiktoken's encodings; the embedded engine's own; and
bytes, as a fallback. `loading` makes each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

from plait.backends.errors import CallerError, UnsupportedError
from plait.backends.protocol.chat_rendering import requested_digest
from plait.backends.protocol.dialects import ChatForm
from plait.backends.protocol.tokenizer_fingerprint import CHATS, Messages, TokenizerFingerprint, fingerprint
from plait.backends.tokenization.chat_messages import template_messages, template_tools
from plait.backends.tokenization.chat_template import (
    CHATML,
    OF_TRANSFORMERS,
    TEMPLATE_ERRORS,
    render,
    template_options,
)
from plait.backends.tokenization.cuts import Cuts
from plait.backends.tokenization.sglang_messages import sglang_messages, sglang_tools
from plait.backends.tokenization.template_shapes import PlainChat, ShapeMemo

SHORT_CHARACTERS: Final = 16 * 1024
"""How much text an event loop may encode itself: some 2 ms, as `tokenizers` encodes 1 to 5 MB a second."""

_THOUGHT: Final = {"role": "assistant", "content": "It is.", "reasoning": "Is it?", "reasoning_content": "Is it?"}
TRIED: Final = (
    *CHATS,
    ([CHATS[0][0][0], _THOUGHT, CHATS[0][0][0]], None),
    ([{"role": "system", "content": ""}, {"role": "user", "content": ""}, {"role": "assistant", "content": ""}], None),
)
"""Chats with tools, parts, reasoning and empty contents."""


_Prepared = list[dict[str, Any]]
_FORMS: Final[Mapping[ChatForm, tuple[Callable[..., _Prepared], Callable[..., _Prepared | None]]]] = {
    "vllm": (template_messages, template_tools),
    "sglang": (sglang_messages, sglang_tools),
}
"""The functions that bring messages and tools into each form."""


class Tokenizer(ABC):
    """A tokenizer, as the gateway and the embedded engine use it. Kinds differ in `encode`, and in who renders a chat.

    `name` is for logs. `exact` says whether the ids are the engine's; only the byte-level fallback has False.
    `longest_token_bytes` is the most bytes of text in one token; None if there is no bound.
    `cuts` says where a text may be cut into parts for `encode_parts`; None: nowhere. `ids_around` are the ids before
    and after a plain prompt, which `encode_parts` does not add. `special_ids` include the ids that end a turn.
    `guesses_template` is True if no chat template was given: an engine may then accept a chat that is refused here.
    """

    name: str
    exact = True
    guesses_template = False
    longest_token_bytes: int | None = None
    cuts: Cuts | None = None
    ids_around: tuple[Sequence[int], Sequence[int]] = ((), ())
    special_ids: frozenset[int] = frozenset()
    _variables: Mapping[str, Any] = MappingProxyType({})
    """Variables for every template, besides the call's own."""

    def __init__(self) -> None:
        self._renders_alike: dict[str, bool] = {}
        self._shapes = ShapeMemo()

    @property
    def differences(self) -> int:
        """1 once the native encoder has given wrong ids, so that its earlier ids may be wrong too; 0 until then."""
        return 0

    @property
    def short_characters(self) -> int:
        """How many characters it encodes within some 2 ms, which an event loop may do itself."""
        return SHORT_CHARACTERS

    def prepare(self) -> None:  # noqa: B027 - most kinds load all at once
        """Load what encoding needs now, instead of at the first prompt: 0.5 s for 38,000 tokens."""

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a plain prompt. The text of a special token becomes that token, as in the engines.

        Raises CallerError for text that is not valid Unicode.
        """

    def encode_array(self, text: str, *, add_special_tokens: bool = True) -> array[int]:
        """The ids of `encode` as unsigned 32-bit integers: a list takes nine times as much memory."""
        return array("I", self.encode(text, add_special_tokens=add_special_tokens))

    def encode_parts(self, parts: Sequence[str]) -> list[array[int]]:
        """As `encode_array`, for each part of a text, without special tokens around it."""
        return [self.encode_array(part, add_special_tokens=False) for part in parts]

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of known ids, with special tokens. Bytes that are not UTF-8 become U+FFFD."""

    # For the fingerprint (`plait.backends.protocol.tokenizer_fingerprint`).

    @cached_property
    def fingerprint(self) -> TokenizerFingerprint:
        """The tokenizer's digests, made at the first access, in up to a second for 256,000 tokens."""
        return fingerprint(self)

    @cached_property
    def requested(self) -> str:
        """The digest of clients' chats in SGLang's form (`plait.backends.protocol.chat_rendering`)."""
        return requested_digest(self)

    @abstractmethod
    def vocabulary(self) -> Mapping[str, int]:
        """All tokens with their ids, added ones among them."""

    @abstractmethod
    def added_tokens(self) -> Iterable[str]:
        """The tokens that are found in a text before all else."""

    def render_probe(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str | None:
        """A chat by the model's template, given to it as it is; None if it refuses the chat."""
        try:
            template = self._template(None, tools)
            if template == CHATML:  # so that a gateway of embedded engines need not import transformers
                return render(template, messages, tools, True, variables)
            return self._by_transformers(
                messages, tools=tools, chat_template=template, add_generation_prompt=True, **variables
            )
        except (CallerError, *TEMPLATE_ERRORS):
            return None

    def render_requested(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str | None:
        """A client's chat in SGLang's form; None if it is refused."""
        try:
            _, prepared, prepared_tools = self._prepared(None, messages, tools, "sglang")
        except (CallerError, *TEMPLATE_ERRORS):
            return None
        return self.render_probe(prepared, prepared_tools, variables)

    def files(self) -> dict[str, bytes]:
        """The files that an engine with this tokenizer offers to gateways, by name; empty if there are none."""
        return {}

    # Chats.

    @abstractmethod
    def _template(self, chat_template: str | None, tools: list[dict[str, Any]] | None) -> str:
        """The template to render. `chat_template` is the template in the call."""

    @abstractmethod
    def _by_transformers(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The text of a chat with prepared messages and tools. `options` has the template, too."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of a rendered chat; `options` and errors are those of `render_chat`."""
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
        form: ChatForm = "vllm",
        salt: Hashable = None,
    ) -> str:
        """The text of a chat with its special tokens, to be encoded without adding any.

        `chat_template` replaces the tokenizer's template, which gets messages and tools in this `form`. Chats of one
        `salt` share the rendered text of their tools. Raises CallerError for a chat that the template refuses,
        UnsupportedError for content that is not text.
        """
        if not messages:
            raise CallerError("A chat needs at least one message.", param="messages")
        is_usual, plain = chat_template is None and not continue_final_message, None
        if is_usual:
            text, plain = self._shapes.render(
                messages, tools, template_kwargs, (salt, form), add_generation_prompt=add_generation_prompt
            )
            if text is not None:
                return text
        try:
            template, prepared, prepared_tools = self._prepared(chat_template, messages, tools, form)
            variables = template_options(template, template_kwargs) if template_kwargs else {}
            if is_usual and OF_TRANSFORMERS.isdisjoint(variables) and self._try_rendering(template):
                variables |= {"tools": prepared_tools, "add_generation_prompt": add_generation_prompt}
                return self._rendered(template, prepared, {**self._variables, **variables}, plain)
            return self._by_transformers(
                prepared,
                tools=prepared_tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except TEMPLATE_ERRORS as error:
            # Not the caller's fault: SGLang then tries the tools in another form.
            kind = UnsupportedError if form == "sglang" and tools else CallerError
            raise kind(f"The chat template refused the messages: {error}", param="messages") from error

    def _prepared(
        self,
        chat_template: str | None,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        form: ChatForm,
    ) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]] | None]:
        """The template, and the messages and tools that it gets in this form."""
        prepare_messages, prepare_tools = _FORMS[form]
        prepared_tools = None if tools is None else prepare_tools(tools)
        template = self._template(chat_template, prepared_tools)
        return template, prepare_messages(messages, template), prepared_tools

    def _rendered(
        self, template: str, prepared: list[dict[str, Any]], variables: dict[str, Any], plain: PlainChat | None
    ) -> str:
        """The text of a chat, rendered without transformers. The shape of a `plain` chat is learned."""
        text = render(template, prepared, variables["tools"], variables["add_generation_prompt"], variables)
        if plain is not None:
            self._shapes.learn(plain, template, prepared, variables, text)
        return text

    def _try_rendering(self, template: str) -> bool:
        """Whether `render` and transformers give the probe chats the same texts. Each template is tried once."""
        alike = self._renders_alike.get(template)
        if alike is None:
            alike = template == CHATML or (
                OF_TRANSFORMERS.isdisjoint(self._variables)
                and all(
                    self._tried(template, *chat, transformers=True) == self._tried(template, *chat) for chat in TRIED
                )
            )
            self._renders_alike[template] = alike
        return alike

    def _tried(
        self, template: str, messages: Messages, tools: Messages | None, *, transformers: bool = False
    ) -> list[str]:
        """A chat's texts without and with a generation prompt, or the error's name if the chat is refused."""
        texts = []
        for adds in (False, True):
            try:
                if transformers:
                    options = {"tools": tools, "chat_template": template, "add_generation_prompt": adds}
                    texts.append(self._by_transformers(messages, **options))
                else:
                    texts.append(render(template, messages, tools, adds, self._variables))
            except TEMPLATE_ERRORS as error:
                texts.append(type(error).__name__)
        return texts


def not_unicode() -> CallerError:
    return CallerError("The prompt is not valid Unicode: it has half of a surrogate pair.", param="prompt")
