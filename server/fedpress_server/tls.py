"""TLS of the server's listeners: its own certificate, and client certificates of devices.

A replaced file (by an ACME client or an operator) is loaded within `LOOK_EVERY` seconds for new
connections; open ones keep the old certificate. A mismatched pair is logged, and the previous one
stays in use.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.local_files import check_private
from fedpress_server.settings import Settings

_log = logging.getLogger(__name__)

LOOK_EVERY = 10.0
"""Seconds."""


class Certificates:
    """The server's `certificate` (PEM, the chain after it) and its `key`.

    With `client_ca`, PEM certificates of authorities, clients need a certificate signed by one of
    them; a revocation list (CRL, PEM) in the same file is enforced. Raises ConfigurationError.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._seen = self._looks()
        self._newest = self._loaded()
        self._context = self._loaded()
        self._context.sni_callback = self._choose

    @property
    def context(self) -> ssl.SSLContext:
        """The SSL context of a listener, updated with the files."""
        return self._context

    def renew(self) -> bool:
        """Reload changed files; False if nothing changed."""
        looks = self._looks()
        if looks == self._seen:
            return False
        self._seen = looks
        try:
            self._newest = self._loaded()
        except ConfigurationError as exc:
            _log.error("the certificate was not reloaded: %s", exc)
            return False
        # A connection takes these from the listener's context, before `_choose` is called.
        self._context.verify_flags = self._newest.verify_flags
        _log.warning("%s is renewed", self._certificate)
        return True

    async def renew_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                await asyncio.to_thread(self.renew)
            except Exception:  # a file disappeared while it was read: retried at the next check
                _log.exception("the certificate was not reloaded")

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext
    ) -> None:
        connection.context = self._newest

    def _looks(self) -> tuple[object, ...]:
        files = (self._certificate, self._key, self._client_ca)
        return tuple(_look(file) for file in files if file is not None)

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_pair(context, self._certificate, self._key)
        if self._client_ca is not None:
            self._ask(context, self._client_ca)
        return context

    def _ask(self, context: ssl.SSLContext, authorities: Path) -> None:
        try:
            text = authorities.read_text("ascii")
            context.load_verify_locations(cadata=_certificates(text))
            if "BEGIN X509 CRL" in text:
                context.load_verify_locations(cafile=authorities)
                context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
        except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
            raise ConfigurationError(
                f"tls_client_ca: {authorities} has no certificates in PEM: {exc}",
                hint="use the certificates of the authorities that sign devices' certificates",
            ) from exc
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session skips verification, but a removed authority must be rejected at once.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0


def certificates_of(settings: Settings) -> tuple[Certificates | None, Certificates | None]:
    """The certificates of the devices' listener and the operators', which needs no client
    certificate."""
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None or key is None:
        return None, None
    public = Certificates(certificate, key, settings.tls_client_ca)
    return public, None if settings.admin_port is None else Certificates(certificate, key)


def load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Load a certificate and its private key, both PEM; raises ConfigurationError that names the
    faulty file."""

    def no_passphrase() -> str:
        raise ConfigurationError(
            f"{key} is encrypted, but a server cannot ask for its passphrase",
            hint=f"decrypt it: openssl pkey -in {key} -out FILE, and chmod 0600 FILE",
        )

    check_private(key, "TLS")
    for file in (certificate, key):
        try:
            file.read_bytes()
        except OSError as exc:
            raise ConfigurationError(f"TLS: {file}: {exc.strerror}") from exc
    try:
        context.load_cert_chain(certificate, key, no_passphrase)
    except ssl.SSLError as exc:
        if "MISMATCH" in str(exc):
            raise ConfigurationError(
                f"TLS: {key} is not the key of {certificate}", hint="use a matching pair"
            ) from exc
        raise ConfigurationError(
            f"TLS: {certificate} and {key} are not a certificate and its private key in PEM: {exc}"
        ) from exc


def _certificates(text: str) -> str:
    """The certificates only, since OpenSSL does not read lists among them."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    bodies = [part.partition(end)[0] for part in text.split(begin)[1:]]
    if not bodies:
        raise ValueError("the file has no BEGIN CERTIFICATE")
    return "".join(f"{begin}{body}{end}\n" for body in bodies)


def _look(file: Path) -> object:
    """File attributes that change when a file is replaced, written, or made private."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
