"""Instructor over OpenAI's SDK."""

from __future__ import annotations

import instructor
import openai
from instructor.core import InstructorRetryException
from openai import AsyncOpenAI, OpenAI
from program import KEY, MODEL, V1, WRONG_KEY, WRONG_MODEL, feature, refused, run
from pydantic import BaseModel

client = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
ASK = [{"role": "user", "content": "Where is the Eiffel Tower?"}]


class Place(BaseModel):
    place: str


def asked(mode: instructor.Mode, **options: object) -> object:
    patched = instructor.from_openai(client, mode=mode)
    return patched.create(**{"model": MODEL, "messages": ASK, "response_model": Place, "max_retries": 0, **options})


@feature("schema")
def schema() -> None:
    assert asked(instructor.Mode.JSON_SCHEMA).place


@feature("tools")
def tools() -> None:
    assert asked(instructor.Mode.TOOLS).place


@feature("stream")
def stream() -> None:
    partial = instructor.from_openai(client, mode=instructor.Mode.TOOLS).create_partial(
        model=MODEL, messages=ASK, response_model=Place
    )
    assert list(partial)[-1].place


@feature("responses tools")
def responses_tools() -> None:
    assert asked(instructor.Mode.RESPONSES_TOOLS).place


@feature("async")
async def asynchronous() -> None:
    async with AsyncOpenAI(base_url=V1, api_key=KEY) as own:
        patched = instructor.from_openai(own)
        assert (await patched.create(model=MODEL, messages=ASK, response_model=Place)).place


@feature("wrong model")
def wrong_model() -> None:
    error = refused(InstructorRetryException, lambda: asked(instructor.Mode.TOOLS, model=WRONG_MODEL))
    assert "model_not_found" in str(error)


@feature("wrong key")
def wrong_key() -> None:
    wrong = instructor.from_openai(client.with_options(api_key=WRONG_KEY))
    ask = {"model": MODEL, "messages": ASK, "response_model": Place, "max_retries": 0}
    error = refused(Exception, lambda: wrong.create(**ask))
    assert "invalid_api_key" in str(error), error
    assert isinstance(error, openai.AuthenticationError | InstructorRetryException)


run()
