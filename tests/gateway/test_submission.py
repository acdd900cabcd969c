"""Submitted prompts: how they are cut into steps, what each step asks an engine, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.errors import CallerError, PlaitError
from gateway.submission import Submission

TASK, CODE, TEST = {"name": "task"}, {"name": "code", "in_out": True}, {"name": "test", "in_out": True}


def submission(prompt: str, *placeholders: dict[str, Any], **more: Any) -> Submission:
    body = {"session_id": "s", "model": "m", "prompt": prompt, "placeholders": placeholders, **more}
    return Submission(json.dumps(body).encode())


def asked(made: Submission, number: int, first: str, begun: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(made.request(made.steps[number], first, begun)[0])
    return body


def test_a_prompt_is_filled_up_to_each_output() -> None:
    code = {**CODE, "semantic_var_id": "program", "transforms": ["strip"]}
    made = submission("Do {{task}}.\n{{ code }}\nTest {{code}} of {{other}}: {{test}} end", TASK, code, TEST)
    values = {"task": "it", "program": "x"}
    assert [step.filled(values) for step in made.steps] == ["Do it.\n", "\nTest x of {{other}}: "]
    assert [step.output.variable for step in made.steps] == ["program", "test"]
    assert [str(step.output.transform) for step in made.steps] == ["strip", "None"]
    assert made.inputs == ("task",)


def test_in_a_chat_the_model_goes_on_with_its_own_message() -> None:
    made = submission("Hi {{code}}, {{test}}", CODE, TEST)
    user = {"role": "user", "content": "Hi "}
    assert asked(made, 0, "Hi ", "") == {"model": "m", "stream": True, "messages": [user]}
    assert asked(made, 1, "Hi ", "text, ") == {
        "model": "m",
        "stream": True,
        "messages": [user, {"role": "assistant", "content": "text, "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def test_a_raw_prompt_goes_on_as_it_is() -> None:
    made = submission("Hi {{code}}, {{test}}", CODE, TEST, chat=False)
    assert made.path == "/v1/completions"
    assert asked(made, 1, "Hi ", "text, ") == {"model": "m", "stream": True, "prompt": "Hi text, "}


def test_fields_go_to_every_output_and_params_to_one() -> None:
    short = {**CODE, "params": {"max_tokens": 3, "stop": ["x"], "stream": False}}
    made = submission("{{code}}{{test}}", short, TEST, max_tokens=9, seed=1, n=5, stream_options={}, plait={})
    first, second = (asked(made, number, "", "") for number in (0, 1))
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
        ("{{code}}", [CODE], {"session_id": "?"}, "session_id"),
        (3, [CODE], {}, "prompt"),
    ],
)
def test_what_can_never_run_is_refused(prompt: Any, placeholders: list[Any], more: Any, param: str | None) -> None:
    with pytest.raises(PlaitError) as caught:
        submission(prompt, *placeholders, **more)
    assert isinstance(caught.value, CallerError)
    assert caught.value.param == param
