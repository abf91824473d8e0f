"""Recordings of architectures that are kept in the user's folder for caches.

An entry is a line of JSON, and behind it the packed document. Its name begins with a digest of the job and of what is
known to decide it (`surroundings.known_before`); entries of one job differ in what the package read. The folder may be
removed at any time.

What others could have written is not believed: the folder and its files are the user's own, and only the user's to
write. Elsewhere nothing is read or written, and the report says so.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from staticmem import child
from staticmem.errors import ModelFileError
from staticmem.files import not_own, read
from staticmem.frontends import recording_format as written
from staticmem.recording import surroundings

MOST_KEPT = 64  # recordings; one has a few KiB, and some 10 KiB of names of files
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LONGEST_HEADER = 4 << 20  # bytes: names of files of code have some 30, and there are thousands at most


def cache_folder() -> str:
    """The user's folder for caches, by the conventions of the platform."""
    home = os.path.expanduser("~")
    if sys.platform == "darwin":
        return os.path.join(home, "Library", "Caches", "staticmem")
    if sys.platform == "win32":
        return os.path.join(os.environ.get("LOCALAPPDATA") or home, "staticmem", "Cache")
    base = os.environ.get("XDG_CACHE_HOME", "")
    return os.path.join(base if os.path.isabs(base) else os.path.join(home, ".cache"), "staticmem")


class Kept:
    """What is kept of one job. `refusals` say what was found there and is not believed."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.environment = child.environment()
        name = job["name"] if job["config"] is None else ""  # where a config lies changes nothing
        deciding = {**job, "name": name, **surroundings.known_before(str(job["package"]), self.environment)}
        self.key = hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:40]
        self.folder = os.path.join(cache_folder(), "recordings")
        self.refusals = _refusals(self.folder)
        self.trusted = not self.refusals

    def document(self) -> Any:
        """The document that is kept; None where there is none that holds, so that it is made again."""
        for path in self._entries():
            try:
                document = self._read(path)
            except OSError as error:
                if isinstance(error, PermissionError) or error.errno == errno.ELOOP:
                    self.refusals.append(f"{path}: {error.strerror}")
                continue
            except (ValueError, TypeError, KeyError, AttributeError, ModelFileError):  # damaged
                continue
            if document is not None:
                return document
        return None

    def _entries(self) -> list[str]:
        if not self.trusted:
            return []
        try:
            names = sorted(os.listdir(self.folder))
        except OSError:
            return []
        return [os.path.join(self.folder, name) for name in names if name.startswith(self.key)]

    def _read(self, path: str) -> Any:
        line, _, content = read(path, written.MAX_PACKED + _LONGEST_HEADER, own=True).partition(b"\n")
        header = json.loads(line)
        if header["job"] != self.key or header["content"] != hashlib.sha256(content).hexdigest():
            return None
        if surroundings.digest(header["variables"], header["files"], self.environment) != header["digest"]:
            return None
        document = written.unpack(content, path)
        os.utime(path)
        return document

    def keep(self, data: bytes, facts: Mapping[str, Any] | None) -> None:
        """Writes a recording, and removes those that were not read for the longest.

        Args:
            data: the packed document.
            facts: those of `surroundings.facts_of_process`; None: they are not known, and nothing is kept.
        """
        if not self.trusted or facts is None:
            return
        header = {"job": self.key, "content": hashlib.sha256(data).hexdigest(), **facts}
        path = os.path.join(self.folder, f"{self.key}-{facts['digest'][:16]}")
        with contextlib.suppress(OSError):
            for folder in (os.path.dirname(self.folder), self.folder):  # the mode is that of the last part alone
                os.makedirs(folder, mode=0o700, exist_ok=True)
            if _refusals(self.folder):
                return
            _write(path, json.dumps(header).encode() + b"\n" + data)
            files = [os.path.join(self.folder, name) for name in os.listdir(self.folder)]
            for old in sorted(files, key=os.path.getmtime, reverse=True)[MOST_KEPT:]:
                os.remove(old)


def _refusals(folder: str) -> list[str]:
    """Why a folder, or the one that it is in, is not trusted; none where it is not there."""
    refusals = []
    for one in (os.path.dirname(folder), folder):
        with contextlib.suppress(OSError):
            _close_to_others(one)
            if why := not_own(os.lstat(one), folder=True):
                refusals.append(f"{one}: {why}")
    return refusals


def _close_to_others(folder: str) -> None:
    """Takes the right to write from others, in a folder of this user. Under the umask 002, which many systems have,
    folders were made that a group may write to; what others put there meanwhile is told by its owner (`not_own`)."""
    status = os.lstat(folder)
    is_own = hasattr(os, "geteuid") and status.st_uid == os.geteuid()
    if is_own and stat.S_ISDIR(status.st_mode) and status.st_mode & _OTHERS_WRITE:
        os.chmod(folder, stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)


def _write(path: str, data: bytes) -> None:
    """Writes a file whole or not at all, which none but the user may read."""
    descriptor, part = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise
