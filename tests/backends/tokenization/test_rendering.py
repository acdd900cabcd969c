"""Chats are rendered as transformers renders them, for the templates of ten model families and for odd ones."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from plait.backends.tokenization.chat_messages import template_messages, template_tools
from plait.backends.tokenization.chat_template import EMBEDDED_FOLDER, TEMPLATE_ERRORS, render
from plait.backends.tokenization.file_tokenizer import HuggingFaceTokenizer
from tests.backends.tokenization.family_templates import FAMILIES, KIMI

CHATS = 40
CONTENTS = [
    "",
    " ",
    "Hi.",
    " two\nlines \n",
    "<think>\nhm\n</think>\n\nSo.",
    "é<b>&'\"☔{{ x }}",
    "<|im_end|>",
    "[INST]",
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a <word> up; it's «fast».",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "enum": ["a", "é"]},
                    "many": {"type": "array", "items": {"type": "number"}, "default": None},
                    "items": {"type": ["string", "null"]},
                },
                "required": ["word"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def loaded(folder: Path, template: str) -> HuggingFaceTokenizer:
    """The shipped tokenizer with another template and special tokens."""
    (folder / "tokenizer.json").write_bytes((EMBEDDED_FOLDER / "tokenizer.json").read_bytes())
    config = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|im_end|>"}))
    return HuggingFaceTokenizer("t", folder)


def chat(dice: random.Random) -> list[dict[str, Any]]:
    """Mostly turns of a user and an assistant, with calls of tools, and at times in any order."""

    def content() -> Any:
        text = dice.choice(CONTENTS)
        return text if dice.random() < 0.8 else [{"type": "text", "text": text}, {"type": "text", "text": "more"}]

    messages: list[dict[str, Any]] = []
    if dice.random() < 0.5:
        messages.append({"role": dice.choice(["system", "system", "developer"]), "content": content()})
    for _ in range(dice.randint(1, 3)):
        messages.append({"role": "user", "content": content()} | dice.choice([{}, {}, {"name": "Ada"}]))
        if dice.random() < 0.4:
            arguments = dice.choice([{"word": "é"}, '{"many": [1, 2.5, null]}', "{}", "{broken", None])
            call = {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
            calls = [call] * dice.randint(1, 2)
            messages.append({"role": "assistant", "content": dice.choice([None, "", "So:"]), "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": "call00001", "content": content()} for _ in calls]
        if dice.random() < 0.7:
            thought: dict[str, Any] = dice.choice(
                [{}, {}, {"reasoning": " hm\n"}, {"reasoning_content": ""}, {"refusal": None}]
            )
            messages.append({"role": "assistant", "content": content(), **thought})
    if dice.random() < 0.1:
        dice.shuffle(messages)
    return messages


def outcome(way: Any, *arguments: Any, **options: Any) -> str:
    """What a way of rendering gives: the text, or the kind of its error."""
    try:
        return str(way(*arguments, **options))
    except TEMPLATE_ERRORS as error:
        return type(error).__name__


@pytest.mark.parametrize("family", FAMILIES)
def test_the_templates_of_model_families_give_the_texts_of_transformers(tmp_path: Path, family: str) -> None:
    template, dice = FAMILIES[family], random.Random(family)
    tokenizer, rendered = loaded(tmp_path, template), set()
    for _ in range(CHATS):
        tools = template_tools(dice.choice([None, None, TOOLS, TOOLS[1:], []]))
        messages = template_messages(chat(dice), template)
        options: dict[str, Any] = dice.choice([{}, {"enable_thinking": False}, {"thinking": True}])
        adds = dice.random() < 0.7
        mine = outcome(render, template, messages, tools, adds, {**tokenizer._variables, **options})
        theirs = outcome(
            tokenizer._by_transformers,
            messages, tools=tools, chat_template=template, add_generation_prompt=adds, **options,
        )  # fmt: skip
        assert mine == theirs
        rendered.add(mine)
    assert len(rendered) > CHATS / 4
    assert outcome(tokenizer.render_chat, [{"role": "user", "content": "Hi."}])
    assert tokenizer._renders_alike[template]


@pytest.mark.parametrize("family", ["Gemma", "GLM", "Kimi"])
def test_the_places_of_images_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    template, tokenizer = FAMILIES[family], loaded(tmp_path, FAMILIES[family])
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}, {"type": "image", "image_url": None}]
    messages = [{"role": "user", "content": parts}]
    mine = render(template, messages, None, True, tokenizer._variables)
    options = {"tools": None, "chat_template": template, "add_generation_prompt": True}
    assert mine == tokenizer._by_transformers(messages, **options)
    assert mine.count("image") >= 2


ODD = {
    "namespace": "{% set ns = namespace(a=1, b='x') %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.b }}{{ ns.none }}",
    "a private attribute of a namespace": "{% set ns = namespace(_a=1) %}{{ ns._a }}",
    "a namespace from a dict": "{{ namespace({'a': [1]}).a }}{{ namespace(self=2).self }}",
    "a method kept": "{% set ns = namespace(f='{0.__class__}'.format) %}{{ ns.f(1) }}",
    "format": "{{ '{0.role} {1}'.format(messages[0], 2) }}{{ '{a}'.format_map({'a': 1}) }}",
    "a method of dicts": "{% for k, v in messages[0].items() %}{{ k }}{{ v }}{% endfor %}{{ messages[0].get('x', 1) }}",
    "a key that is a method's name": "{{ {'items': 1, 'keys': 2}.items is callable }}{{ {'items': 1}['items'] }}",
    "what changes a list": "{{ messages.append(1) }}",
    "what changes a dict": "{{ messages[0].update({'a': 1}) }}",
    "what is internal": "{{ messages.__class__.__mro__ }}{{ ''.__class__ }}{{ messages[0].__class__ }}",
    "what is not there": "{{ messages[0].none is defined }}{{ messages[0].none }}{{ messages[0]['none'] }}",
    "dict": "{{ dict(a=1).a }}{{ dict.fromkeys(['a'], 1) }}{{ dict.mro }}",
    "tojson": "{{ messages | tojson(indent=2, sort_keys=true) }}{{ 1.5 | tojson }}{{ none | tojson }}"
    "{{ 'é<' | tojson }}",
    "tojson in ASCII": "{{ messages | tojson(ensure_ascii=true) }}",
    "loops": "{% for m in messages %}{{ loop.previtem.role }}{{ loop.cycle(1, 2) }}{{ loop.depth }}"
    "{{ loop.changed(m) }}"
    "{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}",
    "strings": "{{ ' a '.strip().upper().split('x', 1)[0].replace('A', 'b') }}{{ 'a'.join(['b', 'c']) }}{{ 'a'.nope }}",
    "generation": "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}"
    "{% endgeneration %}{{ x }}{% endfor %}",
    "macros": "{% macro f(x) %}[{{ x.strip() }}{{ caller() }}]{% endmacro %}{% call f(' a ') %}b{% endcall %}",
    "documents": "{{ documents is none }}{{ bos_token }}{{ pad_token is defined }}",
    "trims": "{% if true %}\n  a\n  {% endif %}\nb\n",
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_templates_give_what_they_give_in_transformers(tmp_path: Path, kind: str) -> None:
    tokenizer, messages = loaded(tmp_path, ODD[kind]), chat(random.Random(kind))
    prepared = template_messages(messages, ODD[kind])
    options = {"tools": None, "chat_template": ODD[kind], "add_generation_prompt": False}
    theirs = outcome(tokenizer._by_transformers, prepared, **options)
    assert outcome(render, ODD[kind], prepared, None, False, tokenizer._variables) == theirs


def test_a_template_that_differs_is_rendered_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "plait.backends.tokenization.tokenizer"
    monkeypatch.setattr(f"{module}.render", lambda *_arguments: "something else")
    tokenizer = loaded(tmp_path, KIMI)
    messages = [{"role": "user", "content": "Hi."}]
    assert "Hi." in tokenizer.render_chat(messages)
    assert tokenizer._renders_alike == {KIMI: False}


def test_an_option_that_transformers_takes_for_itself_is_left_to_it(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, "{{ documents[0].text if documents else 'none' }}{{ padding is defined }}")
    messages = [{"role": "user", "content": "Hi."}]
    assert tokenizer.render_chat(messages) == "noneFalse"
    options = {"documents": [{"text": "a"}], "padding": True}
    assert tokenizer.render_chat(messages, template_kwargs=options) == "aFalse"
