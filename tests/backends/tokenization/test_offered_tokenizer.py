"""Tokenizers that engines offer: what is taken, what is refused, and where it is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plait.backends.errors import CallerError
from plait.backends.protocol.tokenizer_files import MAX_BYTES, MAX_TEMPLATE_BYTES, TokenizerFiles
from plait.backends.protocol.tokenizer_fingerprint import fingerprint
from plait.backends.tokenization.file_tokenizer import EmbeddedTokenizer, FileTokenizer, HuggingFaceTokenizer
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.offered_tokenizer import BoundedTemplates, load_offered
from tests.backends.tokenization.tokenizer_folders import DATED, TEMPLATE, folder_of
from tests.backends.tokenization.trained import files_of

CHAT = [{"role": "user", "content": "Is it raining in Ålesund? ☔"}]
ENDLESS = (
    "{% if messages|length > 5 %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}"
)
CHANGES = (
    "too large", "a long template", "without a vocabulary", "another template", "another vocabulary", "no JSON",
    "nothing",
)  # fmt: skip


def offer_of(folder: Path) -> TokenizerFiles:
    loaded = load_tokenizer(str(folder))
    return TokenizerFiles(fingerprint(loaded), loaded.files())


@pytest.fixture(scope="module")
def offer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    return offer_of(folder_of(tmp_path_factory.mktemp("engine"), "m", files_of("gpt-2")))


@pytest.fixture
def under(tmp_path: Path) -> Path:
    return tmp_path / "outer" / "kept"


def changed(offer: TokenizerFiles, **files: bytes | None) -> TokenizerFiles:
    named = {name.replace("_dot_", "."): content for name, content in files.items()}
    kept = {**offer.files, **named}
    return msgspec.structs.replace(
        offer, files={name: content for name, content in kept.items() if content is not None}
    )


def written(tmp_path: Path) -> list[str]:
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())


@pytest.fixture
def loaded() -> Iterator[list[FileTokenizer]]:
    """Those that a test loads. They are closed at its end."""
    tokenizers: list[FileTokenizer] = []
    yield tokenizers
    for tokenizer in tokenizers:
        if isinstance(tokenizer, HuggingFaceTokenizer):
            tokenizer.close()


@pytest.mark.parametrize("trusts", [True, False])
def test_it_gives_the_ids_and_chats_of_the_engines(
    offer: TokenizerFiles, under: Path, loaded: list[FileTokenizer], trusts: bool
) -> None:
    tokenizer, found = load_offered(offer, under, trusts_template=trusts)
    loaded.append(tokenizer)
    assert msgspec.structs.replace(found, name="") == msgspec.structs.replace(offer.fingerprint, name="")
    assert tokenizer.render_chat(CHAT) == f"<|im_start|>user\n{CHAT[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    again = load_tokenizer(tokenizer.name)
    assert again.encode_chat(CHAT) == tokenizer.encode_chat(CHAT)


def test_files_are_the_users_alone(offer: TokenizerFiles, under: Path, tmp_path: Path) -> None:
    tokenizer, _ = load_offered(offer, under, trusts_template=True)
    folder = Path(tokenizer.name)
    assert folder.parent == under
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert {place.stat().st_mode & 0o777 for place in (folder, under)} == {0o700}
    load_offered(offer, under, trusts_template=True)
    assert [path.name for path in under.iterdir()] == [folder.name], "kept once, by its fingerprint"
    assert all(name.startswith(f"outer/kept/{folder.name}/") for name in written(tmp_path))


def test_the_template_gets_what_the_engine_gives_it(tmp_path: Path, under: Path, loaded: list[FileTokenizer]) -> None:
    thinking = TEMPLATE + "{% if not thinks %}<think></think>{% endif %}"
    offer = offer_of(folder_of(tmp_path, "m", files_of("gpt-2"), thinking.replace("not thinks", "false")))
    offer = changed(offer, chat_template_dot_jinja=thinking.encode())
    with_default = msgspec.structs.replace(offer, template_kwargs={"thinks": True})
    tokenizer, _ = load_offered(with_default, under, trusts_template=False)
    loaded.append(tokenizer)
    assert not tokenizer.render_chat(CHAT).endswith("</think>")
    assert tokenizer.render_chat(CHAT, template_kwargs={"thinks": False}).endswith("</think>"), "a call may say other"
    with pytest.raises(ValueError, match="chats differ"):
        load_offered(offer, under, trusts_template=True)


def test_a_template_with_a_date_is_checked_all_the_same(
    tmp_path: Path, under: Path, loaded: list[FileTokenizer]
) -> None:
    tokenizer, _ = load_offered(
        offer_of(folder_of(tmp_path, "m", files_of("gpt-2"), DATED)), under, trusts_template=False
    )
    loaded.append(tokenizer)


def test_an_operators_template_stands_for_the_offered_one(
    offer: TokenizerFiles, under: Path, loaded: list[FileTokenizer]
) -> None:
    tokenizer, _ = load_offered(offer, under, trusts_template=False, chat_template="{{ messages[0].content }}!")
    loaded.append(tokenizer)
    assert tokenizer.render_chat(CHAT) == f"{CHAT[0]['content']}!"


def test_a_template_that_takes_too_much_is_ended(tmp_path: Path, under: Path, loaded: list[FileTokenizer]) -> None:
    """One that behaves for the probes, and not for a call."""
    offer = offer_of(folder_of(tmp_path, "m", files_of("gpt-2"), ENDLESS + TEMPLATE))
    tokenizer, _ = load_offered(offer, under, trusts_template=False)
    loaded.append(tokenizer)
    with pytest.raises(CallerError, match="trust_engine_templates") as caught:
        tokenizer.render_chat(CHAT * 6)
    assert caught.value.param == "messages"
    assert tokenizer.render_chat(CHAT).startswith("<|im_start|>"), "another process goes on"


def test_the_embedded_engines_is_known(under: Path) -> None:
    own = EmbeddedTokenizer()
    tokenizer, _ = load_offered(TokenizerFiles(fingerprint(own), own.files()), under, trusts_template=False)
    assert (tokenizer.name, under.exists()) == ("embedded", False)


@pytest.mark.parametrize(
    "name",
    [
        "../escaped.json", "/tmp/escaped.json", "a/tokenizer.json", "tokenizer.py", "", ".", "..", "Tokenizer.json",
        "tokenizer.json\x00", "config.json", "tokenization_custom.py",
    ],
)  # fmt: skip
def test_other_names_are_refused(offer: TokenizerFiles, under: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no tokenizer has"):
        load_offered(changed(offer, **{name: b"{}"}), under, trusts_template=True)
    assert written(tmp_path) == []


def changes(offer: TokenizerFiles) -> dict[str, TokenizerFiles]:
    whole = offer.files["tokenizer.json"]
    vocabulary = msgspec.json.decode(whole)
    tokens = vocabulary["model"]["vocab"]
    tokens["e"], tokens["t"] = tokens["t"], tokens["e"]
    return {
        "too large": changed(offer, added_tokens_dot_json=bytes(MAX_BYTES)),
        "a long template": changed(offer, chat_template_dot_jinja=b"a" * (MAX_TEMPLATE_BYTES + 1)),
        "without a vocabulary": changed(offer, tokenizer_dot_json=None),
        "another template": changed(offer, chat_template_dot_jinja=b"{{ messages[0].content }}"),
        "another vocabulary": changed(offer, tokenizer_dot_json=msgspec.json.encode(vocabulary)),
        "no JSON": changed(offer, tokenizer_dot_json=whole[:-1]),
        "nothing": changed(offer, tokenizer_dot_json=b""),
    }


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("trusts", [True, False])
def test_what_is_not_as_reported_is_refused_and_leaves_nothing(
    offer: TokenizerFiles, under: Path, tmp_path: Path, change: str, trusts: bool
) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each has its own message
        load_offered(changes(offer)[change], under, trusts_template=trusts)
    assert written(tmp_path) == []


def test_a_refused_offer_leaves_anothers_files(offer: TokenizerFiles, under: Path) -> None:
    """It may claim the fingerprint of another engine's tokenizer, which anybody can compute."""
    tokenizer, _ = load_offered(offer, under, trusts_template=True)
    with pytest.raises(ValueError, match="differ"):
        load_offered(changes(offer)["another template"], under, trusts_template=True)
    assert load_tokenizer(tokenizer.name).encode_chat(CHAT) == tokenizer.encode_chat(CHAT)


def test_a_long_chat_does_not_end_the_process_of_the_others(
    offer: TokenizerFiles, under: Path, loaded: list[FileTokenizer]
) -> None:
    tokenizer, _ = load_offered(offer, under, trusts_template=False)
    loaded.append(tokenizer)
    assert isinstance(tokenizer, BoundedTemplates)
    tokenizer.render_chat(CHAT)
    before = tokenizer._worker._process
    with pytest.raises(CallerError, match="takes more than its share"):
        tokenizer.render_chat([{"role": "user", "content": "x"}] * 500_000)
    tokenizer.render_chat(CHAT)
    assert tokenizer._worker._process is before


def test_code_of_an_engine_is_never_run(offer: TokenizerFiles, under: Path, tmp_path: Path) -> None:
    config = msgspec.json.decode(offer.files["tokenizer_config.json"])
    config["auto_map"] = {"AutoTokenizer": ["custom.Custom", "custom.Custom"]}
    (tmp_path / "custom.py").write_text("raise SystemExit('run')")
    tried = changed(offer, tokenizer_config_dot_json=msgspec.json.encode(config))
    outcome: Any = None
    try:
        outcome, _ = load_offered(tried, under, trusts_template=True)
    except ValueError:
        assert written(tmp_path) == ["custom.py"]
    assert outcome is None or type(outcome._tokenizer).__module__.startswith("transformers")


def test_a_link_is_not_followed(offer: TokenizerFiles, under: Path, tmp_path: Path) -> None:
    tokenizer, _ = load_offered(offer, under, trusts_template=True)
    folder, elsewhere = Path(tokenizer.name), tmp_path / "elsewhere"
    folder.rename(elsewhere)
    before = {file.name: file.read_bytes() for file in elsewhere.iterdir()}
    folder.symlink_to(elsewhere)
    with pytest.raises(ValueError, match="is a link"):
        load_offered(offer, under, trusts_template=True)
    assert {file.name: file.read_bytes() for file in elsewhere.iterdir()} == before
