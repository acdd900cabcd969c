"""The rules that keep the packages apart, read from the source: who may import whom, and what may be caught where."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.backends.protocol.dialects import DIALECTS
from tests import source_tree
from tests.source_tree import ROOT, SHIPPED, imported_names, imports, path_of, reached_from, sources, top_level, tree_of

MAY_IMPORT = {
    "policy": {"policy"},
    "backends": {"backends", "policy"},
    "gateway": {"gateway", "backends", "policy"},
    "lab": {"lab", "gateway", "backends", "policy"},
    "client": {"client"},
    "tests": {"tests", *SHIPPED},
    "examples": {"examples", "client"},
    "e2e": {"e2e", "examples", "tests", *SHIPPED},
    "benchmarks": {"benchmarks", "e2e", "tests", *SHIPPED},
}
"""lab -> gateway -> backends -> policy; client stands alone; nobody imports benchmarks."""

IMPURE_MODULES = {
    *("asyncio", "concurrent", "multiprocessing", "queue", "sched", "select", "selectors", "signal", "threading"),
    *("datetime", "random", "secrets", "time", "uuid"),
    *("builtins", "ctypes", "importlib", "inspect", "io", "os", "pathlib", "runpy", "shutil", "subprocess", "tempfile"),
    *("http", "logging", "socket", "socketserver", "ssl", "urllib", "warnings"),
}
"""What policy does without: clocks, randomness, concurrency, I/O, and ways around this list."""

IMPURE_CALLS = {"__import__", "breakpoint", "compile", "eval", "exec", "exit", "globals", "input", "open", "print"}

ENGINE_FOLDERS = {f"backends/{kind}": row.launcher.package for kind, row in DIALECTS.items() if row.launcher}
"""Run inside an engine's environment, where only Plait's base is installed."""

WITH_HTTPX = {"gateway/commands"}
"""Commands that ask a server now and then. To the gateway it would cost half a millisecond a request."""

BROAD_EXCEPT: dict[str, str] = {
    "gateway/config/placement_policy.py: _loaded": "a policy of one's own is a program: it may raise anything",
    "gateway/fleet/guarded_policy.py: age": "the same: the prefix tree is tidied nevertheless",
    "gateway/fleet/guarded_policy.py: place": "a policy of one's own is a program: no call may hang for its defect",
    "gateway/supervision.py: _run": "a long-lived task has to outlive any defect in it: it is counted and restarted",
    "gateway/guests/durability/durability.py: _read": "a defect in a session's replay must not cost all other sessions",
    "gateway/guests/durability/durability.py: _make_session": (
        "a session that is half made has to end, whatever stopped it"
    ),
    "gateway/server/open_requests.py: _answer": "a defect in a request has to be answered, not to end the server",
    "gateway/server/open_requests.py: begin": "a defect in a request has to be answered, not to end the server",
    "gateway/server/open_requests.py: _pass_on": "a defect in a request has to be answered by another server, too",
    "gateway/server/open_requests.py: cut": "a defect in a request must not keep the others from their end",
    "gateway/calls/relay.py: _take": "an event has no caller to raise to: whoever began the call is told",
    "gateway/guests/batches/runner.py: _run": "a defect must not keep a batch from its end",
    "gateway/guests/batches/runner.py: _contained": "a defect in one line must not keep a batch from its end",
    "gateway/api/call_api.py: answer": "whatever ends a request is recorded, and raised again",
    "gateway/api/call_api.py: begin": "a defect in a request has to be answered",
    "gateway/api/call_api.py: _has_begun": "a defect in a request has to be answered, and its body given back",
    "gateway/intake/turns.py: _refuse_late": "a defect in one request must not keep the others from their answers",
    "gateway/intake/turns.py: charged": "whatever is thrown into a task is for the work inside",
    "backends/http/client.py: _open": "a task has no caller to raise to: whoever waits for the response is told",
    "backends/tokenization/checked_encoder.py: _unless_it_fails": (
        "a panic in Rust is no Exception, and texts are encoded in another way then"
    ),
    "backends/adapter/engine_tokenizer.py: render_probe": "a chat template is a program: it refuses by any error",
    "backends/adapter/engine_tokenizer.py: render_requested": "validators of the engine raise what they like",
    "backends/adapter/engine_tokenizer.py: read_tokenizer": (
        "a model may bring its tokenizer's code: whatever that raises, the engine has to start"
    ),
    "backends/adapter/routes.py: answer_tokenizer": "a model may bring its tokenizer's code: the gateway is told that",
    "gateway/membership/tokenizer_search.py: _from_engine": (
        "libraries raise what they like for files that are no tokenizer"
    ),
    "gateway/membership/tokenizer_search.py: _from_cache": (
        "libraries raise what they like for files that are no tokenizer"
    ),
    "gateway/guests/tracing/exporter.py: _send": "a defect in one record must not end the thread for all others",
    "gateway/membership/hub_downloads.py: _try": "libraries raise what they like for files that are no tokenizer",
    "gateway/membership/hub_downloads.py: without_panic": "a panic in Rust is no Exception: it would end a task",
    "client/native.py: compute": "a program's own function may raise anything: then its variable fails with it",
    "client/native.py: acompute": "a program's own function may raise anything: then its variable fails with it",
}
"""`file: function` -> why everything has to be caught there."""


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_stands_to_its_right(package: str) -> None:
    wrong = {
        path_of(file): bad
        for file in sources(package)
        if (bad := top_level(imports(file)) & set(MAY_IMPORT) - MAY_IMPORT[package])
    }
    assert not wrong


def test_the_packages_are_there() -> None:
    assert all(sources(package) for package in SHIPPED), "else this file tests nothing"


def test_the_folders_are_imported_by_the_packages_name() -> None:
    """The working directory has them too: each class would exist twice."""
    files = [file for package in MAY_IMPORT for file in sources(package)]
    assert not {path_of(file): bad for file in files if (bad := top_level(imported_names(file)) & set(SHIPPED))}


def test_policy_imports_the_standard_library_only() -> None:
    allowed = set(sys.stdlib_module_names) - IMPURE_MODULES | {"policy"}
    wrong = {path_of(file): bad for file in sources("policy") if (bad := top_level(imports(file)) - allowed)}
    assert not wrong


def test_policy_calls_nothing_impure() -> None:
    wrong = [
        f"{path_of(file)}:{node.lineno}: {node.func.id}"
        for file in sources("policy")
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS
    ]
    assert not wrong


def test_the_executors_core_needs_little_and_no_shell() -> None:
    allowed = set(sys.stdlib_module_names) - {"asyncio"} | {"msgspec", "policy", "backends", "gateway"}
    reached = reached_from(sources("gateway/guests/programs/core"))
    assert not {path_of(file): bad for file in reached if (bad := top_level(imports(file)) - allowed)}


def test_the_executors_core_loads_little() -> None:
    code = "import sys, plait.gateway.guests.programs.core.executor; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(run.stdout.split()).isdisjoint(
        {"asyncio", "httptools", "jinja2", "prometheus_client", "starlette", "tokenizers"}
    )


def test_an_engine_is_imported_in_its_own_folder_only() -> None:
    engines = set(ENGINE_FOLDERS.values())
    for package in SHIPPED:
        for file in sources(package):
            own = {engine for folder, engine in ENGINE_FOLDERS.items() if path_of(file).startswith(f"{folder}/")}
            assert top_level(imports(file)) & engines <= own, path_of(file)


@pytest.mark.parametrize("folder", ENGINE_FOLDERS)
def test_an_engine_folder_needs_nothing_that_the_engine_does_not_bring(folder: str) -> None:
    allowed = set(sys.stdlib_module_names) | {"msgspec", "policy", "backends", ENGINE_FOLDERS[folder]}
    wrong = {
        path_of(file): bad for file in reached_from(sources(folder)) if (bad := top_level(imports(file)) - allowed)
    }
    assert not wrong, "directly or through other modules of backends"


def compared_kinds(file: Path) -> Iterator[str]:
    """`file:line: kind` of each comparison with the name of an engine's kind, in a collection or a pattern too."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Compare | ast.MatchValue):
            for value in ast.walk(node):
                if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value in DIALECTS:
                    yield f"{path_of(file)}:{value.lineno}: {value.value}"


def test_the_gateway_compares_no_kind_of_engine() -> None:
    """What a kind does otherwise is a field of its row in `backends/protocol/dialects.py`."""
    assert [found for file in sources("gateway") for found in compared_kinds(file)] == []


@pytest.mark.parametrize(
    "source",
    [
        'told = kind == "vllm"',
        'if kind in ("embedded", "sglang"):\n    pass',
        'match kind:\n    case "none" | "sglang":\n        pass',
    ],
)
def test_a_comparison_with_a_kind_is_found(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "tree_of", lambda _file: ast.parse(source))
    assert list(compared_kinds(ROOT / "gateway" / "example.py"))


def test_the_fleet_reads_no_clock() -> None:
    """Times are arguments there, also those for people."""
    files = [file for file in sources("gateway") if path_of(file).startswith("gateway/fleet/")]
    assert not {path_of(file): bad for file in files if (bad := top_level(imports(file)) & {"asyncio", "time"})}


def test_a_gateway_does_without_httpx() -> None:
    files = [*sources("gateway"), *sources("backends")]
    found = {file for file in files if "httpx" in top_level(imports(file))}
    assert {Path(path_of(file)).parent.as_posix() for file in found} == WITH_HTTPX


def broad_handlers(file: Path) -> Iterator[str]:
    """`file: function` of each bare except and each that names Exception or BaseException."""

    def visit(node: ast.AST, function: str) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.ExceptHandler):
            caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else {""}
            if caught & {"", "Exception", "BaseException"}:
                yield f"{path_of(file)}: {function}"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return visit(tree_of(file), "module")


def test_everything_is_caught_only_where_there_is_a_reason() -> None:
    found = {place for package in SHIPPED for f in sources(package) for place in broad_handlers(f)}
    assert found == set(BROAD_EXCEPT), "a place without a reason, or a reason without its place"
    assert all(BROAD_EXCEPT.values())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os.path, json", {"os.path", "json"}),
        ("def f():\n    from random import choice", {"random.choice"}),
        ("from . import node", {"policy.node"}),
        ("from .node import Node", {"policy.node.Node"}),
        ("if TYPE_CHECKING:\n    import plait.gateway.fleet.router", {"gateway.fleet.router"}),
    ],
)
def test_imports_are_found_wherever_they_stand(
    source: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_tree, "tree_of", lambda _file: ast.parse(source))
    assert imports(ROOT / "policy" / "example.py") == expected


def test_what_a_file_reaches_is_found_through_others() -> None:
    reached = {path_of(file) for file in reached_from([ROOT / "lab" / "embedded" / "engine.py"])}
    assert reached >= {"backends/__init__.py", "backends/protocol/cache_state.py", "policy/prefix/block_hash.py"}


@pytest.mark.parametrize("handler", ["except:", "except Exception:", "except (OSError, BaseException) as error:"])
def test_broad_handlers_are_found(handler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"def f():\n    try:\n        pass\n    {handler}\n        pass\n    except OSError:\n        pass"
    monkeypatch.setitem(globals(), "tree_of", lambda _file: ast.parse(source))
    assert list(broad_handlers(ROOT / "policy" / "example.py")) == ["policy/example.py: f"]


def test_a_gateway_imports_no_tokenizer_library_before_it_needs_one() -> None:
    """They take a second, and most of the memory."""
    code = (
        "import sys, plait.gateway.commands.serve; from plait.gateway.app import Gateway; "
        "from plait.gateway.config.sections import Config; Gateway(Config()); "
        "print([name for name in ('transformers', 'numpy', 'huggingface_hub', 'tiktoken') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
