"""Where a file with secrets may be."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from plait.gateway.guests.store.file_place import check_place, file_system, make_file, make_folder


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "9p", "virtiofs"])
def test_a_network_file_system_is_refused(tmp_path: Path, kind: str) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n")
    with pytest.raises(ValueError, match=rf"network file system \({kind}\): put it on a disk of this machine"):
        check_place(tmp_path / "deep" / "er" / "plait.db", mounts)


def test_the_nearest_mount_counts(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    spaced = str(tmp_path / "a b").replace(" ", r"\040")
    mounts.write_text(f"server:/x / nfs rw 0 0\n/dev/vda {tmp_path} ext4 rw 0 0\ntmpfs {spaced} tmpfs rw 0 0\n")
    assert file_system(tmp_path, mounts) == "ext4"
    assert file_system(tmp_path / "a b" / "c", mounts) == "tmpfs"
    assert file_system(Path("/"), mounts) == "nfs"


def test_without_a_list_of_mounts_nothing_can_be_said(tmp_path: Path) -> None:
    assert file_system(tmp_path, tmp_path / "missing") is None


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o755, 0o600), (0o700, 0o640)])
def test_what_is_open_to_others_is_refused(tmp_path: Path, folder_mode: int, file_mode: int) -> None:
    file = tmp_path / "store" / "plait.db"
    make_folder(file)
    make_file(file)
    check_place(file)
    file.parent.chmod(folder_mode)
    file.chmod(file_mode)
    with pytest.raises(ValueError, match=r"open to other users, and values may be secrets: chmod 0[67]00"):
        check_place(file)


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    with pytest.raises(ValueError, match="is no folder"):
        check_place(tmp_path / "store" / "plait.db")


def test_a_place_is_made_with_the_modes_of_secrets(tmp_path: Path) -> None:
    file = tmp_path / "store" / "plait.db"
    make_folder(file)
    make_file(file)
    make_folder(file)
    make_file(file)
    assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize("why", ["sticky", "with other files", "of somebody else"])
def test_a_shared_folder_stays_as_it_is(tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o1755 if why == "sticky" else 0o755)
    if why == "with other files":
        (tmp_path / "another").touch()
    if why == "of somebody else":
        monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    own = tmp_path / "plait"
    advice = f"put it into a folder of its own: mkdir -m 700 {own}, and name {own / 's.db'}"
    with pytest.raises(ValueError, match=f"{re.escape(advice)}$"):
        check_place(tmp_path / "s.db")


def test_what_can_be_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is no folder"):
        check_place(tmp_path / "file" / "deeper" / "s.db")
    (tmp_path / "folder").mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    with pytest.raises(ValueError, match="is a folder: name a file in it"):
        check_place(tmp_path / "folder")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda place, _mode: place != tmp_path)
    with pytest.raises(ValueError, match="cannot be written by this user"):
        check_place(tmp_path / "new" / "s.db")
