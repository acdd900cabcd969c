"""The Python front end: prompts as functions, their results as futures, chained in the gateway (docs/client.md).

The package needs only httpx and msgspec, and imports nothing of the gateway.
"""

from __future__ import annotations

from plait.client.client import Client
from plait.client.errors import (
    AnswerError,
    ClientError,
    ConnectionFailedError,
    FailureCause,
    GetTimeoutError,
    SkippedError,
    TemplateError,
    VariableFailedError,
)
from plait.client.function import NativeFunction, SemanticFunction, native_function, semantic_function
from plait.client.objectives import Objective, Slo
from plait.client.prompt import Output
from plait.client.session import Session
from plait.client.variable import Argument, Condition, SemanticVariable, Text

__all__ = [
    "AnswerError",
    "Argument",
    "Client",
    "ClientError",
    "Condition",
    "ConnectionFailedError",
    "FailureCause",
    "GetTimeoutError",
    "NativeFunction",
    "Objective",
    "Output",
    "SemanticFunction",
    "SemanticVariable",
    "Session",
    "SkippedError",
    "Slo",
    "TemplateError",
    "Text",
    "VariableFailedError",
    "native_function",
    "semantic_function",
]
