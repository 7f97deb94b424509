"""Files that hold a secret, and who may read them.

A key or a token that every user of a machine can read is none. But containers are given their
secrets by orchestrators in files of mode 0444 or 0644, whoever the container runs as; these lie on
mounts that are read-only, and nobody else is in there. So a file counts as exposed if others may
read it, every folder on the way to it lets others through, and it is not on a read-only mount.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fedpress_protocols.errors import ConfigurationError


def is_exposed(file: Path) -> bool:
    """Whether every user of this machine can read `file`; False if there is none."""
    try:
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode) or not found.st_mode & stat.S_IROTH:
            return False
        if os.statvfs(file).f_flag & os.ST_RDONLY:
            return False
        folders = Path(os.path.realpath(file)).parents
        return all(os.stat(folder).st_mode & stat.S_IXOTH for folder in folders)
    except OSError:
        return False


def check_private(file: Path, what: str) -> None:
    """Raises ConfigurationError if `file`, which holds `what`, is exposed."""
    if is_exposed(file):
        raise ConfigurationError(
            f"{what}: every user of this machine can read {file}, whose mode is "
            f"{stat.S_IMODE(os.stat(file).st_mode):04o}",
            hint=f"chmod 0600 {file}; if others use this machine, make a new one: they may have it",
        )
