"""What the answer to a line comes to: its usage, and whether it is whole."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from plait.backends.errors import EngineBrokenError
from plait.gateway.api.call_api import CallApi
from plait.gateway.guests.batches.batch import Batch
from plait.gateway.guests.batches.checking import read_line
from plait.gateway.guests.batches.line_call import CollectedAnswer, ask, usage_of
from plait.gateway.intake.open_bodies import OpenBodies

BATCH = Batch("batch_1", "blue", "id", "", "/v1/responses", "file-1", "24h", 100, 1000)
LINE = read_line(b'{"custom_id": "a", "url": "/v1/responses", "body": {"model": "demo"}}')


@pytest.mark.parametrize("error", [None, EngineBrokenError("gone")])
async def test_an_answer_that_is_cut_is_a_failure(error: EngineBrokenError | None) -> None:
    async def prepared(_incoming: object, _body: object, _receive: object, sink: CollectedAnswer) -> Any:
        async def answer() -> None:
            sink.start(200, [])
            sink.write(b'{"id": "resp_1", "output": [{')
            if error is not None:
                raise error

        return answer

    api = SimpleNamespace(
        completions=None, preparers={BATCH.endpoint: SimpleNamespace(prepared=prepared)}, bodies=OpenBodies(10, 10)
    )
    outcome = await ask(cast("CallApi", api), BATCH, LINE, "r", "one")
    assert outcome.status == 502


def usage(**counts: Any) -> tuple[int, int, int, int]:
    return usage_of(json.dumps({"usage": counts}).encode())


def test_usage_is_read_in_the_forms_of_all_apis() -> None:
    of_prompt, of_answer = {"cached_tokens": 4}, {"reasoning_tokens": 2, "audio_tokens": None}
    chat = {"prompt_tokens_details": of_prompt, "completion_tokens_details": of_answer}
    assert usage(prompt_tokens=9, completion_tokens=3, **chat) == (9, 4, 3, 2)
    response = {"input_tokens_details": of_prompt, "output_tokens_details": of_answer}
    assert usage(input_tokens=9, output_tokens=3, **response) == (9, 4, 3, 2)
    message = {"cache_creation_input_tokens": 1, "cache_read_input_tokens": 4, "output_tokens": 3}
    assert usage(input_tokens=4, **message, output_tokens_details={"thinking_tokens": 2}) == (9, 4, 3, 2)


def test_a_count_that_is_null_is_none() -> None:
    assert usage(prompt_tokens=7, completion_tokens=None, prompt_tokens_details={"cached_tokens": 2.5}) == (7, 2, 0, 0)


@pytest.mark.parametrize("cached", ["7", [7], {"tokens": 7}])
def test_a_count_that_is_no_number_is_none(cached: object) -> None:
    assert usage(prompt_tokens=5, prompt_tokens_details={"cached_tokens": cached}) == (5, 0, 0, 0)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"usage": [7]}', b'{"usage": null}', b"\xff"])
def test_an_answer_without_usage_counts_nothing(body: bytes) -> None:
    assert usage_of(body) == (0, 0, 0, 0)
