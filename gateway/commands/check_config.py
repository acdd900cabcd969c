"""`plait check-config`: whether a configuration file can be used, without serving."""

from __future__ import annotations

import argparse
from pathlib import Path

from plait.gateway.app import Gateway
from plait.gateway.commands.server_secret import known_secret
from plait.gateway.config_file import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="see config.example.toml")


def run(arguments: argparse.Namespace) -> None:
    """Read the file and all that belongs to it: tokenizers, templates, profiles, secret. Raises ValueError."""
    config = load_config(arguments.config)
    Gateway(config, known_secret(config, arguments.config))
    engines, models = len(config.engines), len(config.models)
    print(f"{arguments.config}: good, with {_count(engines, 'engine')} and {_count(models, 'configured model')}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
