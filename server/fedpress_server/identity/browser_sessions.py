"""Sessions of operators with a browser, in an encrypted cookie: any server of the fleet reads it.

A session stands for the hash of an operator's token. It has no rights of its own: every request
identifies the operator anew, so a revoked or expired token ends its sessions at once. The key is
derived from the server's key (HKDF, RFC 5869); a change of that ends all sessions.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedpress_server.identity.signing import SigningKeys

LIFETIME_SECONDS = 8 * 3600
_CONTEXT = b"fedpress console sessions"


@dataclass(frozen=True)
class BrowserSession:
    token_hash: str
    csrf: str
    """A value that every form of the session carries."""


class BrowserSessions:
    """Open and read sessions; nothing is stored."""

    def __init__(self, keys: SigningKeys, clock: Callable[[], float]) -> None:
        self._keys = keys
        self._clock = clock

    def open(self, token_hash: str) -> str:
        """Open a session; returns its cookie. Raises Unavailable without a server key."""
        content = f"{token_hash} {secrets.token_urlsafe(24)}"
        return self._cipher().encrypt_at_time(content.encode(), int(self._clock())).decode()

    def find(self, cookie: str) -> BrowserSession | None:
        """The session of this cookie, unless it has ended or is none of this fleet's."""
        now = int(self._clock())
        try:
            content = self._cipher().decrypt_at_time(cookie.encode(), LIFETIME_SECONDS, now)
        except InvalidToken:
            return None
        token_hash, _, csrf = content.decode().partition(" ")
        return BrowserSession(token_hash, csrf)

    def _cipher(self) -> Fernet:
        derive = HKDF(SHA256(), 32, None, _CONTEXT).derive
        return Fernet(base64.urlsafe_b64encode(derive(self._keys.current.to_bytes())))
