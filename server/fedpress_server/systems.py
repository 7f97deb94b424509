"""Operating systems: which the server runs on, and what it asks of each in another way.

Linux is what it is tested and operated on. macOS has all that it needs, for development. Windows
has no limit on open files to raise, no signals to change the log's level by, no modes that keep
keys private; the package is imported there for `fedpress simulate --task`, which opens no port.
"""

from __future__ import annotations

import socket
import struct
import sys

from fedpress_protocols.errors import ConfigurationError

if sys.platform == "linux":
    from fcntl import ioctl
    from termios import TIOCOUTQ

_SO_NWRITE = 0x1024
"""macOS, sys/socket.h: bytes of a socket's send buffer that are not acknowledged."""


def check_system() -> None:
    """Raise ConfigurationError where a server cannot run."""
    if sys.platform == "win32":
        raise ConfigurationError(
            "the server does not run on Windows",
            hint="run it under WSL 2 or from the Docker image; devices, the simulator and all "
            "commands that talk to a server do run on Windows",
        )


def unsent_in_kernel(connection: socket.socket) -> int:
    """Bytes that the kernel keeps until the peer acknowledges them; 0 where it does not say.

    Raises OSError for a socket without that information.
    """
    if sys.platform == "linux":
        return int(struct.unpack("i", ioctl(connection.fileno(), TIOCOUTQ, bytes(4)))[0])
    if sys.platform == "darwin":
        return connection.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
    return 0
