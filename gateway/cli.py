"""The `plait` command. A subcommand's modules are imported only when it runs.

The gateway's dependencies come with the extra `gateway`, those of the commands that ask one with `cli`. The
environments of engines (`plait vllm`, `plait sglang`) and of programs with Plait's client have neither. Slow modules
are imported after the signal handlers are set, so that a signal during the imports ends the process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from plait.backends.protocol.dialects import DIALECTS
from plait.gateway.server.signals import let_end_process

if TYPE_CHECKING:
    import argparse

COMMANDS = {
    "serve": "run the gateway",
    "check-config": "say whether a configuration file can be used",
    "engine": "run an embedded engine: an OpenAI server over an emulated GPU",
    "demo": "run the gateway over four embedded engines, or compare placement policies on them",
    "status": "say what is wrong with a gateway now",
    "top": "watch a gateway in the terminal: problems, engines, prefixes and calls",
    "drain": "let an engine get no new calls, or say where they would go",
    "batch": "run the lines of a file as a batch, and wait for the answers",
    "keys": "issue, list and revoke API keys of tenants",
    "usage": "say what tenants, keys or models have used",
    "profile": "fit a cost profile from a live engine",
    "explain": "say what became of a request and why, or what the code of an error means",
    "completion": "print what a shell needs to complete these commands and their options",
}
"""The commands and their help. Each is a module of `plait.gateway.commands`, or of `plait.lab.commands` (with `_` for
`-`)."""

OF_LAB = frozenset(("engine", "demo", "profile"))
"""Commands that emulate or measure. Nothing else imports `plait.lab`."""

OF_CLI = frozenset(("status", "top", "drain", "batch", "keys", "usage", "explain", "completion"))
"""Commands that run where no gateway does. The extra `cli` brings what they need."""

RENAMED = {"live": "top"}
"""Former names of commands, each with the present name."""

SERVERS = frozenset(("serve", "engine"))
"""Commands that handle SIGINT once they serve. Before that, SIGINT ends the process at once: a KeyboardInterrupt might
leave threads that never end."""

LAUNCHERS = {
    kind: f"start {row.title} with Plait's scheduler and cache-state route: plait {kind} -- <{row.launcher.arguments}>"
    for kind, row in DIALECTS.items()
    if row.launcher is not None
}
"""The commands that start an engine by its adapter's `launch.main(arguments)`, and their help. The arguments after `--`
go to the engine."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. For a user's mistake, it prints a message on stderr and returns 2."""
    words = sys.argv[1:] if argv is None else argv
    command = words[0] if words else ""
    try:
        if command in LAUNCHERS:
            import_module(f"plait.backends.{command}.launch").main(words[1:])
        else:
            let_end_process(signal.SIGTERM)
            if command in SERVERS:
                let_end_process(signal.SIGINT)
            else:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
            arguments = parse(words)
            arguments.run(arguments)
            sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError) as error:
        print(f"plait: {_told(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _told(error: Exception) -> str:
    """An error in one line; the system's begins with the file."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. In the result, `run` is the command's function and `parser` the parser of all commands.

    Raises ValueError for a command whose dependencies are not installed, and for a command's former name.
    """
    import argparse  # noqa: PLC0415
    from importlib.metadata import version  # noqa: PLC0415

    if argv and argv[0] in RENAMED:
        raise ValueError(f"`plait {argv[0]}` is `plait {RENAMED[argv[0]]}` now")
    parser = argparse.ArgumentParser(prog="plait", description="An OpenAI-compatible gateway for LLM engines.")
    parser.add_argument("--version", action="version", version=f"plait {version('plait')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    # The commands whose modules are imported: all to complete their options, otherwise the one that runs.
    told = COMMANDS if "completion" in argv[:1] else argv[:1]
    for name, summary in (COMMANDS | LAUNCHERS).items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name in told and (module := _command(name, is_asked=name == argv[0])):
            module.add_arguments(command)
            command.set_defaults(run=module.run, parser=parser)
    return parser.parse_args(argv)


def _command(name: str, *, is_asked: bool) -> ModuleType | None:
    """A command's module; None where it cannot run. Raises ValueError if it is the one that was asked for."""
    try:
        package = "lab" if name in OF_LAB else "gateway"
        return import_module(f"plait.{package}.commands.{name.replace('-', '_')}")
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.partition(".")[0] in {"", "plait"}:
            raise
        if not is_asked:
            return None
        extra = "cli" if name in OF_CLI else "gateway"
        raise ValueError(f"{name} needs {missing}, which is not installed: pip install 'plait[{extra}]'") from error


if __name__ == "__main__":
    sys.exit(main())
