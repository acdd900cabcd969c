"""What a program loads that uses the client and nothing else."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {
    *("gateway.app", "gateway.router", "gateway.tokenization", "gateway.transforms", "backends"),
    *("starlette", "uvicorn", "tokenizers", "transformers", "tiktoken", "jinja2", "re2", "prometheus_client"),
    *("structlog", "openai", "pydantic", "langchain_core", "numpy"),
}


def test_the_client_loads_nothing_of_the_server() -> None:
    program = "import sys, gateway.client; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "gateway.client.session" in loaded
    assert HEAVY.isdisjoint(loaded)
