"""A disk whose power fails: what a process writes is noted, and all that was not synced since may be lost.

A library that is loaded before the C library's (LD_PRELOAD) notes each write, truncation, sync and unlinking of files
in one folder. `Journal.after` makes the files as they are found when the power failed after so many of these.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

COMPILER = shutil.which("cc") or shutil.which("gcc")

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
static int journal = -1;

static void note_path(char op, const char *path, int64_t offset, const void *data, int64_t size) {
    const char *folder = getenv("POWER_LOSS_FOLDER");
    if (!folder) return;
    if (strncmp(path, folder, strlen(folder))) return;
    if (journal < 0) journal = open(getenv("POWER_LOSS_JOURNAL"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    char head[32];
    int32_t path_size = strlen(path);
    int64_t stored = data ? size : 0;
    memcpy(head, &op, 1);
    memcpy(head + 1, &path_size, 4);
    memcpy(head + 5, &offset, 8);
    memcpy(head + 13, &stored, 8);
    NEXT(write)(journal, head, 21);
    NEXT(write)(journal, path, path_size);
    if (stored) NEXT(write)(journal, data, stored);
}

static void note(char op, int fd, int64_t offset, const void *data, int64_t size) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    note_path(op, path, offset, data, size);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    ssize_t written = NEXT(pwrite64)(fd, data, size, at);
    if (written > 0) note('w', fd, at, data, written);
    return written;
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return pwrite64(fd, data, size, at); }
int ftruncate64(int fd, off64_t size) { note('t', fd, size, 0, 0); return NEXT(ftruncate64)(fd, size); }
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
int unlink(const char *path) { note_path('u', path, 0, 0, 0); return NEXT(unlink)(path); }
int fsync(int fd) { int done = NEXT(fsync)(fd); note('s', fd, 0, 0, 0); return done; }
int fdatasync(int fd) { int done = NEXT(fdatasync)(fd); note('s', fd, 0, 0, 0); return done; }
"""


@dataclass(frozen=True)
class Entry:
    """`w`rite, `t`runcate, `s`ync or `u`nlink of a file. A write has `data`, a truncation the size as its `offset`."""

    kind: str
    name: str
    offset: int
    data: bytes


class Journal:
    """All that a process has done to its files, in order."""

    def __init__(self, raw: bytes) -> None:
        self.entries: list[Entry] = []
        place = 0
        while place < len(raw):
            kind, path_size, offset, size = struct.unpack_from("<cIqq", raw, place)
            place += 21
            path = raw[place : place + path_size].decode()
            data = raw[place + path_size : place + path_size + size]
            place += path_size + size
            self.entries.append(Entry(kind.decode(), Path(path).name, offset, data))

    def after(self, count: int, folder: Path, chance: random.Random | None = None) -> None:
        """Put the files into `folder` as the power's failure after `count` entries leaves them.

        What was not synced is lost; with `chance`, any part of it may have come to the disk.
        """
        done = self.entries[:count]
        synced = {entry.name: place for place, entry in enumerate(done) if entry.kind == "s"}
        files: dict[str, bytearray] = {}
        for place, entry in enumerate(done):
            if entry.kind == "u":  # a file system keeps the order of names
                files.pop(entry.name, None)
                continue
            is_safe = place <= synced.get(entry.name, -1)
            if is_safe or (chance is not None and chance.random() < 0.5):
                _apply(files.setdefault(entry.name, bytearray()), entry)
        folder.mkdir(mode=0o700)
        for name, content in files.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o600)


def _apply(content: bytearray, entry: Entry) -> None:
    if entry.kind == "t":
        del content[entry.offset :]
    elif entry.kind == "w":
        content.extend(bytes(max(0, entry.offset - len(content))))
        content[entry.offset : entry.offset + len(entry.data)] = entry.data


def journal_of(script: str, folder: Path, work: Path) -> Journal:
    """Run Python code that writes into `folder`."""
    assert COMPILER is not None
    source, library = work / "power_loss.c", work / "power_loss.so"
    source.write_text(SOURCE)
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    noted = work / "journal"
    settings = {"LD_PRELOAD": str(library), "POWER_LOSS_FOLDER": str(folder), "POWER_LOSS_JOURNAL": str(noted)}
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, **settings})
    return Journal(noted.read_bytes())
