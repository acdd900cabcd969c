"""Programs of users, which run in an environment of their own."""

from __future__ import annotations

from typing import Final

GREET: Final = '''
import sys
from plait.client import Client, SemanticVariable, semantic_function

@semantic_function(max_tokens=5)
def greet(name: str) -> SemanticVariable:
    """Greet {{name}}: {{greeting}}"""

with Client(sys.argv[1], model="demo") as client, client.session() as session:
    print(greet.on(session)("Ada").get())
'''
"""A semantic function on the gateway whose address is the argument."""

LOAD: Final = """
import sys
from plait.backends.tokenization.loading import load_tokenizer

tokenizer = load_tokenizer(sys.argv[1])
print(tokenizer.encode_chat([{"role": "user", "content": "Is it raining?"}]))
"""
"""The ids of a chat by the tokenizer that the argument names."""
