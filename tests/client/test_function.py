"""Semantic functions: what their definition says, and what a call of one submits."""

from __future__ import annotations

from typing import Annotated, Any

import pytest

from plait.client import (
    Argument,
    Client,
    Objective,
    Output,
    SemanticVariable,
    Session,
    Slo,
    TemplateError,
    Text,
    semantic_function,
)
from tests.client.fake_gateway import FakeGateway


@semantic_function(max_tokens=100, temperature=0.0)
def write_code(task: Text) -> SemanticVariable:
    """
    You are an engineer.
    Write code of {{input:task}}.
    Code: {{output:code}}
    """
    raise NotImplementedError


@semantic_function(model="large")
def review(
    code: Text, tests: Text, language: str = "English"
) -> tuple[
    Annotated[SemanticVariable, Output("verdict", transforms="boolean", max_tokens=1)],
    Annotated[SemanticVariable, Output("reasons", stop=["\n\n"], extra_body={"min_p": 0.1})],
]:
    """In {{language}}: is {{code}} right by {{tests}}? {{verdict}} Because {{reasons}}"""
    raise NotImplementedError


@semantic_function(separator=" / ")
def join(parts: Argument) -> SemanticVariable:
    """Join {{parts}}: {{whole}}"""
    raise NotImplementedError


def places(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {place["name"]: place for place in body["placeholders"]}


def test_a_call_submits_the_template_with_its_variables(fake: FakeGateway, session: Session) -> None:
    task = session.variable("a snake game")
    code = write_code(task)
    session.run()
    (body,) = fake.submitted
    assert body == {
        "model": "demo",
        "prompt": "You are an engineer.\nWrite code of {{task}}.\nCode: {{code}}",
        "placeholders": [
            {"name": "task", "in_out": False, "semantic_var_id": task.name},
            {"name": "code", "in_out": True, "semantic_var_id": code.name},
        ],
        "chat": True,
        "max_tokens": 100,
        "temperature": 0.0,
    }
    assert code.name.startswith("code_")


def test_the_result_is_an_argument_at_once(fake: FakeGateway, session: Session) -> None:
    code = write_code.on(session)("a snake game")
    verdict, reasons = review(code, tests=code)
    session.run()
    body = fake.submitted[1]
    assert body["model"] == "large"
    found = places(body)
    assert found["code"]["semantic_var_id"] == found["tests"]["semantic_var_id"] == code.name
    assert (found["verdict"]["semantic_var_id"], found["reasons"]["semantic_var_id"]) == (verdict.name, reasons.name)


def test_an_output_has_transforms_and_sampling_of_its_own(fake: FakeGateway, session: Session) -> None:
    review.on(session)("x = 1", "assert x")
    session.run()
    found = places(fake.submitted[0])
    assert (found["verdict"]["transforms"], found["verdict"]["params"]) == ("boolean", {"max_tokens": 1})
    assert "transforms" not in found["reasons"]
    assert found["reasons"]["params"] == {"stop": ["\n\n"], "min_p": 0.1}


def test_a_text_is_one_variable_however_often_it_is_given(fake: FakeGateway, session: Session) -> None:
    for _ in range(2):
        write_code.on(session)("a snake game")
    review.on(session)("a snake game", "a snake game", language="{{verdict}}")
    session.run()
    values = list(fake.programs[0]["values"].values())
    assert values == ["a snake game", "{{verdict}}"], "a text can hold anything: it is no part of the prompt"
    used = {
        place["semantic_var_id"] for body in fake.submitted for place in body["placeholders"] if not place["in_out"]
    }
    assert len(used) == 2


def test_several_texts_fill_one_input(fake: FakeGateway, session: Session) -> None:
    code = write_code.on(session)("a snake game")
    join([code, "plain", code])
    session.run()
    body = fake.submitted[1]
    assert body["prompt"] == "Join {{parts_1}} / {{parts_2}} / {{parts_3}}: {{whole}}"
    found = places(body)
    assert found["parts_1"]["semantic_var_id"] == found["parts_3"]["semantic_var_id"] == code.name


def test_a_call_can_say_what_it_is_run_for(fake: FakeGateway, session: Session) -> None:
    @semantic_function(objective="latency", slo=Slo(ttft_s=0.5), slo_tpot_ms=50.0, priority=-1, chat=False)
    def hurry(task: Text) -> SemanticVariable:
        """{{task}}{{done}}"""
        raise NotImplementedError

    hurry.on(session)("run")
    session.run()
    (body,) = fake.submitted
    assert body["plait"] == {"objective": "latency", "slo_ttft_ms": 500.0, "slo_tpot_ms": 50.0, "priority": -1}
    assert body["chat"] is False


def test_a_call_may_begin_with_a_system_message(fake: FakeGateway, session: Session) -> None:
    @semantic_function(system="You write {{language}}.")
    def code_in(language: Text, task: Text) -> SemanticVariable:
        """Do {{task}}: {{code}}"""
        raise NotImplementedError

    code_in.on(session)("Python", "it")
    session.run()
    (body,) = fake.submitted
    assert body["messages"] == [
        {"role": "system", "content": "You write {{language}}."},
        {"role": "user", "content": "Do {{task}}: "},
        {"role": "assistant", "content": "{{code}}"},
    ]
    assert "prompt" not in body
    with pytest.raises(TemplateError, match="needs a chat"):
        semantic_function(system="You write.", chat=False)


def test_a_session_is_needed_and_has_to_be_the_same(client: Client, session: Session) -> None:
    with pytest.raises(TemplateError, match=r"write_code\.on\(session\)"):
        write_code("a snake game")
    with client.session() as other, pytest.raises(TemplateError, match="tests is a variable of another session"):
        review(session.variable("x"), other.variable("y"))


@pytest.mark.parametrize("wrong", [3, None, ["a", 3]])
def test_an_argument_is_a_text_or_several(session: Session, wrong: Any) -> None:
    with pytest.raises(TemplateError, match="expected semantic variables or strings"):
        write_code.on(session)(wrong)


def test_arguments_are_those_of_the_signature(session: Session) -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'task'"):
        write_code.on(session)()  # type: ignore[call-arg]


def test_a_model_has_to_be_named_somewhere(fake: FakeGateway) -> None:
    client = Client(fake.base_url, tls=False)
    with client, client.session() as session, pytest.raises(TemplateError, match="write_code has no model"):
        write_code.on(session)("x")


def test_it_looks_like_the_function_it_was() -> None:
    assert write_code.__name__ == "write_code"  # type: ignore[attr-defined]
    assert repr(write_code).startswith("<SemanticFunction write_code(task:")


def no_docstring(task: Text) -> SemanticVariable:
    raise NotImplementedError


def variadic(*tasks: str) -> SemanticVariable:
    """{{tasks}} {{out}}"""
    raise NotImplementedError


def misnamed(task: Text) -> Annotated[SemanticVariable, Output("kode")]:
    """{{task}} {{code}}"""
    raise NotImplementedError


def too_few(task: Text) -> tuple[SemanticVariable, SemanticVariable]:
    """{{task}} {{code}}"""
    raise NotImplementedError


def too_many(task: Text) -> Annotated[SemanticVariable, Output("code")]:
    """{{task}} {{code}} {{tests}}"""
    raise NotImplementedError


def unknown_annotation(task: Text) -> Nowhere:  # type: ignore[name-defined]  # noqa: F821
    """{{task}} {{code}}"""
    raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "no_docstring: there is no docstring"),
        (variadic, r"variadic: the parameter \*tasks: 'str' cannot be an input"),
        (misnamed, r"misnamed: Output\('kode'\) is not an output of the prompt; its outputs are code"),
        (too_few, "too_few: the prompt has the outputs code; do not annotate a tuple"),
        (too_many, "too_many: the prompt has the outputs code, tests; annotate the result as a tuple of 2"),
        (unknown_annotation, "unknown_annotation: the annotation of the result cannot be evaluated: name 'Nowhere'"),
    ],
)
def test_a_definition_that_cannot_work_is_refused_where_it_stands(function: Any, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        semantic_function(model="demo")(function)


def test_annotations_of_parameters_need_not_exist_and_outputs_may_be_bare() -> None:
    def code(task):  # type: ignore[no-untyped-def]
        """{{task}} {{code}}"""

    code.__annotations__ = {"task": "NotImported", "return": Output("code", transforms="strip")}
    assert semantic_function()(code).prompt.outputs["code"].transforms == "strip"


@pytest.mark.parametrize(
    ("field", "hint"),
    [("max_token", r"did you mean max_tokens\?"), ("min_p", "put an engine's own fields into extra_body")],
)
def test_a_sampling_field_that_is_not_known_is_refused(field: str, hint: str) -> None:
    fields: Any = {field: 1}
    with pytest.raises(TemplateError, match=hint):
        semantic_function(**fields)(too_few)
    with pytest.raises(TemplateError, match=hint):
        Output("code", **fields)


def test_an_objective_that_there_is_not_is_refused() -> None:
    def code(task: Text) -> SemanticVariable:
        """{{task}} {{code}}"""
        raise NotImplementedError

    assert semantic_function(objective=Objective.THROUGHPUT)(code).prompt.annotations == {"objective": "throughput"}
    with pytest.raises(ValueError, match="fast"):
        semantic_function(objective="fast")(code)
