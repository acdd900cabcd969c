import pytest

from plait.backends.errors import CallerError
from plait.backends.tokenization.chat_template import loops_over_content, template_options

LOOP = "{% for part in @ %}{{ part }}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}" + LOOP.replace("@", "m['content']") + "{% endfor %}",
        "{% for m in messages[1:] %}" + LOOP.replace("@", "m.content | list") + "{% endfor %}",
        "{% set rest = messages[1:] %}{% for m in rest %}" + LOOP.replace("@", "m.content") + "{% endfor %}",
        "{% set ns = namespace(rest=messages) %}{% for m in ns.rest %}"
        + LOOP.replace("@", "m.content")
        + "{% endfor %}",
        "{% set ns = namespace() %}{% set ns.rest = messages %}{% for m in ns.rest %}"
        + LOOP.replace("@", "m.content")
        + "{% endfor %}",
        "{% for m in messages %}{% set content = m.content %}" + LOOP.replace("@", "content") + "{% endfor %}",
        "{% macro show(body) %}" + LOOP.replace("@", "body") + "{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
        "{% macro show(body) %}" + LOOP.replace("@", "body") + "{% endmacro %}"
        "{% for m in messages %}{{ show(body=m.content) }}{% endfor %}",
    ],
)
def test_a_template_that_loops_over_content_wants_parts(template: str) -> None:
    assert loops_over_content(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}" + LOOP.replace("@", "m.tool_calls") + "{% endfor %}",
        "{% for m in others %}" + LOOP.replace("@", "m.content") + "{% endfor %}",
        "{% macro show(content) %}" + LOOP.replace("@", "content") + "{% endmacro %}{{ show('x') }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
    ],
)
def test_other_templates_want_strings(template: str) -> None:
    assert not loops_over_content(template)


def test_options_are_those_that_the_template_reads() -> None:
    template = "{{ enable_thinking }}{{ messages }}{% set local = 1 %}{{ local }}"
    given = {"enable_thinking": False, "messages": [], "local": 2, "unread": 3}
    assert template_options(template, given) == {"enable_thinking": False}


@pytest.mark.parametrize("name", ["chat_template", "tokenize"])
def test_options_may_not_replace_the_template(name: str) -> None:
    with pytest.raises(CallerError, match=name):
        template_options("{{ tokenize }}", {name: "x"})
