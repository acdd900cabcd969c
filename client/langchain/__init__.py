"""LangChain's chains on Plait: templates reach the gateway with their variables instead of rendered (docs/client.md).

LangChain fills a template in before it sends it, so that a server sees one text and no structure. `semantic` makes of
each prompt, model and parser in a chain one semantic function instead (Parrot, section 6); `Program` runs such a chain.
Needs langchain-core: `pip install plait[langchain]`.
"""

from __future__ import annotations

from plait.client.langchain.call import ParsedVariable, SemanticCall, in_session
from plait.client.langchain.chain import semantic
from plait.client.langchain.program import Program

__all__ = ["ParsedVariable", "Program", "SemanticCall", "in_session", "semantic"]
