"""The Python front end: prompts as functions, their results as futures, chained in the gateway (docs/client.md).

It needs httpx and msgspec beside the standard library, and loads nothing of the server.
"""

from __future__ import annotations

from gateway.client.client import Client
from gateway.client.errors import (
    AnswerError,
    ClientError,
    ConnectionFailedError,
    GetTimeoutError,
    TemplateError,
    VariableFailedError,
)
from gateway.client.failure_cause import FailureCause
from gateway.client.function import SemanticFunction, semantic_function
from gateway.client.objectives import Objective, Slo
from gateway.client.prompt import Output
from gateway.client.session import Session
from gateway.client.variable import Argument, SemanticVariable, Text

__all__ = [
    "AnswerError",
    "Argument",
    "Client",
    "ClientError",
    "ConnectionFailedError",
    "FailureCause",
    "GetTimeoutError",
    "Objective",
    "Output",
    "SemanticFunction",
    "SemanticVariable",
    "Session",
    "Slo",
    "TemplateError",
    "Text",
    "VariableFailedError",
    "semantic_function",
]
