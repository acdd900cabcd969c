"""LangChain's chains on Plait: the gateway gets templates and variables, not rendered texts (docs/client.md).

LangChain fills in a template before sending it, so a server sees one text without structure. `semantic` instead turns
each prompt, model and parser of a chain into one semantic function (Parrot, section 6). `Program` runs such a chain.
Needs langchain-core, which the extra `langchain` brings.
"""

from __future__ import annotations

from plait.client.langchain.call import SemanticCall, in_session
from plait.client.langchain.chain import semantic
from plait.client.langchain.program import Program
from plait.client.results import ParsedVariable

__all__ = ["ParsedVariable", "Program", "SemanticCall", "in_session", "semantic"]
