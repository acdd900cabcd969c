"""Chats that are put together from a recorded shape have the text that Jinja gives them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.backends.tokenization.chat_messages import template_messages, template_tools
from plait.backends.tokenization.chat_template import TEMPLATE_ERRORS, render, template_options
from plait.backends.tokenization.template_shapes import MOST_WAYS, Shape, ShapeMemo, record
from tests.backends.tokenization.family_templates import FAMILIES
from tests.backends.tokenization.test_rendering import CONTENTS, ODD, TOOLS, loaded

MORE = {
    "a short one": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "in parts": "{% for m in messages %}{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endfor %}",
    "questions": "{% for m in messages %}{% if 'x' in m.content and not m.content.strip().endswith('x') %}a{% endif %}"
    "{{ m.content.lstrip('\\n') ~ '!' }}{{ m.content == 'Hi.' }}{{ m.content != '' }}"
    "{{ m.content | default('d', true) }}{% endfor %}",
    "lengths": "{% for m in messages %}{{ m.content | length }}{% endfor %}",
    "pieces": "{% for m in messages %}{{ m.content[:3] }}{{ m.content.split('<')[0] }}{% endfor %}",
    "letters": "{% for m in messages %}{% for letter in m.content %}{{ letter }}{% endfor %}{% endfor %}",
    "upper case": "{% for m in messages %}{{ m.content.upper() }}{{ m.content | upper }}{% endfor %}",
    "as JSON": "{% for m in messages %}{{ m.content | tojson }}{{ m | tojson }}{% endfor %}",
    "in another": "{% for m in messages %}{{ m.content in 'Hi. You.' }}{% endfor %}",
    "to another": "{% for m in messages %}{{ 'Hi. You.'.replace(m.content, '') }}{% endfor %}",
    "as a format": "{% for m in messages %}{{ '%s!' % m.content }}{{ '{}?'.format(m.content) }}{% endfor %}",
    "as a key": "{% for m in messages %}{{ {'Hi.': 1}[m.content] }}{{ {'Hi.': 1}.get(m.content) }}{% endfor %}",
    "equal ones": "{{ messages[0].content == messages[-1].content }}{{ messages[0] == messages[-1] }}",
    "in order": "{% for m in messages | sort(attribute='content') %}{{ m.content }}{% endfor %}",
    "joined": "{{ messages | map(attribute='content') | join('-') }}",
    "not empty": "{% for m in messages | selectattr('content') %}{{ m.content }}{% endfor %}",
    "kinds": "{% for m in messages %}{{ m.content is sequence }}{{ m.content is mapping }}{{ m.content is iterable }}"
    "{{ m.content is lower }}{% endfor %}",
    "internal": "{% for m in messages %}{{ m.content._parts is defined }}{{ m.content.nope is defined }}{% endfor %}",
    "a try": "{% for m in messages %}{{ m.content is sequence }}{{ [m.content] is sequence }}{% endfor %}",
    "kept": "{% set ns = namespace(all='') %}{% for m in messages %}{% set ns.all = ns.all + m.content + '|' %}"
    "{% endfor %}{{ ns.all }}{{ 'x' if ns.all else 'y' }}",
    "a macro": "{% macro f(x) %}[{{ x }}]{% endmacro %}{% for m in messages %}{{ f(m.content) }}"
    "{{ f(m.content).endswith('.]') }}{% endfor %}",
    "a block": "{% for m in messages %}{% set b %}<{{ m.content }}>{% endset %}{{ b }}{{ b | trim }}{% endfor %}",
    "chance": "{{ ['a', 'b'] | random }}{{ lipsum(1) | length > 0 }}",
    "escaped": "{% autoescape true %}{{ messages[0].content }}{% endautoescape %}",
}
TEMPLATES = {**FAMILIES, **ODD, **MORE}
VERBATIM = [*sorted(FAMILIES.keys() - {"Mistral"}), "a short one", "in parts", "questions", "kept"]

words = st.sampled_from([*CONTENTS, "x", "Hi.", "a</think>", "<tool_response>", "/nothink", "\n"]) | st.text(max_size=9)


def shape_of(template: str, messages: list[Any], variables: dict[str, Any]) -> Shape | None:
    contents = [message["content"] for message in messages]
    return record(template, template_messages(messages, template), contents, variables)


def text_of(template: str, messages: list[Any], variables: dict[str, Any]) -> str | None:
    given = dict(variables)
    tools, adds = given.pop("tools"), given.pop("add_generation_prompt")
    try:
        return render(template, template_messages(messages, template), tools, adds, given)
    except TEMPLATE_ERRORS:
        return None


@pytest.mark.parametrize("kind", TEMPLATES)
def test_other_contents_give_what_jinja_gives_or_nothing(kind: str) -> None:
    template = TEMPLATES[kind]

    @settings(max_examples=30)
    @given(
        roles=st.lists(st.sampled_from(["user", "assistant", "system"]), max_size=3)
        | st.sampled_from([["system", "user", "assistant"], ["user", "assistant", "user"]]),
        contents=st.lists(words, min_size=4, max_size=4),
        others=st.lists(st.lists(words, min_size=4, max_size=4), min_size=1, max_size=4),
        tools=st.sampled_from([None, TOOLS, []]),
        adds=st.booleans(),
    )
    def alike(roles: list[str], contents: list[str], others: list[list[str]], tools: Any, adds: bool) -> None:
        roles = [*roles, "user"]
        variables = {
            "tools": template_tools(tools), "add_generation_prompt": adds, "bos_token": "<s>", "eos_token": "</s>"
        }  # fmt: skip

        def chat(texts: list[str]) -> list[Any]:
            return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]

        shape = shape_of(template, chat(contents), variables)
        if shape is None:
            return
        for texts in [contents, *others]:
            text = shape.render(texts[: len(roles)])
            assert text is None or text == text_of(template, chat(texts), variables) or "now" in template

    alike()


@pytest.mark.parametrize("kind", VERBATIM)
def test_templates_that_take_contents_as_they_are_have_shapes(kind: str) -> None:
    chat = [{"role": role, "content": f"{role} says."} for role in ("user", "assistant", "user")]
    variables = {"tools": template_tools(TOOLS), "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    shape = shape_of(TEMPLATES[kind], chat, variables)
    assert shape is not None
    assert shape.render(["a", "b", "c"]) == text_of(
        TEMPLATES[kind],
        [{**message, "content": text} for message, text in zip(chat, "abc", strict=True)],
        variables,
    )


@pytest.mark.parametrize(
    "kind",
    [
        "lengths", "pieces", "letters", "upper case", "as JSON", "in another", "to another", "as a format", "as a key",
        "equal ones", "in order", "joined", "escaped",
    ],
)  # fmt: skip
def test_templates_that_look_into_contents_have_none(kind: str) -> None:
    chat = [{"role": "user", "content": "Hi."}, {"role": "user", "content": "You."}]
    assert shape_of(MORE[kind], chat, {"tools": None, "add_generation_prompt": True}) is None


def test_another_time_is_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(["Monday", "Monday", "Tuesday"])
    monkeypatch.setattr("plait.backends.tokenization.template_shapes.now", lambda _form: next(times))
    chat = [{"role": "user", "content": "Hi."}]
    shape = shape_of("{{ strftime_now('%A') }}{{ messages[0].content }}", chat, {})
    assert shape is not None
    assert shape.render(["You."]) == "MondayYou."
    assert shape.render(["You."]) is None


def test_a_tokenizer_gives_the_same_texts_with_shapes(tmp_path: Path) -> None:
    dice = random.Random(1)
    for family, template in FAMILIES.items():
        (folder := tmp_path / family.replace(" ", "")).mkdir()
        tokenizer = loaded(folder, template)
        for number in range(60):
            roles = dice.choice([["user"], ["system", "user"], ["user", "assistant", "user"]])
            chat = [{"role": role, "content": f"{dice.choice(CONTENTS)}{number}"} for role in roles]
            tools, options = dice.choice([None, TOOLS]), dice.choice([None, {"enable_thinking": False}])
            text = tokenizer.render_chat(chat, tools=tools, template_kwargs=options, salt=number % 2)
            variables = {**tokenizer._variables, **template_options(template, options or {})}
            prepared = None if tools is None else template_tools(tools)
            if "strftime_now" not in template:
                assert text == render(template, template_messages(chat, template), prepared, True, variables)
        assert tokenizer._shapes._kinds


def test_equal_tools_that_are_written_otherwise_are_others() -> None:
    chat = [{"role": "user", "content": "Hi."}]

    def kind(parameters: Any, salt: str = "") -> Any:
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        _, plain = ShapeMemo().render(chat, tools, None, salt, add_generation_prompt=True)
        assert plain is not None
        return plain.kind

    assert kind({"a": 1, "b": 2}) == kind({"a": 1, "b": 2})
    others = [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1.0, "b": 2}, {"a": True, "b": 2}, {"a": "1", "b": 2}]
    assert len({kind(parameters) for parameters in others}) == len(others)
    assert kind({"a": 1}) != kind({"a": 1}, salt="another tenant")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x"}, {"role": "developer", "content": "x"}, {"role": ["user"], "content": "x"},
        {"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": []},
        {"role": "user", "content": "x", "name": "Ada"}, {"role": "system", "content": "x-anthropic-billing-header: 1"},
    ],
)  # fmt: skip
def test_messages_with_more_are_left_to_jinja(message: dict[str, Any]) -> None:
    assert ShapeMemo().render([message], None, None, "", add_generation_prompt=True) == (None, None)


def test_memory_is_bounded_over_kinds_that_never_repeat() -> None:
    memo, template = ShapeMemo(100_000), MORE["a short one"]
    for number in range(2_000):
        chat = [{"role": "user", "content": "Hi."}]
        _, plain = memo.render(chat, None, {"option": number}, "", add_generation_prompt=True)
        assert plain is not None
        for _ in range(2):
            memo.learn(plain, template, chat, {}, text := render(template, chat, None, True, {}))
        assert memo.render(chat, None, {"option": number}, "", add_generation_prompt=True) == (text, None)
        assert memo.held_bytes <= 100_000
    assert 20 < len(memo._kinds) < 200


def test_contents_that_always_take_other_ways_are_not_recorded_for_ever() -> None:
    memo = ShapeMemo()
    template = "{% for at in range(20) %}{{ messages[0].content.startswith('x' * at) }}{% endfor %}"
    for number in range(20):
        chat = [{"role": "user", "content": "x" * number}]
        text = render(template, chat, None, True, {})
        found, plain = memo.render(chat, None, None, "", add_generation_prompt=True)
        assert found in {None, text}
        if plain is None:
            assert found == text
            continue
        memo.learn(plain, template, chat, {}, text)
    assert [len(ways.shapes) for ways in memo._kinds.values()] == [MOST_WAYS]
