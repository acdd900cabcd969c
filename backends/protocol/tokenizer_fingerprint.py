"""The fingerprint of a tokenizer, by which two processes find out whether they encode texts and chats alike.

An engine reports the fingerprint of its tokenizer, made once at the start, and the gateway compares it with its own.
The two tokenizers may be of different libraries, so the fingerprint only uses what every library offers: tokens with
ids, the ids of probe texts, and rendered probe chats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, Protocol

import msgspec

Messages = list[dict[str, Any]]

TEXTS: Final = (
    "The quick brown fox jumps over the lazy dog. It's HE'LL, DON'T, we've; I'm 'they'd'.",
    " leading,  two,   three spaces, \t\ttabs \n\n\n  line breaks\r\n and the end ",
    "1 12 123 1234 12345678 0.5 1,000,000 3.14e-10 0xFF v2.0.1 12:30 2024-02-29 ²½ ٣٤٥",
    "camelCase HTTPServer XMLHttpRequest2 snake_case __init__ kebab-case CONSTANT_NAME aB Ab",
    "def f(x):\n    return {'a': [1, 2.5], \"b\": x != None}  # why?\n\n\tif (a&&b||!c) { x->y(); }\r\n}\n",
    'https://example.org/a/b?c=d&e=%20#f <tag attr="v"/> a/b\\c //\n/ ...!!!???--- *** (((\n\n))) $€#@~`^|',
    "Café Cafe\u0301 Ångström A\u030angstro\u0308m 한글 \u1112\u1161\u11ab \ufb01ne \uff21\uff22 \u2460 \u017f \u01c5a",
    "İstanbul ß Straße Αθήνα Привет, мир",
    "你好\uff0c世界。今天天气很好。 こんにちはカタカナ漢字abc123",
    "हिन्दी भाषा ภาษาไทย العربية עִבְרִית தமிழ்",
    "😀👨\u200d👩\u200d👧 ❤\ufe0f 🇩🇪 \u200b\u00a0\u2003\u3000\u2028\ufeff\x07\x7f \U00013000 \ufffd",
    "<s>a</s> <|im_start|>b<|im_end|> <|endoftext|><|eot_id|>[INST] c [/INST]<pad> <unk>\u2581d Ġe<0x41> f",
    "",
)
"""What normalizers and pre-tokenizers treat differently: words, digits, spaces, code, scripts, special tokens."""

TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a <word> up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
USER: Final = {"role": "user", "content": " Say «hi». "}
_ANSWER: Final = {"role": "assistant", "content": "Hi.\n"}
_CALL: Final = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": {"word": "é<b>"}}}
    ],
}
_RESULT: Final = {"role": "tool", "tool_call_id": "call00001", "name": "look_up", "content": '{"found": true}'}

CHATS: Final[tuple[tuple[Messages, Messages | None], ...]] = (
    ([USER], None),
    ([{"role": "system", "content": "Be terse."}, USER, _ANSWER, USER], None),
    ([{"role": "user", "content": [{"type": "text", "text": "In"}, {"type": "text", "text": "parts"}]}], None),
    ([USER, _CALL, _RESULT, _ANSWER, USER], [TOOL]),
)
"""Messages and tools as templates get them. Few templates take all of them: a refusal is an answer too."""


DIGEST_BYTES: Final = 16

PROBED_TOKENS: Final = 4_096
"""How many tokens of the vocabulary are probed, at even distances: some 25 kB of text, twice, in 10 to 50 ms."""
TOKENS_A_TEXT: Final = 64
"""How many of them a probe text has: below any model's context, beyond which transformers warns."""

MARK: Final = "\u0301"
"""An accent: whether it belongs to the word before it is the smallest difference between published patterns."""

DATE: Final = "29 Feb 2024"
"""The date for templates that ask for one, because two processes render at different times."""

PROBE_VARIABLES: Final[Mapping[str, Any]] = {"strftime_now": lambda _format: DATE}

SHOWN_CHARACTERS: Final = 256
"""How much of a tokenizer's name is shown, since the name may be a long path."""


class Fingerprinted(Protocol):
    """What the fingerprint needs of a tokenizer. `name` is the folder or name that it was loaded by."""

    name: str

    def vocabulary(self) -> Mapping[str, int]:
        """All tokens with their ids, added ones among them. Tokens may be bytes in some libraries."""
        ...

    def added_tokens(self) -> Iterable[str]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """The ids of a text, with or without the special tokens around a plain prompt."""
        ...

    def render_probe(self, messages: Messages, tools: Messages | None, variables: Mapping[str, Any]) -> str | None:
        """A chat by the default template, with a generation prompt; None if the template refuses the chat.

        The template gets the messages unchanged. `variables` replace the template's own of these names.
        """
        ...


class TokenizerFingerprint(msgspec.Struct, frozen=True):
    """Digests that are equal for equal tokenizers. `name` is for messages only.

    `vocabulary` covers all tokens with their ids, `ids` the ids of probe texts, `prompt_ids` the ids of the same texts
    as plain prompts (with a BOS, for example), and `chats` the rendered probe chats.
    """

    name: str
    vocabulary: str
    ids: str
    prompt_ids: str
    chats: str

    @property
    def is_none(self) -> bool:
        """Whether the engine has no tokenizer, and so takes token ids only."""
        return not self.vocabulary


NO_TOKENIZER: Final = TokenizerFingerprint("", "", "", "", "")
"""Reported by an engine that was started without a tokenizer."""


def fingerprint(tokenizer: Fingerprinted) -> TokenizerFingerprint:
    """The tokenizer's fingerprint. Takes up to a second for 256,000 tokens. Raises what the tokenizer raises."""
    vocabulary = _by_id(tokenizer.vocabulary())
    texts = probe_texts(tokenizer.vocabulary(), tokenizer.added_tokens())
    return TokenizerFingerprint(
        tokenizer.name[:SHOWN_CHARACTERS],
        digest(vocabulary),
        digest([list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]),
        digest([list(tokenizer.encode(text)) for text in TEXTS]),
        digest([_rendered(tokenizer, *chat) for chat in CHATS]),
    )


def probe_texts(vocabulary: Mapping[str, int], added: Iterable[str]) -> list[str]:
    """Texts by which tokenizers with this vocabulary and these added tokens are compared."""
    return [*TEXTS, *_texts_of(_by_id(vocabulary)), *_texts_around(sorted(added))]


def _by_id(vocabulary: Mapping[str, int]) -> list[tuple[int, str]]:
    return sorted((token_id, token) for token, token_id in vocabulary.items())


def _texts_of(vocabulary: Sequence[tuple[int, str | bytes]]) -> Iterator[str]:
    """Texts made of the vocabulary's tokens; the same for any two tokenizers with the same vocabulary."""
    step = max(1, len(vocabulary) // PROBED_TOKENS)
    words = [_surface(token) for _, token in vocabulary[::step]]
    for begin in range(0, len(words), TOKENS_A_TEXT):
        some = words[begin : begin + TOKENS_A_TEXT]
        yield "".join(some)
        yield MARK.join(some)


def _texts_around(added: Sequence[str]) -> Iterator[str]:
    """Texts that show what an added token does to the text before and behind it."""
    for begin in range(0, len(added), TOKENS_A_TEXT // 4):
        yield "".join(f"a {token} b{token}c\n" for token in added[begin : begin + TOKENS_A_TEXT // 4])


def _surface(token: str | bytes) -> str:
    """About a token's text: vocabularies write a space, and byte-level ones a line break, as another character."""
    text = token.decode(errors="replace") if isinstance(token, bytes) else token
    return text.replace("\u0120", " ").replace("\u2581", " ").replace("\u010a", "\n")


def _rendered(tokenizer: Fingerprinted, messages: Messages, tools: Messages | None) -> str | None:
    return tokenizer.render_probe(messages, tools, PROBE_VARIABLES)


def digest(value: object) -> str:
    return blake2b(msgspec.msgpack.encode(value), digest_size=DIGEST_BYTES).hexdigest()
