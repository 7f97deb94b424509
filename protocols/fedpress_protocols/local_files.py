"""Files on this machine's disks, alike on Linux, macOS and Windows: secrets, locks, durable names.

A key or a token that every user of a machine can read is none. But containers are given their
secrets by orchestrators in files of mode 0444 or 0644, whoever the container runs as; these lie on
mounts that are read-only, and nobody else is in there. So a file counts as exposed if others may
read it, every folder on the way to it lets others through, and it is not on a read-only mount.

Windows has no modes: a file there inherits who may read it from its folder, and a folder of a
user's profile is that user's alone. So modes and owners are checked on POSIX systems only. Neither
can a folder be synced there: NTFS writes a change of name to its journal by itself. And nobody can
replace or remove a file there while another has it open, be it a virus scanner that looks at what
was just written: `replace_file` and `remove_file` try again for a while.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedpress_protocols.errors import ConfigurationError

OPEN_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""For every `os.open`: follow no link, leave nothing open to child processes, change no byte."""
_PATIENCE = 2.0
"""Seconds for which Windows is asked again to replace or remove a file that somebody has open."""


def is_exposed(file: Path) -> bool:
    """Whether every user of this machine can read `file`; False if there is none."""
    if sys.platform == "win32":
        return False
    try:
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode) or not status.st_mode & stat.S_IROTH:
            return False
        if os.statvfs(file).f_flag & os.ST_RDONLY:
            return False
        folders = Path(os.path.realpath(file)).parents
        return all(os.stat(folder).st_mode & stat.S_IXOTH for folder in folders)
    except OSError:
        return False


def check_private(file: Path, content: str) -> None:
    """Raise ConfigurationError if `file` is exposed; `content` says what it holds."""
    if is_exposed(file):
        raise ConfigurationError(
            f"{content}: every user of this machine can read {file}, whose mode is "
            f"{stat.S_IMODE(os.stat(file).st_mode):04o}",
            hint=f"chmod 0600 {file}; if others use this machine, make a new one: they may have it",
        )


def replace_file(source: Path, target: Path) -> None:
    """Give `source` the name `target` in one step, whatever had that name; raises OSError."""
    _retried(lambda: os.replace(source, target))


def remove_file(file: Path) -> None:
    """Remove `file` if it is there; raises OSError."""
    _retried(lambda: file.unlink(missing_ok=True))


def _retried(change: Callable[[], None]) -> None:
    if sys.platform == "win32":
        give_up = time.monotonic() + _PATIENCE
        while time.monotonic() < give_up:
            try:
                return change()
            except PermissionError:
                time.sleep(0.01)
    change()


def sync_folder(folder: Path | str) -> None:
    """Make names in `folder` durable: files made, renamed or removed in it before."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_lock(path: Path) -> int:
    """Open the lock file at `path`, made with mode 0600 if it is missing; returns its descriptor.

    A lock lasts until the descriptor is closed, at the latest at the end of the process. The file
    stays and never holds data.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o600)


@contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Hold the lock that `open_lock` opened, waiting for whoever holds it, and close it."""
    try:
        while not try_lock(descriptor, wait=True):
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


if sys.platform == "win32":
    import msvcrt

    def try_lock(descriptor: int, *, wait: bool = False) -> bool:
        """Take the lock; False if another holds it: Windows cannot wait for as long as it takes."""
        # Windows keeps others from reading what is locked: a byte that no file comes to.
        os.lseek(descriptor, 2**31 - 2, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def try_lock(descriptor: int, *, wait: bool = False) -> bool:
        """Take the lock; False if another holds it. Waits for that one if `wait` is given."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True
