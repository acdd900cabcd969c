"""Reads the configuration file: one TOML file, parsed once into the sections of `config`.

Any string may refer to the environment as `"${NAME}"`. Relative paths start at the file's folder. All problems of a
file are reported together, one per line.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
import structlog

from plait.backends.tokenization.hub import is_hub_name
from plait.gateway.config.section import Section
from plait.gateway.config.sections import Config, ModelConfig
from plait.gateway.config.values import shown

OLD_KEYS = {
    "admission.engine_backlog_s": "a call waits for the engine that it was placed on: see admission.ahead_s",
    "placement.prior_output_tokens": "128 tokens are expected of an answer until the first has ended",
    "placement.rebalance": "what was added to e2 made no call faster: see docs/placement.md",
    "receipts.compare": "each call's receipt has the best engines that were compared",
    "server.unsigned_peers_until": "only signed rows are trusted: see docs/scaling.md",
    "upstream.probe_max_interval_s": "it is three times upstream.probe_interval_s",
    "upstream.report_wait_ms": "it is upstream.probe_interval_s",
}
"""Keys without effect that earlier versions had, and why. A file may have them for one release."""

NAMED = ("auto", "embedded", "estimated", "bytes")
"""Tokenizers that are no files."""

log = structlog.get_logger(__name__)

_REFERENCE = re.compile(r"\$\{([^}]*)\}")


class ConfigError(ValueError):
    """The configuration is invalid. The message has a line for each problem: the key and the reason."""


def load_config(path: Path) -> Config:
    """The configuration in a TOML file. Raises `ConfigError` if the file cannot be read or is invalid."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"{path}: not a TOML file: {error}") from error
    return parse_config(data, str(path))


def parse_config(data: Mapping[str, object], source: str) -> Config:
    """The configuration in parsed TOML. Raises `ConfigError` with every problem found.

    `source` is the file's path: it names the file in errors, and relative paths in `data` start at its folder.
    """
    reader = _Reader()
    config = reader.table(Config, data, "")
    if config is not None:
        reader.problems.extend(_conflicts(config))
    if config is None or reader.problems:
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in reader.problems))
    folder = Path(source).absolute().parent
    store = config.store
    if store.path is not None:
        store = msgspec.structs.replace(store, path=str(folder / store.path))
    models = tuple(_with_whole_paths(model, folder) for model in config.models)
    return msgspec.structs.replace(config, models=models, store=store)


_SectionT = TypeVar("_SectionT", bound=Section)


class _Reader:
    """Turns parsed TOML into sections by their field types. It collects problems and does not stop at the first."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def table(self, kind: type[_SectionT], data: object, key: str) -> _SectionT | None:
        """The section, or None if something in it is wrong."""
        if not isinstance(data, Mapping):
            self.problems.append(f"{key} = {shown(data, key)}: expected a table")
            return None
        fields = msgspec.structs.fields(kind)
        unknown = [name for name in data if name not in kind.__struct_fields__]
        for name in [name for name in unknown if _dotted(key, name) in OLD_KEYS]:
            unknown.remove(name)
            log.warning("a key has no effect any more", key=_dotted(key, name), why=OLD_KEYS[_dotted(key, name)])
        self.problems.extend(_unknown_key(name, key, kind.__struct_fields__) for name in unknown)
        before = len(self.problems)
        values = {f.name: self.value(f.type, data[f.name], _dotted(key, f.name)) for f in fields if f.name in data}
        missing = [field.name for field in fields if field.required and field.name not in data]
        self.problems.extend(f"{_dotted(key, name)} is missing" for name in missing)
        if len(self.problems) > before:
            return None
        try:
            return kind(**values)
        except ValueError as error:  # a section's own check, whose message starts with the key
            self.problems.append(_dotted(key, str(error)))
            return None

    def value(self, kind: Any, data: object, key: str) -> Any:
        """A value of a field's type. After a problem the returned value is not used."""
        kind = next((one for one in get_args(kind) if _is_section(one) and get_origin(kind) is UnionType), kind)
        if _is_section(kind):
            return self.table(kind, data, key)
        if get_origin(kind) is tuple:
            return self.array(get_args(kind)[0], data, key)
        try:
            return msgspec.convert(self.filled(data, key), kind)
        except msgspec.ValidationError:
            self.problems.append(f"{key} = {shown(data, key)}: expected {_expected(kind)}")
            return None

    def filled(self, data: object, key: str) -> object:
        """The value with all its strings expanded."""
        if isinstance(data, str):
            return self.expanded(data, key)
        if isinstance(data, Mapping):
            return {name: self.filled(item, key) for name, item in data.items()}
        return [self.filled(item, key) for item in data] if isinstance(data, list | tuple) else data

    def array(self, item_kind: Any, data: object, key: str) -> tuple[Any, ...]:
        if not isinstance(data, list | tuple):
            expected = f"an array of tables, [[{key}]]" if _is_section(item_kind) else "an array"
            self.problems.append(f"{key} = {shown(data, key)}: expected {expected}")
            return ()
        return tuple(self.value(item_kind, item, f"{key}[{index}]") for index, item in enumerate(data))

    def expanded(self, text: str, key: str) -> str:
        wrong = dict[str, str]()
        for name in _REFERENCE.findall(text):
            value = os.environ.get(name)
            if value is None:
                wrong[name] = "not set in the environment"
            elif value != value.strip() or (not value and text == f"${{{name}}}"):
                wrong[name] = "empty or has white space at an end"
        self.problems.extend(f"{key} refers to ${{{name}}}, which is {why}" for name, why in wrong.items())
        if text[:1] == "$" and text[1:] in os.environ:
            self.problems.append(f"{key} = {shown(text)}: expected ${{{text[1:]}}}, with braces")
        # A reference to a wrong variable stays in the text, so that the text can still be checked.
        return _REFERENCE.sub(lambda match: match[0] if match[1] in wrong else os.environ[match[1]], text)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _conflicts(config: Config) -> Iterator[str]:
    """Conflicts between values that are each valid."""
    if not config.engines and not config.services:
        yield "engines: none is configured; add [[engines]] with a url, or [[services]]"
    if config.server.isolate_tenants and config.is_open:
        yield "server.isolate_tenants = true: expected server.api_keys or [[tenants]], which tell tenants apart"
    if config.store.url is not None:
        yield from _missing_for_sharing(config)
    yield from _repeated_keys(config)
    yield from _without_use(config)
    yield from _repeated("tenants", "name", [tenant.name for tenant in config.tenants])
    yield from _repeated("models", "name", [model.name for model in config.models])
    yield from _names_in_use(config)
    yield from _repeated("engines", "url", [engine.url for engine in config.engines])
    yield from _repeated("engines", "name", [engine.name for engine in config.engines])
    yield from _repeated("services", "name", [service.name for service in config.services])


def _missing_for_sharing(config: Config) -> Iterator[str]:
    """What gateways need to share a store."""
    server = config.server
    if server.advertise_url is None:
        yield "server.advertise_url is missing: with store.url, other gateways reach this one there"
    if server.peer_key is None:
        yield 'server.peer_key is missing: gateways that share store.url need the same, such as "${PLAIT_PEER_KEY}"'
    if server.secret is None and not config.is_open:
        yield "server.secret is missing: gateways that share store.url need the same, or tenants differ between them"
    if server.workers > 1:
        yield "server.workers: expected 1 with store.url; start several gateways, each with an advertise_url"


def _without_use(config: Config) -> Iterator[str]:
    """Tenants that nobody can be, and budgets in money where nothing has a price."""
    has_store, has_prices = config.store.path or config.store.url, any(model.price for model in config.models)
    for number, tenant in enumerate(config.tenants):
        if not tenant.api_keys and not has_store:
            yield f"tenants[{number}].api_keys = []: expected a key, or a [store] for keys that are made later"
        if tenant.budget is not None and tenant.budget.is_of_money and not has_prices:
            yield f"tenants[{number}].budget: expected a price in [[models]], or tokens_per_day or tokens_per_month"


def _repeated_keys(config: Config) -> Iterator[str]:
    """Keys that stand in two places, named by these places: nobody could say whose calls they are."""
    places = [(f"server.api_keys[{place}]", key) for place, key in enumerate(config.server.api_keys)]
    for number, tenant in enumerate(config.tenants):
        places += [(f"tenants[{number}].api_keys[{place}]", key) for place, key in enumerate(tenant.api_keys)]
    if config.server.admin_key is not None:
        places.append(("server.admin_key", config.server.admin_key))
    first: dict[str, str] = {}
    for where, key in places:
        if first.setdefault(key, where) != where:
            yield f"{where} = (hidden): {first[key]} has the same key"


def _names_in_use(config: Config) -> Iterator[str]:
    """Aliases that name something else too, and models that are to answer for themselves."""
    first = {model.name: f"models[{number}].name" for number, model in enumerate(config.models)}
    for number, model in enumerate(config.models):
        for place, alias in enumerate(model.aliases):
            where = f"models[{number}].aliases[{place}]"
            if first.setdefault(alias, where) != where:
                yield f"{where} = {shown(alias)}: {first[alias]} is the same name"
        if model.name in model.fallbacks:
            yield f"models[{number}].fallbacks has {shown(model.name)}: expected other models"


def _repeated(section: str, key: str, values: Sequence[str]) -> Iterator[str]:
    first: dict[str, int] = {}
    for index, value in enumerate(values):
        if first.setdefault(value, index) != index:
            yield f"{section}[{index}].{key} = {shown(value)}: {section}[{first[value]}] has the same {key}"


def _with_whole_paths(model: ModelConfig, folder: Path) -> ModelConfig:
    tokenizer, template, profile = model.tokenizer, model.chat_template, model.profile
    is_name = tokenizer in NAMED or tokenizer.startswith("tiktoken:")
    if not is_name and ((folder / tokenizer).exists() or not is_hub_name(tokenizer)):
        tokenizer = str(folder / tokenizer)
    if template is not None:
        template = str(folder / template)
    if profile.endswith(".toml"):
        profile = str(folder / profile)
    return msgspec.structs.replace(model, tokenizer=tokenizer, chat_template=template, profile=profile)


def _dotted(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _unknown_key(name: str, key: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f'did you mean "{_dotted(key, nearest[0])}"?' if nearest else f"known here: {', '.join(known)}"
    return f'unknown key "{_dotted(key, name)}"; {hint}'


def _expected(kind: Any) -> str:
    """The values that a field's type accepts, in words."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(kind))
    if kind is bool:
        return "true or false"
    if hasattr(kind, "__metadata__"):
        return str(kind.__metadata__[0].description)
    return _expected(get_args(kind)[0])  # X | None: TOML has no way to write None
