"""`config.example.toml`, made from the classes of the sections. `python -m tests.example_config` writes it."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, get_args

import msgspec

from plait.gateway.config.section import Section
from plait.gateway.config.sections import Config
from tests.source_tree import ROOT

EXAMPLE: Final = ROOT / "config.example.toml"

HEAD: Final = """\
# Every key of Plait's configuration. If a section or a key is left out, its default applies: the value here, or none
# where the key stands behind a "#".
# As it stands, this file fits the four embedded engines that `make demo` starts.
# Any string may refer to the environment as "${NAME}". Relative paths start at this file's folder.
"""

DEMO: Final[Mapping[str, Sequence[Mapping[str, object]]]] = {
    "models": [{"name": "demo", "tokenizer": "embedded"}],
    "engines": [
        {"url": "http://127.0.0.1:8101", "name": "engine-1", "models": ["demo"]},
        *({"url": f"http://127.0.0.1:{8100 + number}", "name": f"engine-{number}"} for number in (2, 3, 4)),
    ],
}
"""The tables that the demo needs, by their section."""

EXAMPLES: Final[Mapping[str, object]] = {
    "server.secret": "${PLAIT_SECRET}",
    "server.admin_key": "${PLAIT_ADMIN_KEY}",
    "server.admin_port": 8001,
    "server.metrics_key": "${METRICS_KEY}",
    "server.root_path": "/llm",
    "server.cors_origins": ["https://app.example.com"],
    "server.advertise_url": "http://10.0.0.1:8000",
    "server.peer_key": "${PLAIT_PEER_KEY}",
    "tenants.name": "blue",
    "tenants.api_keys": ["${BLUE_API_KEY}"],
    "tenants.calls_per_s": 10.0,
    "tenants.tokens_per_s": 20_000.0,
    "tenants.max_running": 32,
    "tenants.max_waiting": 100,
    "tenants.budget": {"day": 5.0, "month": 100.0},
    "store.path": "/var/lib/plait/sessions.db",
    "store.url": "postgresql://plait@db.internal:5432/plait",
    "tracing.endpoint": "http://collector:4318/v1/traces",
    "models.chat_template": "templates/demo.jinja",
    "models.max_context_tokens": 32_768,
    "models.aliases": ["gpt-4o", "default"],
    "models.fallbacks": ["small"],
    "models.price": {"input": 0.5, "cached": 0.05, "output": 1.5},
    "engines.api_key": "${ENGINE_API_KEY}",
    "engines.kv_tokens": 198_516,
    "engines.host_kv_tokens": 763_000,
    "engines.ranks": 8,
    "services.url": "http://vllm.default.svc.cluster.local:8000",
    "services.name": "vllm",
    "services.api_key": "${ENGINE_API_KEY}",
    "services.kv_tokens": 198_516,
    "services.host_kv_tokens": 763_000,
    "services.ranks": 8,
}
"""What stands behind a "#": for keys without a default, and for whole sections that the demo does not need."""


def text() -> str:
    return "\n".join([HEAD, *("\n".join(_section(field)) + "\n" for field in msgspec.structs.fields(Config))])


def _section(field: msgspec.structs.FieldInfo) -> Iterator[str]:
    name, kind = field.name, (get_args(field.type) or [field.type])[0]
    head, demo = (f"[{name}]", [{}]) if kind is field.type else (f"[[{name}]]", DEMO.get(name, []))
    off = "" if demo else "# "
    meanings = _meanings(kind)
    yield from _comment(kind.__doc__)
    yield off + head
    for key in msgspec.structs.fields(kind):
        if name != "services" or key.name in kind.__annotations__:  # the others stand at [[engines]]
            yield from _comment(meanings.get(key.name))
        if demo and key.name in demo[0]:
            yield f"{key.name} = {_written(demo[0][key.name])}"
        elif f"{name}.{key.name}" in EXAMPLES:
            yield f"# {key.name} = {_written(EXAMPLES[f'{name}.{key.name}'])}"
        else:
            yield f"{off}{key.name} = {_written(_default(key))}{_size(key)}"
    for table in demo[1:]:
        yield from ("", head, *(f"{key} = {_written(value)}" for key, value in table.items()))


def _default(key: msgspec.structs.FieldInfo) -> Any:
    return key.default if key.default is not msgspec.NODEFAULT else key.default_factory()


def _written(value: Any) -> str:
    if isinstance(value, dict) and value:
        return f"{{{', '.join(f'{name} = {_written(one)}' for name, one in value.items())}}}"
    return f"{value:_}" if isinstance(value, int) and value >= 10_000 else json.dumps(value)


def _size(key: msgspec.structs.FieldInfo) -> str:
    """Bytes for people: 65536 is 64 KiB."""
    if not key.name.endswith("_bytes"):
        return ""
    power = next(power for power in (3, 2, 1) if key.default >= 1024**power)
    return f"  # {key.default // 1024**power} {'KMG'[power - 1]}iB"


def _meanings(kind: type[Section]) -> dict[str, str]:
    """The string below each field, by the field's name."""
    found: dict[str, str] = {}
    for part in reversed(kind.__mro__[: kind.__mro__.index(Section)]):
        (made,) = ast.parse(inspect.getsource(part)).body
        assert isinstance(made, ast.ClassDef)
        for field, below in zip(made.body, made.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[ast.unparse(field.target)] = str(ast.literal_eval(below.value))
    return found


def _comment(meaning: str | None) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join((meaning or "").split()), 118, break_on_hyphens=False)]


if __name__ == "__main__":
    EXAMPLE.write_text(text(), encoding="utf-8")
