"""The native encoder's ids are used while they are those of `tokenizers`, and never after a difference."""

from __future__ import annotations

import builtins
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tokenizers import AddedToken

from plait.backends.errors import CallerError
from plait.backends.tokenization.checked_encoder import (
    EACH,
    KEPT_EACH,
    PROVING_PROMPTS,
    CheckedEncoder,
    NativeEncode,
    native_encode,
)
from plait.backends.tokenization.file_tokenizer import EmbeddedTokenizer
from plait.backends.tokenization.kept_proof import KeptProof
from plait.backends.tokenization.prompt_encoder import PartCache, PromptEncoder
from tests.backends.tokenization.prompts import KINDS, prompts
from tests.backends.tokenization.trained import VARIANTS, Files, files_of, raw, with_added

NATIVE = sorted(VARIANTS.keys() - {"llama 2", "metaspace, split", "metaspace, never"})
PROMPTS = 4_000 // len(KINDS)


def right(texts: Sequence[str]) -> list[array[int]]:
    return [array("I", map(ord, text)) for text in texts]


def wrong(texts: Sequence[str]) -> list[array[int]]:
    return [array("I", [0, *map(ord, text)]) for text in texts]


class Ways:
    """Counts how often each way is used. The native one is right up to the text `wrong_at`, which it fails at."""

    def __init__(self, wrong_at: int | None = None, failure: Any = wrong) -> None:
        self.native, self.reference = count(), count()
        self._wrong_at, self._failure = wrong_at, failure

    def encoder(self) -> CheckedEncoder:
        return CheckedEncoder("t", self._by_reference, self._natively)

    def _by_reference(self, texts: Sequence[str]) -> list[array[int]]:
        next(self.reference)
        if any("\ud800" in text for text in texts):
            raise CallerError("not Unicode")
        return right(texts)

    def _natively(self, texts: Sequence[str]) -> list[array[int]] | None:
        if next(self.native) == self._wrong_at:
            failed: list[array[int]] | None = self._failure(texts)
            return failed
        return None if any("\ud800" in text for text in texts) else right(texts)


def test_the_first_prompts_have_the_ids_of_tokenizers() -> None:
    ways = Ways()
    encoder = ways.encoder()
    for _ in range(PROVING_PROMPTS):
        encoder.encode(["a", "b"])
    assert encoder.equal == next(ways.reference) == PROVING_PROMPTS


def test_then_one_in_a_thousand_is_compared() -> None:
    ways = Ways()
    encoder = ways.encoder()
    encoder.equal = PROVING_PROMPTS
    for _ in range(5 * EACH):
        assert encoder.encode(["a"]) == right(["a"])
    assert next(ways.reference) == 5
    assert (encoder.equal, encoder.is_native) == (PROVING_PROMPTS + 5, True)


@pytest.mark.parametrize("failure", [wrong, lambda _: None, lambda _: []], ids=["other ids", "an error", "too few"])
def test_the_first_difference_ends_it(failure: Any) -> None:
    encoder = Ways(wrong_at=2, failure=failure).encoder()
    with capture_logs() as lines:
        for text in ("one", "two", "secret", "four"):
            assert encoder.encode([text]) == right([text])
    assert (encoder.is_native, encoder.equal, encoder.differences) == (False, 2, 1)
    (line,) = lines
    assert line["text_sha256"] == sha256(b"secret").hexdigest()
    assert "secret" not in str(line)


def test_a_difference_in_a_probe_ends_it_before_any_prompt() -> None:
    encoder = Ways(wrong_at=1).encoder()
    encoder.probe(["the same text, which it has met"])
    assert (encoder.is_native, encoder.differences) == (False, 1)


def test_probes_prove_nothing() -> None:
    encoder = Ways().encoder()
    encoder.probe(["a"])
    assert (encoder.is_native, encoder.equal) == (True, 0)


@pytest.mark.parametrize("equal", [0, PROVING_PROMPTS])
def test_what_is_not_unicode_is_no_difference(equal: int) -> None:
    encoder = Ways().encoder()
    encoder.equal = equal
    with pytest.raises(CallerError):
        encoder.encode(["a", "\ud800"])
    assert encoder.is_native


def test_many_threads_find_one_difference() -> None:
    encoder = Ways(failure=None).encoder()
    encoder._native = wrong
    with capture_logs() as lines, ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: encoder.encode([str(number)]), range(100)))
    assert (encoder.differences, len(lines)) == (1, 1)


def test_parts_from_before_a_difference_are_not_used() -> None:
    tokenizer = EmbeddedTokenizer()
    encoder = PromptEncoder(tokenizer, 4, PartCache(2**20), part_characters=16)
    text = "a b c d e f g h " * 8

    def turns() -> int:
        return sum(1 for _ in encoder.steps(text, "m", 0, add_special_tokens=False))

    for _ in range(3):
        turns()
    known = encoder.cache.held_bytes
    turns()
    assert encoder.cache.held_bytes == known, "all of it is known"
    tokenizer.encoder.differences += 1
    turns()
    assert encoder.cache.held_bytes > known


def test_another_process_goes_on_with_what_is_proved(tmp_path: Path) -> None:
    proof = KeptProof(tmp_path / "proved" / "t")
    for _ in range(2):
        ways = Ways()
        ways_encoder = ways.encoder()
        ways_encoder.go_on(proof)
        for _ in range(PROVING_PROMPTS // 2 + KEPT_EACH - 1):
            ways_encoder.encode(["a"])
    assert next(ways.reference) == PROVING_PROMPTS // 2, "the second process proves the other half"
    assert (proof.prompts(), ways_encoder.has_proved_itself) == (PROVING_PROMPTS, True)


def test_workers_prove_together(tmp_path: Path) -> None:
    workers = [(ways, ways.encoder()) for ways in (Ways(), Ways())]
    for _, encoder in workers:
        encoder.go_on(KeptProof(tmp_path / "t"))
    for _ in range(PROVING_PROMPTS):
        for _, encoder in workers:
            encoder.encode(["a"])
    for ways, encoder in workers:
        assert encoder.has_proved_itself
        assert next(ways.reference) <= PROVING_PROMPTS // 2 + KEPT_EACH + PROVING_PROMPTS // EACH


def test_a_difference_ends_what_is_kept(tmp_path: Path) -> None:
    proof, encoder = KeptProof(tmp_path / "t"), Ways(wrong_at=EACH - 1).encoder()
    proof.add(PROVING_PROMPTS)
    encoder.go_on(proof)
    for _ in range(EACH - 1):
        encoder.encode(["a"])
    assert (encoder.is_native, proof.prompts()) == (True, PROVING_PROMPTS)
    encoder.encode(["a"])
    assert (encoder.is_native, proof.prompts()) == (False, 0)


@pytest.mark.parametrize("written", ["", "many", "-5"])
def test_a_file_that_has_no_count_proves_nothing(tmp_path: Path, written: str) -> None:
    (tmp_path / "t").write_text(written)
    assert KeptProof(tmp_path / "t").prompts() == 0


def test_a_folder_that_cannot_be_written_is_no_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    proof, encoder = KeptProof(tmp_path / "file" / "t"), Ways().encoder()
    encoder.go_on(proof)
    for _ in range(PROVING_PROMPTS):
        encoder.encode(["a"])
    assert (encoder.has_proved_itself, proof.prompts()) == (True, 0)


def of(variant: str, **changes: Any) -> Files:
    return Files(variant, raw(files_of(variant) | changes), frozenset())


@pytest.mark.parametrize("variant", VARIANTS)
def test_which_kinds_are_encoded_natively(variant: str) -> None:
    encoder = of(variant).encoder
    assert (encoder.is_native, encoder.differences) == (variant in NATIVE, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_have_the_same_ids_in_both_ways(kind: str) -> None:
    """`python -m benchmarks exact_tokens` tries as many as it is told to."""
    tokenizer = of(kind)
    tokenizer.encoder.equal = PROVING_PROMPTS
    for prompt in islice(prompts(f"native {kind}"), PROMPTS):
        assert tokenizer.encode_array(prompt).tolist() == tokenizer.encode(prompt), prompt


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<x>", lstrip=True),
        AddedToken("<x>", rstrip=True),
        AddedToken("mask", single_word=True),
        AddedToken("é", normalized=True),
        AddedToken("<|x|>", special=True),
    ],
    ids=str,
)
def test_added_tokens_have_the_same_ids_or_end_it(token: AddedToken) -> None:
    content = token.content
    tokenizer = Files("t", raw(with_added(files_of("qwen 2"), token)), frozenset())
    tokenizer.encoder.equal = PROVING_PROMPTS
    for text in (
        f"a {content} b",
        f"a{content}b",
        f" {content}{content} ",
        f"un{content}ed {content}\n{content.upper()}",
    ):
        assert tokenizer.encode_array(text).tolist() == tokenizer.encode(text), text


@pytest.mark.parametrize("split", [False, True])
def test_special_tokens_may_be_text(split: bool) -> None:
    backend = raw(files_of("llama 3"))
    backend.encode_special_tokens = split
    tokenizer = Files("t", backend, frozenset())
    assert tokenizer.encoder.is_native
    tokenizer.encoder.equal = PROVING_PROMPTS
    assert tokenizer.encode_array("<s>a</s>").tolist() == tokenizer.encode("<s>a</s>")


def test_half_a_surrogate_pair_is_refused_once_it_is_trusted() -> None:
    tokenizer = EmbeddedTokenizer()
    tokenizer.encoder.equal = PROVING_PROMPTS
    with pytest.raises(CallerError, match="surrogate"):
        tokenizer.encode_array("a \ud800")
    assert tokenizer.encoder.is_native


def test_a_machine_without_it_does_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "fastokens":
            raise ImportError(name)
        return importing(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    tokenizer = of("llama 3")
    assert not tokenizer.encoder.is_native
    assert tokenizer.encode_array("A text.").tolist() == tokenizer.encode("A text.")


@pytest.mark.parametrize("failure", [ValueError(), BaseException("a panic")])
def test_any_failure_of_it_is_none(failure: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        @staticmethod
        def from_json_str(_json: str) -> Any:
            return Failing()

        def encode_batch_flat(self, _texts: Sequence[str], **_options: bool) -> Any:
            raise failure

    monkeypatch.setattr("fastokens.Tokenizer", Failing)
    encode: NativeEncode | None = native_encode({}, splits_special_tokens=False)
    assert encode is not None
    assert encode(["a"]) is None
    monkeypatch.setattr(Failing, "from_json_str", lambda _json: Failing().encode_batch_flat([]))
    assert native_encode({}, splits_special_tokens=False) is None
