"""Chains of causes as clients get them: from what failed to the root, bounded, in words and for machines."""

from __future__ import annotations

import json

from plait.gateway.guests.programs.core.session_errors import (
    SHOWN_CAUSES,
    FailureCause,
    failure_causes,
    input_failed,
    variable_failed,
)
from plait.policy.programs.request_graph_state import Cause, InputFailed

ROOT = FailureCause(engine="e1", transform="json", message="transform json: no.")


def chain(length: int) -> Cause:
    """Call c0 fails to make v0, which c1 takes to make v1, and so on."""
    cause = Cause(ROOT, "c0")
    for number in range(1, length):
        cause = Cause(InputFailed(f"v{number - 1}"), f"c{number}", cause)
    return cause


def test_each_cause_has_what_is_known_of_it() -> None:
    error = json.loads(variable_failed("v2", chain(3)).body())["error"]
    assert error == {
        "message": (
            "The variable 'v2' has failed: c2: its input v1 failed, because c1: its input v0 failed, because c0: "
            "transform json: no."
        ),
        "type": "failed_dependency",
        "param": "semantic_var_id",
        "code": "variable_failed",
        "transient": False,
        "causes": [
            {
                "call": "c2",
                "engine": None,
                "transform": None,
                "variable": "v2",
                "message": "its input v1 failed",
                "transient": False,
            },
            {
                "call": "c1",
                "engine": None,
                "transform": None,
                "variable": "v1",
                "message": "its input v0 failed",
                "transient": False,
            },
            {
                "call": "c0",
                "engine": "e1",
                "transform": "json",
                "variable": "v0",
                "message": "transform json: no",
                "transient": False,
            },
        ],
    }


def test_a_call_that_cannot_run_is_the_nearest_cause() -> None:
    error = input_failed(chain(2))
    assert (error.status, error.code, error.causes[0].call, error.causes[0].variable) == (
        424,
        "input_failed",
        "c1",
        None,
    )
    assert error.causes[1].variable == "v0"


def test_a_cause_in_words_only_is_a_message() -> None:
    assert failure_causes(Cause("it was cancelled", "c0"), "v0") == [
        FailureCause(call="c0", variable="v0", message="it was cancelled")
    ]


def test_the_middle_of_a_long_chain_is_left_out() -> None:
    for length in range(1, 3 * SHOWN_CAUSES):
        causes = failure_causes(chain(length), f"v{length - 1}")
        whole = [(f"c{number}", f"v{number}") for number in reversed(range(length))]
        shown = [(cause.call, cause.variable) for cause in causes]
        if length <= SHOWN_CAUSES:
            assert shown == whole
            continue
        half = SHOWN_CAUSES // 2
        assert shown == [*whole[:half], (None, None), *whole[-half:]]
        assert causes[half].message == f"{length - SHOWN_CAUSES} more calls failed because an input failed"
        assert (causes[-1].engine, causes[-1].transform) == ("e1", "json")
