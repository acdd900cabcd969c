"""README and docs: the keys that they name are there, their commands are ones that Plait takes."""

from __future__ import annotations

import re
import shlex

from plait.backends.sglang.launch import serve_command as sglang_command
from plait.backends.vllm.launch import serve_command as vllm_command
from plait.gateway.cli import LAUNCHERS, parse
from plait.gateway.config.sections import Config
from tests.pages import PAGES, command_lines
from tests.source_tree import ROOT

SECTIONS = ("server", "log", "placement", "upstream", "admission", "sessions")
KEY = re.compile(rf"`({'|'.join(SECTIONS)})\.(?!py`)(\w+)(?: = [^`]*)?`")


def commands(name: str) -> list[list[str]]:
    """The arguments of each line that runs a command, in an environment that the line may set."""
    found = (re.match(rf"(?:[A-Z_]+=\S+ )*{name} (.*)", line) for line in command_lines())
    return [shlex.split(match[1], comments=True) for match in found if match]


def test_every_key_that_a_page_names_is_there() -> None:
    """A key of a section that stands once: `section.name` in backticks."""
    keys = {name: getattr(Config(), name).__struct_fields__ for name in SECTIONS}
    pages = [page for page in PAGES if page.name not in {"CHANGELOG.md", "upgrading.md"}]  # names those that are gone
    named = {match.groups() for page in pages for match in KEY.finditer(page.read_text(encoding="utf-8"))}
    assert len(named) > 20
    assert not [f"{section}.{name}" for section, name in named if name not in keys[section]]


def test_every_command_of_ours_is_taken() -> None:
    found = commands("plait")
    assert len(found) >= 2
    for arguments in found:
        if arguments[0] in LAUNCHERS:
            assert {"vllm": vllm_command, "sglang": sglang_command}[arguments[0]](arguments[1:])
        else:
            assert parse(arguments).run


def test_every_target_that_is_named_is_there() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {arguments[0] for arguments in commands("make")}
    assert {"demo", "test"} <= named <= targets
