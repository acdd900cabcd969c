"""The names that programs import (docs/stability.md): what a release had stays."""

from __future__ import annotations

from typing import Final

from plait import client

RELEASED: Final = {
    "0.2.0": {
        *("AnswerError", "Argument", "Client", "ClientError", "Condition", "ConnectionFailedError", "FailureCause"),
        *(
            "GetTimeoutError",
            "NativeFunction",
            "Objective",
            "Output",
            "SemanticFunction",
            "SemanticVariable",
            "Session",
        ),
        *("SkippedError", "Slo", "TemplateError", "Text", "VariableFailedError", "native_function"),
        "semantic_function",
    },
}
"""By the version that first had them."""


def test_the_names_of_a_release_stay() -> None:
    assert set().union(*RELEASED.values()) == set(client.__all__)
    assert all(hasattr(client, name) for name in client.__all__)
