"""The environment of real llama.cpp: `.venv-llamacpp`, which `python -m e2e.llamacpp.environment` builds or renews.

xllamacpp's wheels contain llama.cpp's own HTTP server, built for the CPU. gguf writes the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from e2e.real_engines.environment import Environment

ENVIRONMENT: Final = Environment("llamacpp", (Path(__file__),))
REQUIREMENTS: Final = ("xllamacpp==2026.10.11549", "gguf==0.19.0")


def install(environment: Environment) -> None:
    """Install the server."""
    environment.install(*REQUIREMENTS)


if __name__ == "__main__":
    ENVIRONMENT.build(install)
