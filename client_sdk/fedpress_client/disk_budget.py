"""A limit on the bytes in the device's folder: caches make room, the account never does."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedpress_client.checks import check_whole
from fedpress_protocols.errors import StateWriteError

_log = logging.getLogger(__name__)

_CACHES = ("bases/*", "tasks/*/models/*", "tasks/*/published*")
"""Everything that can be downloaded again; the published models go last, since they are what is
used where the server is away."""


@dataclass(frozen=True, slots=True)
class DiskBudget:
    """At most `max_bytes` in the files of `folder`; None for no limit.

    While a file is replaced, the one before is there too and is not counted.
    """

    folder: Path
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.max_bytes is not None:
            check_whole("max_disk_bytes", self.max_bytes, 1)

    def admits(self, path: Path, num_bytes: int) -> bool:
        """Whether a cache of `num_bytes` fits in at `path`; older caches are removed for it."""
        if self.max_bytes is None or self._make_room(path, num_bytes, self.max_bytes):
            return True
        _log.warning("%s is not kept: %d bytes exceed the disk budget", path.name[:12], num_bytes)
        return False

    def require(self, path: Path, num_bytes: int) -> None:
        """Have `num_bytes` fit in at `path`, which must be kept; caches are removed for it.

        A file that does not grow always fits. Raises StateWriteError if there is no room without
        caches either.
        """
        if self.max_bytes is None or num_bytes <= _size(path):
            return
        if not self._make_room(path, num_bytes, self.max_bytes):
            kept = _sizes(self.folder)
            for each in (path, *_caches(self.folder)):
                kept.pop(each, None)
            used = sum(kept.values())
            raise StateWriteError(
                f"{path} needs {num_bytes:,} bytes where max_disk_bytes is {self.max_bytes:,} and "
                f"other files that must be kept have {used:,}; what it held before is unchanged",
                hint=f"set max_disk_bytes to {used + num_bytes:,} or more",
            )

    def _make_room(self, path: Path, num_bytes: int, max_bytes: int) -> bool:
        """Remove the caches that were not used for longest, if that makes enough room."""
        sizes = _sizes(self.folder)
        sizes.pop(path, None)
        excess = sum(sizes.values()) + num_bytes - max_bytes
        if excess <= 0:
            return True
        caches = [each for each in _caches(self.folder) if each in sizes]
        if excess > sum(sizes[each] for each in caches):
            return False
        for each in caches:
            if excess <= 0:
                break
            _log.info("%s makes room on the disk", each)
            with suppress(FileNotFoundError):
                each.unlink()
            excess -= sizes[each]
        return True


def _sizes(folder: Path) -> dict[Path, int]:
    """The bytes of each file below `folder`."""
    paths = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return {path: _size(path) for path in paths}


def _size(path: Path) -> int:
    """0 for a file that is not there: another process may have removed it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _caches(folder: Path) -> list[Path]:
    """The least recently used first, published models last."""
    ages: list[tuple[bool, int, Path]] = []
    for pattern in _CACHES:
        for path in folder.glob(pattern):
            with suppress(FileNotFoundError):
                is_published = path.name.startswith("published")
                ages.append((is_published, path.stat().st_mtime_ns, path))
    return [path for _, _, path in sorted(ages)]
