"""Docstrings as templates: which placeholder is what, and how a prompt goes over the wire."""

from __future__ import annotations

import pytest

from plait.client.errors import TemplateError
from plait.client.template import Place, Template, parse_template


def test_parameters_are_inputs_and_all_other_places_are_outputs_in_order() -> None:
    template = parse_template("Task: {{task}}\nCode: {{code}}\nTests for {{ task }}: {{tests}}", ["task"])
    assert (template.inputs, template.outputs) == (("task",), ("code", "tests"))


def test_a_place_may_say_what_it_is_meant_to_be() -> None:
    assert parse_template("{{input:task}}{{output:code}}", ["task"]) == parse_template("{{task}}{{code}}", ["task"])


@pytest.mark.parametrize("text", ["{task}", "{{ta sk}}", "{{1}}", "{% task %}", '{{"a": 1}}', "{{}}"])
def test_everything_else_is_text(text: str) -> None:
    assert parse_template(text + "{{out}}", []).pieces == (text, Place("out", is_output=True))


@pytest.mark.parametrize(
    ("text", "parameters", "message"),
    [
        ("Write {{tsak}}.", ["task"], "the parameter task does not occur in the prompt (tsak would be an output)"),
        ("Write.", ["task"], "the parameter task does not occur in the prompt"),
        ("Write {{task}}.", ["task"], "the prompt has no output"),
        ("{{code}} and {{code}}", [], "the output code occurs twice"),
        ("{{input:code}}", ["task"], "{{input:code}} is an output: the parameters are task"),
        ("{{output:task}}", ["task"], "{{output:task}} is an input: the parameters are task"),
        ("{{input:code}}", [], "{{input:code}} is an output: there are no parameters"),
        ("{{%s}}" % ("x" * 65), [], "too long a name; at most 64"),
    ],
)
def test_what_is_not_written_right_is_said(text: str, parameters: list[str], message: str) -> None:
    with pytest.raises(TemplateError) as caught:
        parse_template(text, parameters)
    assert message in str(caught.value)


def test_a_prompt_goes_out_with_its_places() -> None:
    rendered = parse_template("A {{ x }} b {{input:x}} {{output:y}}", ["x"]).rendered({"x": ["x_1"]}, "\n")
    assert rendered.turns == ((None, "A {{x}} b {{x}} {{y}}"),)
    assert rendered.inputs == {"x": "x_1"}
    assert rendered.outputs == ("y",)


def test_several_variables_of_an_input_stand_one_after_the_other() -> None:
    template = parse_template("{{parts}}|{{parts_1}}|{{whole}}", ["parts", "parts_1"])
    rendered = template.rendered({"parts": ["a", "b"], "parts_1": ["c"]}, "; ")
    assert rendered.turns == ((None, "{{parts_1_}}; {{parts_2}}|{{parts_1}}|{{whole}}"),)
    assert rendered.inputs == {"parts_1_": "a", "parts_2": "b", "parts_1": "c"}


def test_an_input_without_variables_is_empty() -> None:
    rendered = parse_template("[{{parts}}] {{whole}}", ["parts"]).rendered({"parts": []}, "; ")
    assert (rendered.turns, rendered.inputs) == (((None, "[] {{whole}}"),), {})


def test_behind_a_system_message_the_first_output_begins_the_assistants() -> None:
    template = parse_template("Do {{task}}: {{code}} So: {{end}}", ["task", "who"], "You are {{who}}, {{task}}.")
    rendered = template.rendered({"task": ["t"], "who": ["w"]}, "")
    assert rendered.turns == (
        ("system", "You are {{who}}, {{task}}."),
        ("user", "Do {{task}}: "),
        ("assistant", "{{code}} So: {{end}}"),
    )
    assert (rendered.inputs, rendered.outputs) == ({"who": "w", "task": "t"}, ("code", "end"))
    for text, system, message in (
        ("{{code}}", "{{x}}", "x is not a parameter"),
        ("Do.", "You.", "the prompt has no output"),
    ):
        with pytest.raises(TemplateError, match=message):
            parse_template(text, [], system)


def test_text_that_reads_like_a_place_is_not_taken_for_one() -> None:
    template = Template(("Write {{ x }} as it is: ", Place("x"), Place("y", is_output=True)))
    rendered = template.rendered({"x": ["v"]}, "")
    assert rendered.turns == ((None, "Write {{ x }} as it is: {{x_}}{{y}}"),)
    assert rendered.inputs == {"x_": "v"}


def test_a_renamed_place_takes_no_other_places_name() -> None:
    template = Template(("Write {{x}} and {{x__}}: ", Place("x"), Place("x_"), Place("y", is_output=True)))
    rendered = template.rendered({"x": ["v"], "x_": ["w"]}, "")
    assert rendered.turns == ((None, "Write {{x}} and {{x__}}: {{x___}}{{x_}}{{y}}"),)
    assert rendered.inputs == {"x___": "v", "x_": "w"}
    several = template.rendered({"x": ["v"], "x_": ["a", "b"]}, "|")
    assert several.inputs == {"x___": "v", "x__1": "a", "x__2": "b"}


def test_two_places_are_never_renamed_alike() -> None:
    template = Template(("{{x}}{{x_}} ", Place("x"), Place("x_"), Place("x"), Place("y", is_output=True)))
    rendered = template.rendered({"x": ["v"], "x_": ["w"]}, "")
    assert rendered.inputs == {"x__": "v", "x___": "w"}
    assert rendered.turns == ((None, "{{x}}{{x_}} {{x__}}{{x___}}{{x__}}{{y}}"),)
