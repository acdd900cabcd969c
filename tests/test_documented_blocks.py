"""README and docs: what can be told of a block of code without running it, also of those that need what is not here.

`make packages` runs the blocks (e2e/pages).
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from plait.gateway.cli import COMMANDS, LAUNCHERS, parse
from tests.pages import PAGES, blocks, command_lines
from tests.source_tree import ROOT
from tests.test_monitoring import SELECTOR, labels_of_metrics

INLINE = re.compile(r"`(?P<command>(?:plait|python -m) [^`]+)`")
OTHERS = {*LAUNCHERS, "dynamo", "sglang_router"}
"""Programs whose modules are not here: engines, and what a reader comes from."""
MOST_LINES = 120
"""The most lines of README."""
PATH_OF_OURS = re.compile(r"\bplait(?:\.\w+){3,}")


def named(pair: object) -> str:
    return getattr(pair, "name", "")


@pytest.mark.parametrize(("page", "text"), blocks("python"), ids=named)
def test_a_program_parses_and_what_it_imports_is_there(page: Path, text: str) -> None:
    """What only a client's environment has is imported there: e2e/clients/test_page.py."""
    for node in ast.walk(ast.parse(text, str(page))):
        if isinstance(node, ast.ImportFrom) and node.module and find_spec(node.module.partition(".")[0]):
            for alias in node.names:
                assert hasattr(import_module(node.module), alias.name), f"{node.module}.{alias.name}"


@pytest.mark.parametrize(("page", "text"), blocks("json"), ids=named)
def test_json_parses(page: Path, text: str) -> None:
    assert json.loads(text)


@pytest.mark.parametrize(("page", "text"), blocks("ini"), ids=named)
def test_a_configuration_of_a_client_parses(page: Path, text: str) -> None:
    assert tomllib.loads(text)


@pytest.mark.parametrize(("page", "text"), blocks("nginx"), ids=named)
def test_nginx_statements_end(page: Path, text: str) -> None:
    statements = re.sub(r"\w+ \w+ \{((?:[^{};]+;)+)\s*\}", "", text)
    assert not statements.strip()


@pytest.mark.parametrize(("page", "text"), blocks("promql"), ids=named)
def test_a_query_asks_for_metrics_and_labels_that_there_are(page: Path, text: str) -> None:
    labels = labels_of_metrics()
    asked = SELECTOR.findall(text)
    assert asked
    assert text.count("(") == text.count(")")
    for metric, matchers in asked:
        name = re.sub(r"_(?:count|sum)$", "", metric)
        assert name in labels
        buckets = {"le"} if metric.endswith("_bucket") else set()
        assert set(re.findall(r"(\w+)\s*[=!]", matchers)) <= labels[name] | buckets


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def options_of(command: str) -> set[str]:
    """The options that a command of ours takes."""
    commands = parse(["completion", "bash"]).parser  # has the options of all commands
    (choices,) = (one.choices for one in commands._actions if isinstance(one, argparse._SubParsersAction))
    return set(choices[command]._option_string_actions)


def inline() -> Iterator[list[str]]:
    """The words of each command that stands within a sentence. Arguments for an engine, behind `--`, are left out."""
    for page in PAGES:
        for found in INLINE.finditer(page.read_text(encoding="utf-8")):
            yield shlex.split(re.sub(r"[\[\]]|\.\.\.", " ", found["command"]).partition(" -- ")[0])


def test_each_command_within_a_sentence_is_there_with_its_options() -> None:
    found = [words for words in inline() if words[0] == "plait"]
    assert len(found) > 50
    for _, command, *rest in found:
        if command.isupper() or command.startswith("-"):
            continue  # stands for any command
        assert command in {*COMMANDS, *LAUNCHERS, "live"}, command  # renamed, as CHANGELOG says
        if command in COMMANDS:
            assert {word for word in rest if word.startswith("--")} <= options_of(command), (command, rest)


def modules_run() -> Iterator[list[str]]:
    """What `python -m` runs, with its arguments: within sentences and in blocks."""
    yield from (words[2:] for words in inline() if words[0] == "python")
    for line in command_lines():
        if found := re.search(r"\bpython3? -m (.+)", line):
            yield shlex.split(re.sub(r"[\[\]]|\.\.\.", " ", found[1]), comments=True)


def test_each_module_that_is_run_is_there() -> None:
    found = list(modules_run())
    assert len(found) > 50
    for module, *arguments in found:
        if module == "benchmarks" and arguments and not arguments[0].startswith("-"):
            assert (ROOT / "benchmarks" / f"{arguments[0]}.py").is_file(), arguments
        elif module.partition(".")[0] not in OTHERS:
            assert find_spec(module), module


def test_each_name_of_ours_that_an_engine_is_given_is_there() -> None:
    found = {name for line in command_lines() for name in PATH_OF_OURS.findall(line)}
    assert found
    for name in found:
        path, _, attribute = name.removeprefix("plait.").replace(".", "/").rpartition("/")
        defined = {
            node.name
            for node in ast.parse((ROOT / f"{path}.py").read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
        assert attribute in defined, name
