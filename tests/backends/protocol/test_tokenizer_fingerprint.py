"""Fingerprints are equal where tokenizers are, whatever library they are loaded by."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import msgspec
import pytest

from plait.backends.protocol.tokenizer_fingerprint import TEXTS, TokenizerFingerprint, fingerprint
from plait.backends.tokenization.loading import load_tokenizer
from tests.backends.tokenization.tokenizer_folders import DATED, TEMPLATE, folder_of, tokenizer_folders, with_bos
from tests.backends.tokenization.trained import VARIANTS, byte_level, files_of, rank_file, raw

PARTS = ("vocabulary", "ids", "prompt_ids", "chats")
TEXTS_A_PAIR = 300
REPORT_BYTES = 600
"""A few hundred bytes: it is in each report."""


def of(folder: Path | str, chat_template: Path | None = None) -> TokenizerFingerprint:
    return fingerprint(load_tokenizer(str(folder), chat_template=None if chat_template is None else str(chat_template)))


def differing(one: TokenizerFingerprint, other: TokenizerFingerprint) -> list[str]:
    return [part for part in PARTS if getattr(one, part) != getattr(other, part)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenizerFingerprint]:
    """The fingerprints of the repository's tokenizers."""
    return {name: of(folder) for name, folder in tokenizer_folders(tmp_path_factory.mktemp("tokenizers")).items()}


def test_each_part_differs_where_it_has_to(found: dict[str, TokenizerFingerprint]) -> None:
    plain = found["gpt-2"]
    assert differing(plain, found["with a BOS"]) == ["prompt_ids"]
    assert differing(plain, found["with another template"]) == ["chats"]
    assert differing(plain, found["without a template"]) == ["chats"]
    assert differing(plain, found["with a token more"]) == ["vocabulary", "ids"]
    assert differing(found["with a token more"], found["with a token that strips"]) == ["ids"]
    assert differing(plain, found["llama 2"]) == ["vocabulary", "ids", "prompt_ids"]


def test_tokenizers_with_one_fingerprint_give_all_texts_the_same_ids(found: dict[str, TokenizerFingerprint]) -> None:
    """Texts of the vocabulary's tokens, of any characters, and of the smallest changes between patterns."""
    rng = random.Random(1)
    alphabet = list("".join(TEXTS) + "\u0300\u093f  \n\n\t''")
    pairs = [(a, b) for a, b in combinations(VARIANTS, 2) if not differing(found[a], found[b])]
    assert ("llama 3", "removed, inverted") in pairs, "they only write the same pattern in two ways"
    for names in pairs:
        one, other = (raw(files_of(name)) for name in names)
        words = [token.replace("\u0120", " ").replace("\u2581", " ") for token in one.get_vocab()]
        for _ in range(TEXTS_A_PAIR):
            parts = [*rng.choices(words, k=6), *rng.choices(alphabet, k=12)]
            text = "".join(rng.sample(parts, len(parts)))
            assert one.encode(text).ids == other.encode(text).ids, (names, text)


def test_most_variants_are_told_apart(found: dict[str, TokenizerFingerprint]) -> None:
    """All but those that write the same in two ways."""
    assert len({found[name].ids for name in VARIANTS}) == len(VARIANTS) - 2


def test_the_embedded_tokenizer_is_the_same_through_transformers(found: dict[str, TokenizerFingerprint]) -> None:
    assert not differing(of("embedded"), found["embedded"])


def test_a_template_with_the_date_is_the_same_at_any_time(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "dated", files_of("gpt-2"), DATED)
    template = tmp_path / "dated.jinja"
    template.write_text(DATED)
    assert of(folder) == of(folder)
    assert not differing(of(folder_of(tmp_path, "plain", files_of("gpt-2")), template), of(folder))


def test_a_template_may_refuse_chats(tmp_path: Path) -> None:
    """One that takes no system prompt still differs from one that takes none but that."""
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    failing = "{{ messages[0].nothing.at_all }}"
    folders = [
        folder_of(tmp_path, str(number), files_of("gpt-2"), template)
        for number, template in enumerate((TEMPLATE, refusing, failing))
    ]
    assert len({of(folder).chats for folder in folders}) == 3


def test_other_kinds_of_tokenizers_have_one_too(tmp_path: Path) -> None:
    kinds = [of("embedded"), of("bytes"), *(of(f"tiktoken:{rank_file(tmp_path, name)}") for name in ("cl100k_base",))]
    assert len({kind.vocabulary for kind in kinds}) == len({kind.ids for kind in kinds}) == len(kinds)
    assert len({kind.chats for kind in kinds}) == 1, "all have ChatML"


def test_the_bos_counts_only_for_plain_prompts(tmp_path: Path) -> None:
    assert differing(
        of(folder_of(tmp_path, "a", files_of("nfc"))), of(folder_of(tmp_path, "b", with_bos(files_of("nfc"))))
    ) == ["prompt_ids"]


def test_it_is_small(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "long" * 50, byte_level())
    assert len(msgspec.msgpack.encode(of(folder))) < REPORT_BYTES
