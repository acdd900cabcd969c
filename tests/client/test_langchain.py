"""LangChain's chains as semantic functions: what is submitted, what comes out, and what is refused."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="LangChain is not installed (pip install langchain-core langchain-openai)")
pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import (
    BaseOutputParser,
    CommaSeparatedListOutputParser,
    JsonOutputParser,
    MarkdownListOutputParser,
    NumberedListOutputParser,
    PydanticOutputParser,
    StrOutputParser,
    XMLOutputParser,
)
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotPromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.runnables import Runnable, RunnableBranch, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr

from plait.client import Client, SemanticVariable, Session, TemplateError, native_function
from plait.client.langchain import ParsedVariable, Program, in_session, semantic
from plait.gateway.guests.programs.transforms import parse
from tests.client.fake_gateway import PROGRAMS, FakeGateway, error, events

KEY = SecretStr("unused")
MODEL = ChatOpenAI(model="demo", api_key=KEY, max_completion_tokens=50, temperature=0.5)
TRANSLATE = ChatPromptTemplate.from_template("Translate {text} to {language}:")
SHORTEN = PromptTemplate.from_template("Shorten: {text}", name="shorten")


class Shout(BaseOutputParser[str]):
    def parse(self, text: str) -> str:
        return text.upper()


class Score(BaseModel):
    score: int


def places(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {place["name"]: place for place in body["placeholders"]}


def invoked(chain: Runnable[Any, Any], session: Session, given: Any) -> Any:
    return semantic(chain).invoke(given, in_session(session))


def test_a_chain_submits_its_template_and_returns_a_variable(fake: FakeGateway, session: Session) -> None:
    answer = invoked(TRANSLATE | MODEL | StrOutputParser(), session, {"text": "Hello {{text}}", "language": "French"})
    session.run()
    assert isinstance(answer, SemanticVariable)
    (body,) = fake.submitted
    assert body["messages"] == [
        {"role": "user", "content": "Translate {{text}} to {{language}}:"},
        {"role": "assistant", "content": "{{answer}}"},
    ]
    assert (body["model"], body["chat"], body["max_tokens"], body["temperature"]) == ("demo", True, 50, 0.5)
    assert set(places(body)) == {"text", "language", "answer"}
    assert [asked.what for asked in fake.asked] == [PROGRAMS]


def test_a_template_keeps_its_braces_and_its_constant_parts(fake: FakeGateway, session: Session) -> None:
    prompt = PromptTemplate.from_template('As {{"a": 1}}, not {{{{text}}}}: {rules} {text} {day} {answer}').partial(
        rules="Be {brief}.", day=lambda: "Monday"
    )
    invoked(prompt | MODEL, session, {"text": "t", "answer": "a"})
    session.run()
    (body,) = fake.submitted
    assert body["prompt"] == 'As {"a": 1}, not {{braces}}text}}: Be {brief}. {{text}} {{day}} {{answer}}{{answer_}}'
    assert set(fake.programs[0]["values"].values()) == {"{{", "t", "a", "Monday"}


def test_messages_keep_their_roles(fake: FakeGateway, session: Session) -> None:
    said = [("system", "You are {who}."), ("human", "Hello"), ("ai", "Hello, {name}!"), ("human", "{text}")]
    prompt = ChatPromptTemplate([*said, AIMessage("Well,"), HumanMessage("{so}")])
    invoked(prompt | MODEL, session, {"who": "a poet", "name": "you", "text": "t"})
    session.run()
    (body,) = fake.submitted
    assert [(message["role"], message["content"]) for message in body["messages"]] == [
        ("system", "You are {{who}}."),
        ("user", "Hello"),
        ("assistant", "Hello, {{name}}!"),
        ("user", "{{text}}"),
        ("assistant", "Well,"),
        ("user", "{so}"),
        ("assistant", "{{answer}}"),
    ]
    assert set(places(body)) == {"who", "name", "text", "answer"}


def test_sampling_comes_from_the_model_and_what_is_bound_to_it(fake: FakeGateway, session: Session) -> None:
    model = MODEL.bind(stop=["\n"], max_tokens=9, extra_body={"min_p": 0.1})
    invoked(SHORTEN | model | StrOutputParser(), session, "a long text")
    session.run()
    (body,) = fake.submitted
    assert (body["stop"], body["max_tokens"], body["min_p"], body["temperature"]) == (["\n"], 9, 0.1, 0.5)
    assert "n" not in body


def test_a_completion_model_continues_the_text(fake: FakeGateway, session: Session) -> None:
    answer = invoked(SHORTEN | OpenAI(model="base", api_key=KEY), session, "x")
    session.run()
    assert isinstance(answer, SemanticVariable)
    assert (fake.submitted[0]["model"], fake.submitted[0]["chat"]) == ("base", False)


def test_chains_compose_without_waiting(fake: FakeGateway, session: Session) -> None:
    short = SHORTEN | MODEL | StrOutputParser()
    both = RunnableParallel(text=short, language=itemgetter("language")) | TRANSLATE | MODEL | StrOutputParser()
    result = invoked(both, session, {"text": "long", "language": "French"})
    session.run()
    first, second = fake.submitted
    assert places(second)["text"]["semantic_var_id"] == places(first)["answer"]["semantic_var_id"]
    assert result.name == places(second)["answer"]["semantic_var_id"]
    assert len(fake.programs) == 1


def test_a_map_reduce_is_one_dag(fake: FakeGateway, session: Session) -> None:
    mapped = (SHORTEN | MODEL | StrOutputParser()).map()
    reduce = SHORTEN | MODEL | StrOutputParser()
    invoked(mapped | (lambda parts: {"text": parts}) | reduce, session, ["one", "two", "three"])
    session.run()
    *maps, last = fake.submitted
    outputs = {places(body)["answer"]["semantic_var_id"] for body in maps}
    assert last["prompt"] == "Shorten: {{text_1}}\n\n{{text_2}}\n\n{{text_3}}{{answer}}"
    assert {place["semantic_var_id"] for place in last["placeholders"] if not place["in_out"]} == outputs


def test_what_assigns_is_gone_through_and_what_is_semantic_stays(fake: FakeGateway, session: Session) -> None:
    chain = RunnablePassthrough.assign(text=SHORTEN | MODEL | StrOutputParser()) | TRANSLATE | MODEL
    once = semantic(chain.with_config(tags=["a"]))
    result = semantic(once).invoke({"text": "x", "language": "French"}, in_session(session))
    session.run()
    assert isinstance(result, ParsedVariable)
    assert len(fake.submitted) == 2


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        (CommaSeparatedListOutputParser(), "red, green", ["red", "green"]),
        (NumberedListOutputParser(), "Two:\n1. red\n2. green", ["red", "green"]),
        (MarkdownListOutputParser(), "- red\n- green", ["red", "green"]),
        (JsonOutputParser(), 'Sure: {"score": 8}', {"score": 8}),
        (PydanticOutputParser(pydantic_object=Score), '```json\n{"score": 8}\n```', Score(score=8)),
        (XMLOutputParser(tags=["a", "b"], parser="xml"), "Here: <a><b>1</b></a> so", {"a": [{"b": "1"}]}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_parsers_are_transforms_with_langchains_result(
    fake: FakeGateway, session: Session, parser: Any, text: str, expected: object
) -> None:
    """What the gateway will make of a completion comes out of the program as it would have without it."""
    answer = invoked(SHORTEN | MODEL | parser, session, "x")
    session.run()
    spec = places(fake.submitted[0])["answer"]["transforms"]
    fake.values[answer.variable.name] = parse(spec).apply(text)
    assert answer.get() == expected
    semantic(SHORTEN | MODEL).invoke(answer, in_session(session))
    session.run()
    assert places(fake.submitted[1])["text"]["semantic_var_id"] == answer.variable.name


@pytest.mark.parametrize("parser", [Shout(), XMLOutputParser(parser="xml")])
def test_an_unknown_parser_runs_at_the_end_and_nowhere_else(fake: FakeGateway, session: Session, parser: Any) -> None:
    answer = invoked(SHORTEN | MODEL | parser, session, "x")
    session.run()
    assert "transforms" not in places(fake.submitted[0])["answer"]
    fake.values[answer.variable.name] = "<a>b</a>"
    assert answer.get() in ("<A>B</A>", {"a": "b"})
    with pytest.raises(
        TemplateError, match="has no transform in the gateway, so its result cannot go into another call"
    ):
        invoked(SHORTEN | MODEL | parser | SHORTEN | MODEL, session, "x")
    session.run()


def test_a_program_is_the_chain_with_the_same_result(fake: FakeGateway, client: Client) -> None:
    message = Program(SHORTEN | MODEL, client, objective="latency", timeout_s=5).invoke("x")
    assert isinstance(message, AIMessage)
    assert message.text.startswith("text of answer_")
    (body,) = fake.programs
    assert list(body["gets"].values()) == ["latency"]
    assert 4 < body["timeout_s"] <= 5
    client.close()
    assert fake.asked[-1].what.startswith("DELETE /v1/sessions/")


async def test_a_program_gets_whatever_comes_out_in_one_request(fake: FakeGateway, client: Client) -> None:
    text = SHORTEN | MODEL | StrOutputParser()
    chain = RunnableParallel(many=text.map(), one=text, untouched=RunnablePassthrough()) | RunnableLambda(lambda x: x)
    program = Program(chain, client)
    for result in (program.invoke(["a", "b"]), await program.ainvoke(["a", "b"])):
        assert [len(result["many"]), result["untouched"]] == [2, ["a", "b"]]
        assert all(value.startswith("text of answer_") for value in (*result["many"], result["one"]))
    assert [len(body["calls"]) for body in fake.programs] == [3, 3]


async def test_a_batch_is_one_program(fake: FakeGateway, client: Client) -> None:
    program = Program(RunnableParallel(one=SHORTEN | MODEL, same=RunnablePassthrough()), client)
    for results in (program.batch(["a", "b", "c"]), await program.abatch(["a", "b", "c"])):
        assert [result["same"] for result in results] == ["a", "b", "c"]
    assert [len(body["calls"]) for body in fake.programs] == [3, 3]
    assert program.batch([]) == []


async def test_what_fails_in_a_batch_is_its_own_result(fake: FakeGateway, client: Client) -> None:
    program = Program(SHORTEN | MODEL | JsonOutputParser(), client)

    def answer(calls: int) -> None:
        """The first call's text is no JSON."""
        fake.values_in_turn = ["no", *["{}"] * (calls - 1)]

    answer(2)
    with pytest.raises(OutputParserException):
        program.batch(["a", "b"])
    answer(2)
    assert [type(one) for one in program.batch(["a", "b"], return_exceptions=True)] == [OutputParserException, dict]
    answer(2)
    results = await program.abatch(["a", "b"], return_exceptions=True)
    assert [type(one) for one in results] == [OutputParserException, dict]


async def test_a_program_streams_a_text(fake: FakeGateway, client: Client) -> None:
    program = Program(SHORTEN | MODEL | StrOutputParser(), client)
    pieces = [("delta", {"name": "v", "delta": "Hel"}), ("delta", {"name": "v", "delta": "lo"})]
    answer = events(*pieces, ("value", {"name": "v", "value": "Hello"}))
    fake.script(PROGRAMS, answer, answer)
    assert list(program.stream("x")) == ["Hel", "lo"]
    assert [piece async for piece in program.astream("x")] == ["Hel", "lo"]
    assert len(list(Program(SHORTEN | MODEL, client).stream("x"))) == 1
    assert len([piece async for piece in Program(SHORTEN | MODEL, client).astream("x")]) == 1
    assert [len(body["calls"]) for body in fake.programs] == [1] * 4


# Messages that are given at run time.


def test_a_history_is_messages_with_values(fake: FakeGateway, session: Session) -> None:
    prompt = ChatPromptTemplate(
        [("system", "You are {who}."), MessagesPlaceholder("history", optional=True), ("human", "{text}")]
    )
    given = {"who": "a poet", "text": "t", "history": [HumanMessage("Hi {{who}}"), ("ai", "Hello"), ("human", "So")]}
    first = invoked(prompt | MODEL, session, given)
    invoked(prompt | MODEL, session, {**given, "history": [HumanMessage("Hi {{who}}"), first]})
    invoked(prompt | MODEL, session, {"who": "a poet", "text": "t"})
    session.run()
    said = [[(one["role"], one["content"]) for one in body["messages"]] for body in fake.submitted]
    assert said[0] == [
        ("system", "You are {{who}}."),
        ("user", "{{history_1}}"),
        ("assistant", "{{history_2}}"),
        ("user", "{{history_3}}"),
        ("user", "{{text}}"),
        ("assistant", "{{answer}}"),
    ]
    assert [role for role, _ in said[1]] == ["system", "user", "assistant", "user", "assistant"]
    assert [role for role, _ in said[2]] == ["system", "user", "assistant"]
    first_output = places(fake.submitted[0])["answer"]["semantic_var_id"]
    assert places(fake.submitted[1])["history_2"]["semantic_var_id"] == first_output
    values = fake.programs[0]["values"].values()
    assert sorted(values) == sorted(["a poet", "t", "Hi {{who}}", "Hello", "So"]), "each once"


def test_only_the_last_messages_count_if_the_template_says_so(fake: FakeGateway, session: Session) -> None:
    prompt = ChatPromptTemplate([MessagesPlaceholder("history", n_messages=1), ("human", "Well?")])
    invoked(prompt | MODEL, session, [HumanMessage("one"), HumanMessage("two")])
    session.run()
    assert list(fake.programs[0]["values"].values()) == ["two"]
    with pytest.raises(TemplateError, match="tool cannot be submitted"):
        invoked(prompt | MODEL, session, [ToolMessage("1", tool_call_id="t")])


# Steps that decide by values.


async def test_a_fallback_is_tried_when_a_call_fails(fake: FakeGateway, client: Client) -> None:
    other = MODEL.model_copy(update={"model_name": "other"})
    at_model = SHORTEN | MODEL.with_fallbacks([other]) | StrOutputParser()
    at_chain = (SHORTEN | MODEL | StrOutputParser()).with_fallbacks([SHORTEN | other | StrOutputParser()])
    for chain in (at_model, at_chain):
        program = Program(chain | (lambda text: {"text": text}) | SHORTEN | MODEL | StrOutputParser(), client)
        fake.forget()
        assert program.invoke("x").startswith("text of")
        assert [[call["model"] for call in body["calls"]] for body in fake.programs] == [["demo"], ["demo"]]
        fake.forget()
        fake.script(PROGRAMS, error(400, "context_length_exceeded", param="calls[0].messages"))
        assert (await program.ainvoke("x")).startswith("text of")
        assert [[call["model"] for call in body["calls"]] for body in fake.programs] == [["demo"], ["other"], ["demo"]]


def test_a_failed_call_is_tried_again(fake: FakeGateway, client: Client) -> None:
    whole = (SHORTEN | MODEL).with_retry(wait_exponential_jitter=False)
    for chain in (whole, SHORTEN | MODEL.with_retry(wait_exponential_jitter=False)):
        fake.forget()
        fake.script(PROGRAMS, *[error(400, "context_length_exceeded", param="calls[0].messages")] * 2)
        assert Program(chain, client).invoke("x").text.startswith("text of")
        outputs = [places(body["calls"][0])["answer"]["semantic_var_id"] for body in fake.programs]
        assert len(set(outputs)) == len(outputs) == 3


async def test_steps_that_wait_at_the_same_time_wait_in_one_request(fake: FakeGateway, client: Client) -> None:
    short = (SHORTEN | MODEL | StrOutputParser()).with_fallbacks([SHORTEN | MODEL | StrOutputParser()])
    program = Program(short.map(), client)
    assert len(program.invoke(["a", "b", "c"])) == len(await program.ainvoke(["a", "b", "c"])) == 3
    assert [len(body["calls"]) for body in fake.programs] == [3, 3]


def test_a_branch_decides_by_the_value(fake: FakeGateway, client: Client) -> None:
    text = SHORTEN | MODEL | StrOutputParser()
    branch: Any = RunnableBranch((lambda text: "of answer" in text, text), RunnableLambda(lambda _: "no"))
    assert Program(text | branch, client).invoke("x").startswith("text of")
    assert Program(branch, client).invoke("x") == "no"
    assert [len(body["calls"]) for body in fake.programs] == [1, 1]


EXAMPLES = FewShotPromptTemplate(
    examples=[], example_prompt=SHORTEN, suffix="{text}", input_variables=["text"], prefix=""
)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (MODEL, "ChatOpenAI is not a call"),
        (RunnablePassthrough() | MODEL.bind(stop=["x"]), "ChatOpenAI is not a call"),
        (SHORTEN | RunnablePassthrough(), "PromptTemplate is not a call"),
        (SHORTEN | MODEL | StrOutputParser() | Shout(), "Shout is not a call"),
        (RunnableBranch((lambda _: True, MODEL), MODEL), "ChatOpenAI is not a call"),
        (SHORTEN | MODEL.bind(tools=[]), "bound with tools answers with more than text"),
        (SHORTEN | MODEL.bind(n=2), "n is 2"),
        (SHORTEN | MODEL.with_structured_output(Score), "JSON schema"),
        (EXAMPLES | MODEL, "FewShotPromptTemplate chooses its text"),
        (ChatPromptTemplate([ToolMessage("1", tool_call_id="t")]) | MODEL, "tool cannot be submitted"),
        (ChatPromptTemplate([HumanMessage(["a"])]) | MODEL, "a message must be one text"),
        (TRANSLATE | OpenAI(model="base", api_key=KEY), "a completion model continues a text"),
        (PromptTemplate.from_template("{{x}}", template_format="mustache") | MODEL, "format is mustache"),
        (PromptTemplate.from_template("{x:>9}") | MODEL, "{x} has a format"),
    ],
)
def test_what_cannot_be_submitted_before_it_runs_is_refused(chain: Any, message: str) -> None:
    with pytest.raises(TemplateError) as caught:
        semantic(chain)
    assert message in str(caught.value)


def test_an_invocation_needs_a_session_and_all_variables(session: Session) -> None:
    chain = semantic(TRANSLATE | MODEL)
    with pytest.raises(TemplateError, match="has no session: invoke with"):
        chain.invoke({"text": "a", "language": "b"})
    with pytest.raises(TemplateError, match="needs text, language; missing: language"):
        chain.invoke({"text": "a"}, in_session(session))
    with pytest.raises(TemplateError, match="needs text, language"):
        chain.invoke("a", in_session(session))
    with pytest.raises(TemplateError, match="invoked with stop"):
        chain.invoke({"text": "a", "language": "b"}, in_session(session), stop=["x"])


def test_a_native_function_stands_between_two_calls(fake: FakeGateway, client: Client) -> None:
    @native_function
    def first_word(text: str) -> str:
        return text.split(maxsplit=1)[0]

    word: Runnable[Any, Any] = TRANSLATE | MODEL | StrOutputParser() | first_word
    answer = Program(word | SHORTEN | MODEL | StrOutputParser(), client).invoke({"text": "Hello", "language": "French"})
    assert answer.startswith("text of answer_")
    program = next(program for program in fake.programs if "calls" in program)
    (step,) = program["natives"]
    first, second = (places(call) for call in program["calls"])
    assert (step["inputs"], step["output"]) == (
        [first["answer"]["semantic_var_id"]],
        second["text"]["semantic_var_id"],
    )
