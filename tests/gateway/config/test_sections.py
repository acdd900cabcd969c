import re
import tomllib
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from structlog.testing import capture_logs

from plait.gateway.config.file import ConfigError, load_config, parse_config
from plait.gateway.config.section import Section
from plait.gateway.config.sections import AdmissionConfig, Config, EngineConfig, ModelConfig
from tests.example_config import EXAMPLE, text

ENGINES = [{"url": "http://127.0.0.1:8101"}]


def parse(**sections: object) -> Config:
    return parse_config({"engines": ENGINES, **sections}, "/etc/plait/config.toml")


def problems(**sections: object) -> list[str]:
    """What parsing complains about, without the file's name in front."""
    with pytest.raises(ConfigError) as caught:
        parse(**sections)
    lines = str(caught.value).splitlines()
    assert all(line.startswith("/etc/plait/config.toml: ") for line in lines)
    return [line.removeprefix("/etc/plait/config.toml: ") for line in lines]


def url_problem(url: str) -> str:
    [problem] = problems(engines=[{"url": url}])
    return problem


def test_an_engine_is_all_a_file_needs() -> None:
    config = parse()
    assert config.engines == (EngineConfig(url="http://127.0.0.1:8101", name="127.0.0.1:8101"),)
    assert (config.server.host, config.server.port, config.server.max_body_bytes) == ("127.0.0.1", 8000, 33_554_432)
    assert (config.server.api_keys, config.server.shutdown_grace_s) == ((), 30.0)
    assert (config.log.level, config.log.format) == ("info", "auto")
    assert (config.placement.policy, config.placement.window_s) == ("plait", 180.0)


def test_values_reach_their_sections() -> None:
    config = parse(
        server={"port": 0, "api_keys": ["a", "b"], "shutdown_grace_s": 0},
        placement={"policy": "round_robin", "window_s": 60},
        engines=[{"url": "https://engine", "name": "one", "models": ["m"], "api_key": "k", "kv_tokens": 198_516}],
    )
    assert (config.server.port, config.server.api_keys, config.server.shutdown_grace_s) == (0, ("a", "b"), 0.0)
    assert (config.placement.policy, config.placement.window_s) == ("round_robin", 60.0)
    expected = EngineConfig(url="https://engine", name="one", models=("m",), api_key="k", kv_tokens=198_516)
    assert config.engines == (expected,)


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"placement": {"polcy": "e2"}, "engines": ENGINES}, "config.toml")
    assert str(caught.value) == 'config.toml: unknown key "placement.polcy"; did you mean "placement.policy"?'


def test_every_problem_is_reported_at_once() -> None:
    assert problems(
        sever={},
        server={"prot": 1, "port": 70_000},
        log={"level": "INFO"},
        engines=[{"url": "http://a", "modls": []}, {"name": "b"}],
    ) == [
        'unknown key "sever"; did you mean "server"?',
        'unknown key "server.prot"; did you mean "server.port"?',
        "server.port = 70000: expected a port, 0 to 65535",
        'log.level = "INFO": expected one of "debug", "info", "warning", "error"',
        'unknown key "engines[0].modls"; did you mean "engines[0].models"?',
        "engines[1].url is missing",
    ]


def test_an_unknown_key_like_no_other_lists_the_known_ones() -> None:
    assert problems(log={"zzz": 1}) == ['unknown key "log.zzz"; known here: level, format']


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
        ("server", "port", "8000", '"8000": expected a port, 0 to 65535'),
        ("server", "port", -1, "-1: expected a port, 0 to 65535"),
        ("server", "port", True, "true: expected a port, 0 to 65535"),
        ("server", "max_body_bytes", 0, "0: expected an integer above 0"),
        ("server", "max_body_bytes", 1.5, "1.5: expected an integer above 0"),
        ("server", "host", "", '"": expected a string that is not empty'),
        ("server", "host", "0.0.0.0:80", '"0.0.0.0:80": expected a host name or an IP address, without a port'),
        ("server", "host", "http://a", '"http://a": expected a host name or an IP address, without a port'),
        ("server", "shutdown_grace_s", -0.5, "-0.5: expected a number of seconds, 0 or more"),
        ("log", "format", "xml", '"xml": expected one of "auto", "console", "json"'),
        ("placement", "policy", 3, "3: expected a string that is not empty"),
        ("placement", "window_s", 0, "0: expected a number of seconds above 0"),
        ("placement", "window_s", float("inf"), "Infinity: expected a number of seconds above 0"),
        ("placement", "window_s", float("nan"), "NaN: expected a number of seconds above 0"),
        ("placement", "window_s", 10**400, f"1{'0' * 79}...: expected a number of seconds above 0"),
        ("sessions", "ttl_s", 0, "0: expected a number of seconds above 0"),
        ("sessions", "max_sessions", 0, "0: expected an integer above 0"),
        ("admission", "chat_tokens", -1, "-1: expected an integer, 0 or more"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(section: str, key: str, value: object, expected: str) -> None:
    assert problems(**{section: {key: value}}) == [f"{section}.{key} = {expected}"]


@pytest.mark.parametrize(
    ("direction", "name", "expected"),
    [
        ("request", "Authorization", "secrets of clients stay here; an engine's own key is its api_key"),
        ("request", "x-api-key", "secrets of clients stay here; an engine's own key is its api_key"),
        ("request", "accept-encoding", "the gateway has to read the answer"),
        ("request", "transfer-encoding", "it belongs to one connection"),
        ("request", "x-request-id", "the gateway sets it itself"),
        ("request", "plait-priority", "only Plait sets headers that begin with plait-"),
        ("response", "Plait-Engine", "only Plait sets headers that begin with plait-"),
        ("response", "set-cookie", "an engine's secrets are between it and the gateway"),
        ("response", "location", "it is about the engine's address"),
        ("response", "retry-after", "the gateway sets it itself"),
        ("response", "access-control-allow-origin", "cors_origins of [server] says which pages may read answers"),
    ],
)
def test_some_headers_never_pass(direction: str, name: str, expected: str) -> None:
    (problem,) = problems(upstream={f"pass_{direction}_headers": ["x-vendor", name]})
    place = f'upstream.pass_{direction}_headers[1] = "{name.lower()}"'
    assert problem == f"{place}: expected a header that may pass; {expected}"


@pytest.mark.parametrize("name", ["*", "x-*", "x vendor", "x-vendor:", "", "x-\n"])
def test_a_header_that_passes_has_a_name(name: str) -> None:
    (problem,) = problems(upstream={"pass_request_headers": [name]})
    assert problem.endswith(": expected the name of one header, such as x-vendor-id")


def test_names_of_headers_are_kept_in_lower_case() -> None:
    upstream = parse_config({"engines": ENGINES, "upstream": {"pass_request_headers": ["X-Vendor"]}}, "test").upstream
    assert upstream.pass_request_headers == ("x-vendor",)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1", "localhost", "gateway-1.example.org"])
def test_hosts_that_are_understood(host: str) -> None:
    assert parse(server={"host": host}).server.host == host


def test_tables_and_arrays_are_told_apart() -> None:
    assert problems(server=[], models={"name": "m"}, engines=[3]) == [
        "server = (an array): expected a table",
        "models = (a table): expected an array of tables, [[models]]",
        "engines[0] = 3: expected a table",
    ]
    assert problems(server={"api_keys": 3}) == ["server.api_keys = (hidden): expected an array"]


def test_a_fleet_without_engines_is_refused() -> None:
    message = "config.toml: engines: none is configured; add [[engines]] with a url, or [[services]]"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        parse_config({}, "config.toml")


def test_names_and_urls_are_unique() -> None:
    engines = [
        {"url": "http://a:80/", "name": "one"},
        {"url": "http://A"},
        {"url": "http://b", "name": "one"},
    ]
    assert problems(engines=engines, models=[{"name": "m"}, {"name": "m"}]) == [
        'models[1].name = "m": models[0] has the same name',
        'engines[1].url = "http://a": engines[0] has the same url',
        'engines[2].name = "one": engines[0] has the same name',
    ]


@pytest.mark.parametrize(
    ("url", "kept", "name"),
    [
        ("http://127.0.0.1:8101/", "http://127.0.0.1:8101", "127.0.0.1:8101"),
        ("https://engine.example", "https://engine.example", "engine.example:443"),
        ("http://engine:80/pool/a/", "http://engine/pool/a", "engine:80"),
        ("http://[::1]:8000", "http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_an_engine_is_named_after_its_url(url: str, kept: str, name: str) -> None:
    assert (EngineConfig(url=url).url, EngineConfig(url=url).name) == (kept, name)


@pytest.mark.parametrize(
    "url", ["engine:8000", "ftp://engine", "http://", "http://a?b=c", "http://a:x", "http://a#b", "http://a b"]
)
def test_an_engine_url_that_is_none(url: str) -> None:
    assert url_problem(url) == f'engines[0].url = "{url}": expected http://HOST:PORT or https://HOST:PORT'


def test_an_engine_url_that_would_not_work() -> None:
    assert url_problem("http://a:0") == 'engines[0].url = "http://a:0": expected a port from 1 to 65535'
    assert url_problem("http://a:99999") == 'engines[0].url = "http://a:99999": expected a port from 1 to 65535'
    assert url_problem("http://a/v1/chat/completions")
    assert parse(engines=[{"url": "http://a/api/v1/namespaces/n/services/s/proxy"}]).engines
    assert url_problem("http://a/v1/") == 'engines[0].url = "http://a/v1/": expected the engine\'s root, without /v1'
    assert "hunter2" not in url_problem("http://me:hunter2@a")
    assert "hunter2" not in url_problem("http://me: hunter2@a")


def test_strings_refer_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_TEST_KEY", "secret")
    monkeypatch.setenv("PLAIT_TEST_HOST", "engine")
    config = parse(
        server={"api_keys": ["${PLAIT_TEST_KEY}"]}, engines=[{"url": "http://${PLAIT_TEST_HOST}:1", "name": "$x"}]
    )
    assert config.server.api_keys == ("secret",)
    assert (config.engines[0].url, config.engines[0].name) == ("http://engine:1", "$x")


@pytest.mark.parametrize("value", ["", "secret\n", " secret"])
def test_a_variable_that_no_key_can_be_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PLAIT_TEST_KEY", value)
    said = "server.admin_key refers to ${PLAIT_TEST_KEY}, which is empty or has white space at an end"
    assert problems(server={"admin_key": "${PLAIT_TEST_KEY}"}) == [said]


def test_a_variable_without_braces_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_TEST_KEY", "secret")
    said = 'server.admin_key = "$PLAIT_TEST_KEY": expected ${PLAIT_TEST_KEY}, with braces'
    assert problems(server={"admin_key": "$PLAIT_TEST_KEY"}) == [said]


def test_a_missing_variable_is_named_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAIT_TEST_KEY", raising=False)
    assert problems(server={"api_keys": ["ok", "${PLAIT_TEST_KEY}"]}) == [
        "server.api_keys[1] refers to ${PLAIT_TEST_KEY}, which is not set in the environment"
    ]


def test_keys_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_TEST_KEY", "two words")
    assert problems(
        server={"api_keys": ["${PLAIT_TEST_KEY}"]}, engines=[{"url": "http://a", "api_key": "trailing\n"}]
    ) == [
        "server.api_keys[0] = (hidden): expected printable ASCII without spaces",
        "engines[0].api_key = (hidden): expected printable ASCII without spaces",
    ]
    shown = repr(parse(server={"api_keys": ["hunter2"]}, engines=[{"url": "http://a", "api_key": "hunter2"}]))
    assert "hunter2" not in shown
    assert "api_keys=(hidden)" in shown
    assert "name='a:80'" in shown


def test_a_key_stands_in_one_place() -> None:
    tenants = [{"name": "blue", "api_keys": ["two", "one"]}, {"name": "green", "api_keys": ["three", "two"]}]
    assert problems(server={"api_keys": ["one"], "admin_key": "three"}, tenants=tenants) == [
        "tenants[0].api_keys[1] = (hidden): server.api_keys[0] has the same key",
        "tenants[1].api_keys[1] = (hidden): tenants[0].api_keys[0] has the same key",
        "server.admin_key = (hidden): tenants[1].api_keys[0] has the same key",
    ]


def test_a_tenant_has_a_name_of_its_own_and_a_key() -> None:
    assert problems(tenants=[{"name": "blue", "api_keys": []}]) == [
        "tenants[0].api_keys = []: expected a key, or a [store] for keys that are made later"
    ]
    assert parse(tenants=[{"name": "blue"}], store={"path": "sessions.db"}).tenants[0].api_keys == ()
    assert problems(tenants=[{"name": "blue", "api_keys": ["one"]}, {"name": "blue", "api_keys": ["two"]}]) == [
        'tenants[1].name = "blue": tenants[0] has the same name'
    ]
    assert problems(tenants=[{"name": "a b", "api_keys": ["one"], "weight": 0}]) == [
        'tenants[0].name = "a b": expected printable ASCII without spaces',
        "tenants[0].weight = 0: expected a number from 0.001 to 1000000",
    ]


def test_a_secret_is_long_and_not_shown() -> None:
    assert problems(server={"secret": "s" * 31}) == [
        "server.secret = (hidden): expected 32 or more characters of printable ASCII without spaces"
    ]


def test_tenants_are_kept_apart_only_if_there_are_keys() -> None:
    assert problems(server={"isolate_tenants": True}) == [
        "server.isolate_tenants = true: expected server.api_keys or [[tenants]], which tell tenants apart"
    ]
    for keys in ({"server": {"api_keys": ["one"]}}, {"tenants": [{"name": "blue", "api_keys": ["one"]}]}):
        assert not parse(**keys).is_open
    assert parse().is_open


def test_relative_paths_start_at_the_files_folder() -> None:
    def paths(**values: str) -> tuple[str, str | None, str]:
        [model] = parse(models=[{"name": "m", **values}]).models
        return model.tokenizer, model.chat_template, model.profile

    assert paths() == ("auto", None, "a6000-mistral-7b")
    assert paths(tokenizer="Qwen/Qwen3-0.6B@main")[0] == "Qwen/Qwen3-0.6B@main", "a name on the hub"
    assert paths(tokenizer="mistral", chat_template="t/chat.jinja", profile="mine.toml") == (
        "/etc/plait/mistral",
        "/etc/plait/t/chat.jinja",
        "/etc/plait/mine.toml",
    )
    assert paths(tokenizer="./bytes", chat_template="/t.jinja", profile="/p.toml") == (
        "/etc/plait/bytes",
        "/t.jinja",
        "/p.toml",
    )
    assert paths(tokenizer="embedded")[0] == "embedded"
    assert paths(tokenizer="tiktoken:o200k_base", profile="h100-llama-70b") == (
        "tiktoken:o200k_base",
        None,
        "h100-llama-70b",
    )


def test_a_mark_of_byte_order_at_the_beginning_is_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[[engines]]\nurl = "http://a"\n', encoding="utf-8-sig")
    assert load_config(path).engines[0].url == "http://a"


def test_a_model_that_is_not_configured_has_the_defaults() -> None:
    config = parse(models=[{"name": "m", "tokenizer": "embedded"}])
    assert config.model("m").tokenizer == "embedded"
    assert config.model("other") == ModelConfig(name="other")


def test_files_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    with pytest.raises(ConfigError, match=r"config\.toml: cannot be read: No such file"):
        load_config(path)
    path.write_text("port = = 1")
    with pytest.raises(ConfigError, match=r"config\.toml: not a TOML file: .*line 1"):
        load_config(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"config\.toml: not a TOML file"):
        load_config(path)


def test_a_file_is_read_beside_itself(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[[engines]]\nurl = "http://a"\n[[models]]\nname = "m"\ntokenizer = "tok"\n')
    assert load_config(path).model("m").tokenizer == str(tmp_path / "tok")


@pytest.mark.parametrize("version", ["0.2.0"])
def test_the_keys_of_an_earlier_version_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Also those that its example has behind a `#`, but for a database beside the file."""
    written = (Path(__file__).parent / f"example_of_{version}.toml").read_text()
    whole = re.sub(r"^# (\[\[?\w+\]?\]|\w+ = .*)$", r"\1", written, flags=re.MULTILINE)
    for name in re.findall(r"\$\{(\w+)\}", whole):
        monkeypatch.setenv(name, name.ljust(32, "x"))
    parsed = tomllib.loads(whole)
    del parsed["store"]["url"]
    with capture_logs() as logs:
        config = parse_config(parsed, "/etc/plait/config.toml")
    assert (len(config.engines), len(config.services), config.store.path) == (4, 1, "/var/lib/plait/sessions.db")
    assert logs == []


def test_the_example_fits_the_demo() -> None:
    config = load_config(EXAMPLE)
    assert [engine.url for engine in config.engines] == [f"http://127.0.0.1:{port}" for port in range(8101, 8105)]
    assert config.model("demo").tokenizer == "embedded"


def test_the_example_states_the_defaults() -> None:
    config, defaults = load_config(EXAMPLE), Config()
    for name in ("server", "log", "placement", "upstream", "admission", "sessions"):
        assert getattr(config, name) == getattr(defaults, name)


def test_the_example_is_made_from_the_sections() -> None:
    assert EXAMPLE.read_text(encoding="utf-8") == text(), "python -m tests.example_config writes it"


def test_there_are_few_settings() -> None:
    kinds = [(get_args(section.type) or [section.type])[0] for section in msgspec.structs.fields(Config)]
    assert sum(len(kind.__struct_fields__) for kind in kinds) <= 105


def test_the_example_has_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_API_KEY", "k")
    monkeypatch.setenv("PLAIT_ADMIN_KEY", "admin")
    monkeypatch.setenv("BLUE_API_KEY", "blue")
    monkeypatch.setenv("METRICS_KEY", "metrics")
    monkeypatch.setenv("PLAIT_SECRET", "s" * 32)
    monkeypatch.setenv("PLAIT_PEER_KEY", "p" * 32)
    # The keys that stand commented out are switched on: they have to be right too.
    text = re.sub(r"^# (?=[a-z_]+ = |\[\[\w+\]\]$)", "", EXAMPLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    data = tomllib.loads(text)
    for other in ("path", "url"):  # one of both may be there
        store = {key: value for key, value in data["store"].items() if key != other}
        parse_config({**data, "store": store}, str(EXAMPLE))
    for section in msgspec.structs.fields(Config):
        table = data[section.name][0] if isinstance(data[section.name], list) else data[section.name]
        [kind, *_] = get_args(section.type) or [section.type]
        assert issubclass(kind, Section)
        assert set(table) == set(kind.__struct_fields__)


def test_an_alias_names_one_model_and_a_fallback_another() -> None:
    models = [{"name": "m", "aliases": ["a", "n"], "fallbacks": ["m"]}, {"name": "n", "aliases": ["a"]}]
    assert problems(models=models) == [
        'models[0].aliases[1] = "n": models[1].name is the same name',
        'models[0].fallbacks has "m": expected other models',
        'models[1].aliases[0] = "a": models[0].aliases[0] is the same name',
    ]


def test_a_key_of_an_earlier_version_is_warned_of_and_has_no_effect() -> None:
    data = {"admission": {"engine_backlog_s": 4.0}, "engines": [{"url": "http://a"}]}
    with capture_logs() as logs:
        config = parse_config(data, "c.toml")
    assert config.admission == AdmissionConfig()
    (warning,) = logs
    assert (warning["log_level"], warning["key"]) == ("warning", "admission.engine_backlog_s")
    assert "admission.ahead_s" in warning["why"]
