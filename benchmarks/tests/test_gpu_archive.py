from __future__ import annotations

import struct
from pathlib import Path

import pytest

from benchmarks.gpu import archive
from benchmarks.gpu.archive import ArchiveError, compress
from benchmarks.gpu.fat_binaries import MAGIC, PTX, pruned
from benchmarks.gpu.model import LLAMA_8B, VOCABULARY, write_model
from plait.backends.tokenization.loading import load_tokenizer

ELF = 2
HOPPER = 90
HEAD_BYTES = 64


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    head = bytearray(HEAD_BYTES)
    struct.pack_into("<HHIQ", head, 0, kind, 0x101, HEAD_BYTES, len(payload))
    struct.pack_into("<I", head, 28, architecture)
    return bytes(head) + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<4sHHQ", MAGIC, 1, 16, len(body)) + body


def kept(library: bytes, at: int) -> bytes:
    [size] = struct.unpack_from("<Q", library, at + 8)
    return library[at + 16 : at + 16 + size]


def test_the_architecture_s_code_moves_to_the_front_and_the_rest_is_zeros() -> None:
    hopper = entry(ELF, HOPPER, b"hopper" * 9)
    library = b"before" + container(entry(ELF, 80, b"ampere"), hopper, entry(PTX, 100, b"later")) + b"after"
    found = pruned(library, HOPPER)
    assert len(found) == len(library)
    assert kept(found, 6) == hopper
    assert found.startswith(b"before")
    assert found.endswith(b"after")
    assert not any(found[6 + 16 + len(hopper) : -5])


def test_all_code_of_the_architecture_is_kept() -> None:
    first, second = entry(ELF, HOPPER, b"one"), entry(ELF, HOPPER, b"two")
    assert kept(pruned(container(first, entry(PTX, 80, b"x"), second), HOPPER), 0) == first + second


def test_without_machine_code_the_newest_ptx_that_it_compiles_is_kept() -> None:
    newest = entry(PTX, 89, b"ada")
    found = pruned(container(entry(PTX, 80, b"ampere"), newest, entry(PTX, 100, b"later")), HOPPER)
    assert kept(found, 0) == newest


def test_without_anything_to_load_the_smallest_entry_is_kept() -> None:
    small = entry(ELF, 100, b"s")
    assert kept(pruned(container(entry(ELF, 120, b"large" * 5), small), HOPPER), 0) == small


def test_each_container_is_pruned_by_itself() -> None:
    first, second = entry(ELF, HOPPER, b"first"), entry(PTX, 75, b"second")
    library = container(first, entry(ELF, 80, b"x" * 30)) + b"gap" + container(entry(ELF, 80, b"y"), second)
    found = pruned(library, HOPPER)
    assert kept(found, 0) == first
    assert kept(found, library.index(b"gap") + 3) == second


@pytest.mark.parametrize(
    "library", [b"", b"no container", MAGIC, MAGIC + b"\x02" + bytes(40), MAGIC + struct.pack("<HHQ", 1, 16, 10**9)]
)
def test_what_only_looks_like_a_container_stays(library: bytes) -> None:
    assert pruned(library, HOPPER) == library


def test_an_archive_over_the_limit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "module.py").write_text("x = 1\n")
    assert compress(site, tmp_path / "site.tar.xz") > 0
    monkeypatch.setattr(archive, "LIMIT_BYTES", 10)
    with pytest.raises(ArchiveError, match="the limit is"):
        compress(site, tmp_path / "site.tar.xz")


def test_carried_packages_are_not_in_the_image_unless_pinned_on_purpose() -> None:
    carried = {line.partition("==")[0] for line in archive.CARRIED.read_text().split()}
    image = set(archive.IMAGE_PACKAGES.read_text().split())
    assert carried & image == {"anyio", "attrs", "click", "httpx", "typing-extensions"}


def test_the_padded_tokenizer_encodes_as_before(tmp_path: Path) -> None:
    write_model(tmp_path / "model", LLAMA_8B)
    padded, plain = load_tokenizer(str(tmp_path / "model")), load_tokenizer("embedded")
    for text in ("def f(x):\n    return x", "<|pad_9000|>"):
        message = [{"role": "user", "content": text}]
        assert list(padded.encode_chat(message)) == list(plain.encode_chat(message))
        assert max(padded.encode_chat(message)) < VOCABULARY
