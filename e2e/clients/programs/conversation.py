"""What the programs share that hold a conversation: the job, the tools, and how they say what was answered.

A job is the first argument, as JSON: the model, the `kind` of the client, the prompts of this process, the file with
the history, and whether that is `shortened` between two prompts. A program prints one line of JSON for each answer.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

JOB: Final[dict[str, Any]] = json.loads(sys.argv[1])
MODEL: Final[str] = JOB["model"]
KIND: Final[str] = JOB["kind"]
HISTORY: Final = Path(JOB["history"])
PICTURE: Final = base64.b64encode(Path(JOB["picture"]).read_bytes()).decode()
PICTURE_URL: Final = f"data:image/png;base64,{PICTURE}"
SUMMARY: Final = "What has been so far: the shell was asked, and answered."
MAX_TOKENS: Final = 4_000
MAX_STEPS: Final = 8

SCHEMAS: Final[dict[str, Any]] = {
    "bash": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    "look": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


def shell(command: str) -> str:
    """What a command says."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout


def used(name: str, arguments: Any, picture: Any) -> Any:
    """The result of a tool: `picture` for `look`. Arguments that the model got wrong are its result."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        return picture if name == "look" else shell(parsed["command"])
    except (KeyError, TypeError, ValueError) as error:
        return f"These are no arguments: {error}"


def converse(turn: Callable[[Any, str], tuple[Any, str]], empty: Any, summary: Any) -> None:
    """Ask each prompt: `turn` takes a history and a prompt, and gives the history after it and the answer.

    `summary` is the history that stands for a longer one.
    """
    history = json.loads(HISTORY.read_text()) if HISTORY.exists() else empty
    for prompt in JOB["prompts"]:
        history, answer = turn(history, prompt)
        sys.stdout.write(json.dumps({"answer": answer}) + "\n")
        if JOB["shortened"]:
            history = summary
    HISTORY.write_text(json.dumps(history))
