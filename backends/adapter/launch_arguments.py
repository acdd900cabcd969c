"""The command line of an engine's launcher: Plait's own options, then `--` and the engine's arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TypeVar

T = TypeVar("T")

OPTIONS = """
  --scheduler NAME   the local scheduler: slo (default), hit_ratio, longest_prefix, fcfs, or your own, by
                     package.module:name
  --profile PROFILE  a cost profile's name or .toml file: how long iterations take; by default this is measured
  --name NAME        the engine's name in its reports
  --require TIER     the lowest tier to start with: reports (default), order or chunks; an engine that lacks a name
                     of a higher tier starts with a lower one, and its log has the name
"""


class LaunchError(ValueError):
    """The command line is wrong. The message says what to change."""


def launched(
    arguments: Sequence[str], package: str, engine: str, usage: str, read: Callable[[Sequence[str]], T]
) -> T | None:
    """What `read` makes of a launcher's arguments; None for `--help`, which prints `usage`.

    Exits with a sentence if the arguments are wrong, or if this Python does not have the engine.
    """
    if arguments and arguments[0] in {"-h", "--help"}:
        sys.stdout.write(usage)
        return None
    try:
        made = read(arguments)
    except LaunchError as error:
        raise SystemExit(f"plait {package}: {error}\n\n{usage}") from error
    if find_spec(package) is None:
        raise SystemExit(
            f"plait {package}: {engine} is not installed for {sys.executable}; install Plait into the engine's "
            f"environment and run its `plait`, or: pip install 'plait[{package}]'"
        )
    return made


def split_arguments(arguments: Sequence[str], engine: str) -> tuple[dict[str, str], list[str]]:
    """Returns Plait's settings by name, and the engine's arguments. Raises LaunchError."""
    if "--" not in arguments:
        raise LaunchError(f"put the arguments for {engine} after --")
    cut = list(arguments).index("--")
    return _settings(list(arguments[:cut]), engine), list(arguments[cut + 1 :])


def taken_options(served: Sequence[str]) -> set[str]:
    """The names of the options among an engine's arguments, with dashes for underscores."""
    return {argument.partition("=")[0].replace("_", "-") for argument in served if argument.startswith("--")}


def _settings(own: list[str], engine: str) -> dict[str, str]:
    settings = {}
    rest = [part for argument in own for part in argument.split("=", 1)]
    while rest:
        option, *rest = rest
        if option not in {"--scheduler", "--profile", "--name", "--require"}:
            raise LaunchError(f"{option} is not an option of Plait; put the arguments for {engine} after --")
        if not rest:
            raise LaunchError(f"{option} needs a value")
        settings[option[2:]], *rest = rest
    return settings
