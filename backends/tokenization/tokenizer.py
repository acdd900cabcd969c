"""Tokenizers turn texts and chats into the engine's token ids, so that prefix hashes agree with the engine's cache.

There are three kinds: Hugging Face files, as the engines load them; tiktoken's encodings; bytes, as a fallback.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import jinja2
import structlog

from plait.backends.errors import CallerError
from plait.backends.tokenization.chat_messages import template_messages, template_tools
from plait.backends.tokenization.chat_template import read_template, template_options
from plait.backends.tokenization.cuts import Cuts, cuts_of_words, find_cuts
from plait.backends.tokenization.late_transformers import import_transformers
from plait.backends.tokenization.vocabulary import ids_around, longest_token_bytes
from plait.backends.tokenization.word_patterns import GPT2

if TYPE_CHECKING:
    import tiktoken

EMBEDDED_FOLDER: Final = Path(__file__).parents[1] / "embedded" / "tokenizer"
# The embedded engine's template is ChatML. Tokenizers without a template use it too.
CHATML_PATH: Final = EMBEDDED_FOLDER / "chat_template.jinja"
ACCEPTED_SPECS: Final = (
    "a directory with Hugging Face files (tokenizer.json, tokenizer_config.json, ...), 'tiktoken:NAME', "
    "'tiktoken:/path/to/cl100k_base.tiktoken', 'embedded', 'bytes'"
)

# Errors that a template can raise for messages that it does not expect. vLLM answers all of them with a 400.
TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
)  # fmt: skip

log = structlog.get_logger(__name__)


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


class _ChatTokenizer(ABC):
    """Turns a chat into ids with `encode`, in the same way for every kind of tokenizer."""

    name: str
    exact = True
    longest_token_bytes: int | None = None
    cuts: Cuts | None = None
    ids_around: tuple[Sequence[int], Sequence[int]] = ((), ())
    special_ids: frozenset[int] = frozenset()

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    @abstractmethod
    def _template(self, chat_template: str | None, tools: list[dict[str, Any]] | None) -> str:
        """The template to render. `chat_template` is the template in the call."""

    @abstractmethod
    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str: ...

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        return [self.encode(part, add_special_tokens=False) for part in parts]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
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


class HuggingFaceTokenizer(_ChatTokenizer):
    """A folder's tokenizer.json and chat template, rendered by transformers and encoded by `tokenizers`."""

    def __init__(self, name: str, folder: Path, chat_template: str | None = None) -> None:
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"tokenizer {name!r}: {folder} has no tokenizer.json")
        import_transformers()
        # Parts are encoded in batches, for which `tokenizers` would take all cores. A turn has one.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Not PreTrainedTokenizerFast: the engines use AutoTokenizer, and some models' classes split text differently.
        from transformers import AutoTokenizer  # noqa: PLC0415

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"tokenizer {name!r} cannot be loaded from {folder}: {error}") from error
        if not tokenizer.is_fast:
            raise ValueError(
                f"tokenizer {name!r}: {type(tokenizer).__name__} has no fast implementation, which Plait needs"
            )
        self.name = name
        self._tokenizer = tokenizer
        self._own_template = chat_template
        self._backend = tokenizer.backend_tokenizer
        # The file may set truncation and padding. transformers, and so the engines, undo them for a prompt.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
        files = json.loads(self._backend.to_str())
        self.longest_token_bytes = longest_token_bytes(files)
        self.special_ids = frozenset(tokenizer.all_special_ids)
        around = ids_around(files)
        if around is not None and [*around[0], *around[1]] == self._backend.encode("").ids:
            self.cuts, self.ids_around = find_cuts(files), around

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a plain prompt, with the BOS and other tokens that the files require."""
        return self._ids_of([text], add_special_tokens)[0]

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        """The ids of each part, without other tokens."""
        return self._ids_of(parts, add_special_tokens=False)

    def _ids_of(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        try:
            # The same ids as `encode`, 10 to 25 % faster, because it keeps no offsets. Both release the GIL.
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError as error:  # `tokenizers` raises this for a lone surrogate
            raise _not_unicode() from error
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids; ids that the vocabulary lacks are left out."""
        return str(self._backend.decode(token_ids, skip_special_tokens=False))

    def _template(self, chat_template: str | None, tools: list[dict[str, Any]] | None) -> str:
        chosen = chat_template or self._own_template
        if chosen is None and self._tokenizer.chat_template is None:
            raise CallerError(
                "The model has no chat template. Use /v1/completions, or set a chat template.", param="messages"
            )
        return str(self._tokenizer.get_chat_template(chosen, tools=tools))

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))


class _PlainTokenizer(_ChatTokenizer):
    """A tokenizer without a template of its own. It uses ChatML unless another template is given."""

    def __init__(self, chat_template: str | None) -> None:
        import_transformers()
        self._own_template = chat_template or read_template(CHATML_PATH)

    def _template(self, chat_template: str | None, tools: list[dict[str, Any]] | None) -> str:  # noqa: ARG002
        return chat_template or self._own_template

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - imported by now

        prompts = render_jinja_template(conversations=[messages], **options)[0]
        return str(prompts[0])


class TiktokenTokenizer(_PlainTokenizer):
    """One of OpenAI's encodings."""

    def __init__(self, name: str, encoding: tiktoken.Encoding, chat_template: str | None = None) -> None:
        super().__init__(chat_template)
        self.name = name
        self._encoding = encoding
        self.longest_token_bytes = max(map(len, encoding.token_byte_values()), default=1)
        self.cuts = cuts_of_words(encoding._pat_str, encoding.special_tokens_set)  # noqa: SLF001 - tiktoken documents it

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        """The ids of a plain prompt; the encodings add no special tokens."""
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids; KeyError where the encoding lacks one."""
        return self._encoding.decode(token_ids)


class ByteTokenizer(_PlainTokenizer):
    """Each byte is a token, for a model without a tokenizer at hand. Shared prefixes stay shared."""

    name = "bytes"
    exact = False
    longest_token_bytes: int | None = 1
    cuts = cuts_of_words(GPT2, ())  # any cut would do

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        """The bytes of the prompt's UTF-8."""
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise _not_unicode() from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the bytes."""
        return bytes(token_ids).decode(errors="replace")


def load_tokenizer(spec: str, *, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer that `spec` names (see ACCEPTED_SPECS). The Jinja file `chat_template` replaces its chat template.

    Reads local files only, but tiktoken downloads a `tiktoken:NAME` once. Raises ValueError that says what to provide.
    """
    template = None if chat_template is None else read_template(Path(chat_template).expanduser())
    if spec == "bytes":
        log.warning("tokens are counted as bytes: cached-token predictions will be wrong for real engines")
        return ByteTokenizer(template)
    if spec == "embedded":
        return HuggingFaceTokenizer(spec, EMBEDDED_FOLDER, template)
    kind, _, name = spec.partition(":")
    if kind == "tiktoken" and name:
        from plait.backends.tokenization.tiktoken_encoding import load_encoding  # noqa: PLC0415 - tiktoken brings its own HTTP client

        return TiktokenTokenizer(spec, load_encoding(name), template)
    folder = Path(spec).expanduser()
    if not folder.is_dir():
        raise ValueError(f"tokenizer {spec!r} is not a directory on this machine; give {ACCEPTED_SPECS}")
    return HuggingFaceTokenizer(spec, folder, template)


def _not_unicode() -> CallerError:
    return CallerError("The prompt is not valid Unicode: it has half of a surrogate pair.", param="prompt")
