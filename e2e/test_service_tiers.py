"""OpenAI's `service_tier`, as its SDK asks for it and reads it, and responses in the background."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.sdk import asking, sync_client
from e2e.server_process import eventually
from e2e.servers import Fleet

LATENCY, THROUGHPUT = {"plait-objective": "latency"}, {"plait-objective": "throughput"}


def good(fleet: Fleet, objective: str) -> float:
    """How many calls with an objective were answered."""
    return fleet.gateway.metric("plait_good_calls_total", objective=objective)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("asked", "headers", "told", "objective"),
    [
        ("priority", {}, "priority", "latency"),
        ("flex", {}, "flex", "throughput"),
        ("auto", {}, "default", ""),
        ("default", {}, "default", ""),
        ("auto", LATENCY, "priority", "latency"),
        ("priority", THROUGHPUT, "flex", "throughput"),
        ("priority", {"plait-slo-ttft-ms": "60000"}, "default", ""),
        (None, {}, None, ""),
    ],
)
def test_a_tier_is_an_objective_and_is_answered(
    fleet: Fleet, asked: Any, headers: dict[str, str], told: str | None, objective: str, *, streamed: bool
) -> None:
    fields = {} if asked is None else {"service_tier": asked}
    before = good(fleet, objective)
    with sync_client(fleet.gateway) as sdk:
        answer: Any = sdk.chat.completions.create(
            **asking("Say something."), **fields, stream=streamed, extra_headers=headers
        )
        if streamed:
            chunks = list(answer)
            assert [chunk.service_tier for chunk in chunks] == [told] + [None] * (len(chunks) - 1)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            assert answer.service_tier == told
            assert answer.choices[0].message.content
    eventually(lambda: good(fleet, objective) == before + 1)


def test_a_response_in_the_background_gives_way_unless_it_says_otherwise(fleet: Fleet) -> None:
    with sync_client(fleet.gateway) as sdk:

        def respond(**fields: Any) -> None:
            begun = sdk.responses.create(model="demo", input="Say something.", background=True, **fields)
            eventually(lambda: sdk.responses.retrieve(begun.id).status == "completed")

        for fields, objective in (({}, "throughput"), ({"service_tier": "priority"}, "latency")):
            before = good(fleet, objective)
            respond(**fields)
            assert good(fleet, objective) == before + 1
