"""`plait completion`: prints a script with which a shell completes the commands and their options."""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell that reads the script")


def run(arguments: argparse.Namespace) -> None:
    _complete_paths(arguments.parser)
    print(shtab.complete(arguments.parser, arguments.shell))


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    """Let the shell complete names of files for the arguments that take a path."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for command in action.choices.values():
                _complete_paths(command)
        elif action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
