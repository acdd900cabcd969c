"""Checks and creates the place of a file that only this user may read."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISVTX
from typing import Final

FOR_OTHERS: Final = 0o077
"""The mode bits of group and others."""

NETWORK_FILE_SYSTEMS: Final = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "davfs", "fuse.ceph", "fuse.davfs2", "fuse.gcsfuse", "fuse.glusterfs",
    "fuse.goofys", "fuse.juicefs", "fuse.mountpoint-s3", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs",
    "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb2", "smb3", "smbfs", "virtiofs",
))  # fmt: skip
"""SQLite's WAL does not work on these: other machines see locks and shared memory late or not at all."""

MOUNTS: Final = Path("/proc/self/mounts")


def check_place(file: Path, mounts: Path = MOUNTS) -> None:
    """Raise ValueError, with what to do, if a file with secrets cannot be here. Changes nothing."""
    folder = file.parent
    kind = file_system(folder, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise ValueError(f"{file} is on a network file system ({kind}): put it on a disk of this machine")
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is no folder")
    if file.is_dir():
        raise ValueError(f"{file} is a folder: name a file in it")
    if folder.exists() and folder.stat().st_mode & FOR_OTHERS:
        raise ValueError(f"{folder} is open to other users, and values may be secrets: {_closed(folder, file)}")
    if file.exists() and file.stat().st_mode & FOR_OTHERS:
        raise ValueError(f"{file} is open to other users, and values may be secrets: chmod 0600 {file}")
    writable = file if file.exists() else there
    if not os.access(writable, os.W_OK):
        raise ValueError(f"{writable} cannot be written by this user")


def _closed(folder: Path, file: Path) -> str:
    """How to keep others out: a folder that anything else may use has to stay as it is."""
    seen = folder.stat()
    is_own = seen.st_uid == os.geteuid() and not seen.st_mode & S_ISVTX
    if is_own and all(one.name.startswith(file.name) for one in folder.iterdir()):
        return f"chmod 0700 {folder}"
    own = folder / "plait"
    return f"put it into a folder of its own: mkdir -m 700 {own}, and name {own / file.name}"


def make_folder(file: Path) -> None:
    """Create the file's folder (mode 0700) if it does not exist. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_file(file: Path) -> None:
    """Create an empty file (mode 0600) if it does not exist, and sync its folder's entry. Raises OSError."""
    if not file.exists():
        os.close(os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def file_system(folder: Path, mounts: Path = MOUNTS) -> str | None:
    """The type of the file system that a folder is or will be on; None if the system does not say."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    place, found, kind = folder.absolute().resolve(), -1, None
    for line in lines:
        _, point, mounted, *_ = line.split(" ")
        root = Path(point.replace(r"\040", " ").replace(r"\011", "\t"))
        if place.is_relative_to(root) and len(root.parts) >= found:
            found, kind = len(root.parts), mounted
    return kind
