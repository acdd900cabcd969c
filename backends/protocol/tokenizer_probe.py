"""The texts and chats by which tokenizers are told apart (`tokenizer_fingerprint`)."""

from __future__ import annotations

from typing import Any, Final

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

_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a <word> up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_USER: Final = {"role": "user", "content": " Say «hi». "}
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
    ([_USER], None),
    ([{"role": "system", "content": "Be terse."}, _USER, _ANSWER, _USER], None),
    ([{"role": "user", "content": [{"type": "text", "text": "In"}, {"type": "text", "text": "parts"}]}], None),
    ([_USER, _CALL, _RESULT, _ANSWER, _USER], [_TOOL]),
)
"""Messages and tools as templates get them. Few templates take all of them: a refusal is an answer too."""
