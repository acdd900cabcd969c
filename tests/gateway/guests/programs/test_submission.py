"""Submitted prompts: how they are cut into steps, what each step asks an engine, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from plait.backends.errors import CallerError, PlaitError
from plait.backends.protocol.openai import decode_body
from plait.gateway.guests.programs.filled_prompts import message_texts
from plait.gateway.guests.programs.submission import OutputStep, Submission, SubmitBody

TASK, CODE, TEST = {"name": "task"}, {"name": "code", "in_out": True}, {"name": "test", "in_out": True}


def submission(prompt: Any, *placeholders: dict[str, Any], **more: Any) -> Submission:
    """Of a text or of messages."""
    kind = "messages" if isinstance(prompt, list) else "prompt"
    raw = json.dumps({"session_id": "s", "model": "m", kind: prompt, "placeholders": placeholders, **more}).encode()
    return Submission(raw, decode_body(raw, msgspec.json.Decoder(SubmitBody)))


def asked(made: Submission, values: dict[str, str] | None = None, **generated: str) -> dict[str, Any]:
    """What the step behind the outputs that are generated asks for; their values are in capitals."""
    step = made.steps[len(generated)]
    own = {earlier.output.variable: generated[earlier.name].upper() for earlier in made.steps[: len(generated)]}
    body: dict[str, Any] = json.loads(made.request(step, {**(values or {}), **own}, generated)[0])
    check_size(made, step, {**(values or {}), **own, **{name: 3 * value for name, value in own.items()}}, generated)
    return body


def check_size(made: Submission, step: OutputStep, values: dict[str, str], generated: dict[str, str]) -> None:
    """The bytes of a prompt's texts are known before it is filled, also where values differ from generated texts."""
    body = json.loads(made.request(step, values, generated)[0])
    messages = body.get("messages", [{"content": body.get("prompt")}])
    texts = [text for message in messages for text in message_texts(message)]
    assert made.filled_sizes(step, values, generated) == [sum(len(text.encode()) for text in texts)]


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


GOING_ON = {"add_generation_prompt": False, "continue_final_message": True}


def test_a_prompt_is_filled_up_to_each_output() -> None:
    code = {**CODE, "semantic_var_id": "program", "transforms": "strip"}
    made = submission("Do {{task}}.\n{{ code }}\nTest {{code}} of {{other}}: {{test}} end", TASK, code, TEST)
    assert asked(made, {"task": "{{it}}"})["messages"] == [user("Do {{it}}.\n")]
    second = asked(made, {"task": "it"}, code="x")["messages"]
    assert second == [user("Do it.\n"), assistant("x\nTest X of {{other}}:")]
    assert [step.output.variable for step in made.steps] == ["program", "test"]
    assert [str(step.output.transform) for step in made.steps] == ["strip", "None"]
    assert made.inputs == ("task",)


@pytest.mark.parametrize("parts", [["code_block(python)", "strip"], ["code_block(python) | strip"]])
def test_a_chain_of_transforms_may_be_given_in_parts(parts: list[str]) -> None:
    (step,) = submission("{{task}} {{code}}", TASK, {**CODE, "transforms": parts}).steps
    assert str(step.output.transform) == "code_block(python) | strip"


def test_in_a_chat_the_model_goes_on_with_its_own_message() -> None:
    made = submission("Hi {{code}}, {{test}}", CODE, TEST)
    assert made.path == "/v1/chat/completions"
    assert asked(made) == {"model": "m", "stream": True, "messages": [user("Hi ")]}
    messages = [user("Hi "), assistant("text,")]
    assert asked(made, code="text") == {"model": "m", "stream": True, "messages": messages, **GOING_ON}


def test_a_raw_prompt_goes_on_as_it_is() -> None:
    made = submission("Hi {{code}}, {{test}}", CODE, TEST, chat=False)
    assert made.path == "/v1/completions"
    assert asked(made, code="text") == {"model": "m", "stream": True, "prompt": "Hi text,"}


SPACES = [
    ("Q. {{code}} Code: {{test}}", {}, " "),
    ("Q. {{code}} Code:  {{test}}", {}, " "),
    ("Q. {{code}} Code:{{test}}", {}, ""),
    ("Q. {{code}} Code:\n{{test}}", {}, ""),
    ("Q. {{code}} {{test}}", {}, ""),
    ("Q. {{code}} Code: {{test}}", {"max_tokens": 16}, " "),
    ("Q. {{code}} Code: {{test}}", {"max_tokens": 15}, ""),
    ("Q. {{code}} Code: {{test}}", {"stop": ["end", "\n"]}, ""),
    ("Q. {{code}} Code: {{test}}", {"stop": "end"}, " "),
    ("Q. {{code}} Code: {{test}}", {"response_format": {"type": "json_object"}}, ""),
]
"""The text before the last output, fields of the request, and the space that the model is to write."""


@pytest.mark.parametrize(("prompt", "fields", "space"), SPACES)
@pytest.mark.parametrize("value", ["x", ""])
def test_the_space_before_an_output_is_left_to_the_model(
    prompt: str, fields: dict[str, Any], space: str, value: str
) -> None:
    made = submission(prompt, CODE, TEST, **fields)
    begun = prompt.split("{{code}}")[1].removesuffix("{{test}}")
    assert made.space(1) == space
    assert asked(made, code=value)["messages"][-1] == assistant(f"{value}{begun.removesuffix(space)}")
    assert made.space(0) == "", "that of a user stays"


def test_what_the_client_wrote_stands_before_the_answer_in_the_next_prompt() -> None:
    made = submission("Code: {{code}} Test: {{test}}", CODE, TEST, chat=False)
    assert [made.space(0), made.space(1)] == [" ", " "]
    assert asked(made)["prompt"] == "Code:"
    assert asked(made, code="x = 1")["prompt"] == "Code: x = 1 Test:"


def test_messages_are_turns() -> None:
    parts = [{"type": "text", "text": "Test {{code}} of {{task}}."}, {"type": "image_url", "image_url": {"url": "u"}}]
    made = submission(
        [
            {"role": "system", "content": "You do {{task}}.", "name": "boss"},
            user("Code:"),
            assistant("Sure: {{code}} Done: {{done}}"),
            user(parts),
            assistant("{{test}}"),
        ],
        *(TASK, CODE, {"name": "done", "in_out": True}, TEST),
    )
    opening = [{"role": "system", "content": "You do it.", "name": "boss"}, user("Code:")]
    values = {"task": "it"}
    assert asked(made, values) == {
        "model": "m",
        "stream": True,
        "messages": [*opening, assistant("Sure:")],
        **GOING_ON,
    }
    assert asked(made, values, code="x")["messages"] == [*opening, assistant("Sure: x Done:")]
    last = asked(made, values, code="x", done="y")
    filled = [{"type": "text", "text": "Test X of it."}, parts[1]]
    assert last["messages"] == [*opening, assistant("Sure: x Done: y"), user(filled)], "a new turn"
    assert GOING_ON.keys().isdisjoint(last)


def test_what_was_said_before_may_come_from_the_assistant() -> None:
    history = [user("Hi"), assistant("Hi {{task}}"), {"role": "assistant", "content": None, "tool_calls": []}]
    made = submission(
        [*history, {"role": "tool", "content": "1", "tool_call_id": "t"}, assistant("{{code}}")], TASK, CODE
    )
    assert asked(made, {"task": "you"})["messages"] == [
        *(history[0], assistant("Hi you"), history[2]),
        {"role": "tool", "content": "1", "tool_call_id": "t"},
    ]


def test_fields_go_to_every_output_and_params_to_one() -> None:
    short = {**CODE, "params": {"max_tokens": 3, "stop": ["x"], "stream": False}}
    made = submission("{{code}}{{test}}", short, TEST, max_tokens=9, seed=1, n=5, stream_options={}, plait={})
    first, second = asked(made), asked(made, code="")
    assert (first["max_tokens"], first["stop"], first["seed"], first["stream"]) == (3, ["x"], 1, True)
    assert (second["max_tokens"], second["seed"]) == (9, 1)
    assert not {"n", "stream_options", "plait", "session_id", "placeholders"} & first.keys()
    assert made.output_tokens == 12
    assert submission("{{code}}", CODE).output_tokens is None


@pytest.mark.parametrize(
    ("prompt", "placeholders", "more", "param"),
    [
        ("{{task}}", [TASK], {}, "placeholders"),
        ("{{code}}", [CODE, CODE], {}, "placeholders"),
        ("{{code}}", [CODE, TASK], {}, "placeholders"),
        ("{{code}}", [{"name": "1", "in_out": True}], {}, "placeholders"),
        ("{{code}}", [CODE], {"max_tokens": 0}, "max_tokens"),
        ("{{code}}", [{**CODE, "params": {"max_tokens": "x"}}], {}, "max_tokens"),
        ("{{code}}", [{**CODE, "transforms": "nonsense"}], {}, None),
        ("{{code}}", [{**CODE, "transforms": ["strip", "nonsense"]}], {}, None),
        ("{{code}}", [{**CODE, "transforms": [{"name": "strip"}]}], {}, "placeholders"),
        ("{{code}}", [CODE], {"session_id": "?"}, "session_id"),
        (3, [CODE], {}, "prompt"),
        ("{{code}}", [CODE], {"messages": [assistant("{{code}}")]}, "prompt"),
        (None, [CODE], {}, "prompt"),
        ([user("a"), assistant("{{code}}")], [CODE], {"chat": False}, "chat"),
        ([user("a"), {"content": "{{code}}"}], [CODE], {}, "messages"),
        ([user("{{code}}")], [CODE], {}, "messages"),
        ([user("{{code}}"), assistant("{{code}}")], [CODE], {}, "messages"),
        ([user("a"), {"role": "assistant", "content": ["{{code}}"]}], [CODE], {}, "messages"),
        ([assistant("{{code}}")], [CODE], {}, "messages"),
        ([user("a"), assistant("{{code}}"), user("b")], [CODE], {}, "messages"),
        ([user("a"), "b"], [CODE], {}, "messages"),
        ([user("a"), assistant("b")], [], {}, "placeholders"),
    ],
)
def test_what_can_never_run_is_refused(prompt: Any, placeholders: list[Any], more: Any, param: str | None) -> None:
    with pytest.raises(PlaitError) as caught:
        submission(prompt, *placeholders, **more)
    assert isinstance(caught.value, CallerError)
    assert caught.value.param == param
