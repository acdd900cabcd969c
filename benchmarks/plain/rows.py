"""What `python -m benchmarks dataplane` sends: bodies that never repeat, each a new question behind a shared prefix."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pydoc_data import topics
from typing import Any, Final, Literal

from benchmarks.plain.answering_engine import MODEL, PACED
from benchmarks.train_tokenizer import docstrings, stdlib_sources
from e2e.faults.raw_client import CHAT
from plait.gateway.guests.responses.background_call import RESPONSES_PATH as RESPONSES
from plait.gateway.guests.translation.translated_api import MESSAGES_PATH as MESSAGES

QUESTION_CHARACTERS: Final = 150
SLO: Final = {"plait-slo-ttft-ms": "2000", "plait-slo-tpot-ms": "100"}

Source = Literal["prose", "code"]


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of request. `shared_characters` come first and are the same; `new_characters` never come twice.

    `requests` are sent in a round by `concurrency` clients. With `source`, all text is cut out of it at random places.
    """

    name: str
    what: str
    requests: int
    concurrency: int
    shared_characters: int = 60
    new_characters: int = QUESTION_CHARACTERS
    tokens: int = 8
    stream: bool = False
    paced: bool = False
    tools: int = 0
    turns: int = 1
    source: Source | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    path: str = CHAT
    background: bool = False

    def body(self, number: int) -> dict[str, Any]:
        """The request with this number; two numbers have different questions."""
        prompt, limit = ("input", "max_output_tokens") if self.path == RESPONSES else ("messages", "max_tokens")
        return {
            "model": MODEL,
            prompt: self._messages(number),
            limit: self.tokens,
            "stream": self.stream,
            **({"background": True} if self.background else {}),
            **({"seed": PACED} if self.paced else {}),
            **({"tools": _tools(self.tools)} if self.tools else {}),
        }

    def _messages(self, number: int) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self._text(f"shared {self.name}", number, self.shared_characters)}]
        for turn in range(1, self.turns):
            role = "user" if turn % 2 else "assistant"
            messages.append({"role": role, "content": self._text(f"turn {turn}", number, self.shared_characters)})
        question = f"Question {number}. {text(f'question {number}', self.new_characters)}"
        return [*messages, {"role": "user", "content": question}]

    def _text(self, seed: str, number: int, characters: int) -> str:
        """A turn's share of so many characters; the same for each request unless there is a source."""
        share = characters // self.turns
        return text(seed, share) if self.source is None else cut_out(self.source, f"{seed} of {number}", share)


ROWS: Final = (
    Row("A", "300 B", 300, 8),
    Row("B", "24 KB, 2,000 characters new", 120, 8, 22_000, 2_000),
    Row("C", "100 KB, 4,000 characters new", 60, 8, 96_000, 4_000),
    Row("T", "8 tools, 17 messages, 24 KB, 500 characters new", 100, 8, 18_000, 500, tools=8, turns=16),
    Row("P", "24 KB of prose, all new", 60, 8, 24_000, source="prose"),
    Row("K", "24 KB of code, all new", 60, 8, 24_000, source="code"),
    Row("U", "8 tools, 17 messages, 24 KB of prose, all new", 60, 8, 18_000, 500, tools=8, turns=16, source="prose"),
    Row("H", "400 KB of code, all new, alone", 6, 1, 400_000, source="code"),
    Row("J", "300 B, with a TTFT and a TPOT", 300, 8, headers=SLO),
    Row("L", "100,000 tokens, 4,000 characters new", 12, 4, 420_000, 4_000),
    Row("O", "a stream of 1,000 tokens at once", 60, 8, tokens=1_000, stream=True),
    Row("S", "100 streams of 50 tokens, one each 10 ms", 100, 100, tokens=50, stream=True, paced=True),
)
OF_OTHER_APIS: Final = (
    Row("M", "S as messages", 100, 100, tokens=50, stream=True, paced=True, path=MESSAGES),
    Row("R", "S as responses", 100, 100, tokens=50, stream=True, paced=True, path=RESPONSES),
    Row("G", "R in the background", 100, 100, tokens=50, stream=True, paced=True, path=RESPONSES, background=True),
)
"""What other routers do not translate, or not in the same way."""


@cache
def _library(source: Source) -> str:
    """Python's standard library: its docstrings, or all of it."""
    files = stdlib_sources()
    return "\n".join(files if source == "code" else [text for file in files for text in docstrings(file)])


def cut_out(source: Source, seed: str, characters: int) -> str:
    """So many characters of a source, from a place that the seed gives."""
    library = _library(source)
    begin = random.Random(seed).randrange(len(library) - characters)
    return library[begin : begin + characters]


@cache
def _sentences() -> Sequence[str]:
    prose = " ".join(topics.topics[name] for name in sorted(topics.topics))
    return [sentence for line in prose.split(". ") if (sentence := " ".join(line.split()))]


def text(seed: str, characters: int) -> str:
    """So many characters of Python's reference, its sentences in an order that the seed gives."""
    dice, parts, length = random.Random(seed), [], 0
    while length < characters:
        parts.append(dice.choice(_sentences()))
        length += len(parts[-1]) + 2
    return ". ".join(parts)[:characters]


@cache
def _tools(count: int) -> list[dict[str, Any]]:
    def parameters(number: int) -> dict[str, Any]:
        named = {f"field_{i}": {"type": "string", "description": text(f"{number}.{i}", 60)} for i in range(4)}
        return {"type": "object", "properties": named, "required": list(named)[:2]}

    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": text(f"tool {number}", 120),
                "parameters": parameters(number),
            },
        }
        for number in range(count)
    ]


SHORT_TEMPLATE: Final = (
    "{% for m in messages %}<|start|>{{ m.role }}\n\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}"
)

QWEN_SHAPED_TEMPLATE: Final = """\
{%- if tools %}
{{- '<|start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'You may call these functions:\\n<functions>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</functions>\\nA call is a JSON object in <call></call>.<|end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|start|>system\\n' + messages[0].content + '<|end|>\\n' }}
{%- endif %}
{%- set last = namespace(query=messages|length - 1, is_open=true) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if last.is_open and message.role == 'user' and message.content is string %}
{%- set last.is_open = false %}{%- set last.query = index %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|start|>' + message.role + '\\n' + content + '<|end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > last.query and thought %}
{{- '<|start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content }}
{%- else %}{{- '<|start|>assistant\\n' + content }}{%- endif %}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
{{- '\\n<call>' + (call.function | tojson) + '</call>' }}
{%- endfor %}
{%- endif %}
{{- '<|end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}
"""


TEMPLATES: Final = {"short": SHORT_TEMPLATE, "Qwen's shape": QWEN_SHAPED_TEMPLATE}
