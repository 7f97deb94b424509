"""TLS as a device speaks it: whom it believes to be the server, and who it is itself."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

import httpx
from cryptography import x509

from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.local_files import check_private

_ALERTS = {
    "CERTIFICATE_REQUIRED": (
        "the server asks for a client certificate, and this device has given none",
        "have one issued, and give it with its key (--client-certificate, --client-key)",
    ),
    "UNKNOWN_CA": (
        "the server does not know the authority that signed this device's certificate",
        "have a certificate issued by the authority that the server names as tls_client_ca",
    ),
    "CERTIFICATE_EXPIRED": (
        "the server says that this device's certificate has expired",
        "have a new one issued; if it is new, set this device's clock and the server's by NTP",
    ),
    "CERTIFICATE_REVOKED": (
        "the server says that this device's certificate was revoked",
        "ask whoever issued it",
    ),
    "BAD_CERTIFICATE": (
        "the server does not accept this device's certificate",
        "have a new one issued, for authentication of clients",
    ),
    "UNSUPPORTED_CERTIFICATE": (
        "the server does not take a certificate of this kind from a device",
        "have one issued whose extended key usage is that of clients (clientAuth)",
    ),
}
_ALERTS["HANDSHAKE_FAILURE"] = _ALERTS["CERTIFICATE_REQUIRED"]  # as TLS 1.2 says it
_NO_TLS = (
    "the server does not speak TLS at this port",
    "give its URL with http:// in place of https://, or the port at which it speaks TLS",
)
_OF_THE_SERVER = {
    "hostname mismatch": (
        "the certificate of the server is for another name",
        "use the name that it is for, or have the server given one for this name",
    ),
    "ip address mismatch": (
        "the certificate of the server is for another address",
        "use the name that it is for, or have the server given one for this address",
    ),
    "certificate has expired": (
        "the certificate of the server has expired",
        "the operator has to renew it; if it is new, set this machine's clock",
    ),
    "certificate is not yet valid": (
        "the certificate of the server is not valid yet",
        "set this machine's clock",
    ),
    "unable to get local issuer": (
        "the server's certificate is signed by an authority that this machine does not know",
        "give its certificate (--ca, FEDPRESS_CA)",
    ),
    "self-signed certificate": (
        "the server's certificate is signed by an authority that this machine does not know",
        "give its certificate (--ca, FEDPRESS_CA)",
    ),
}


def context_of(
    verify: str | None, certificate: str | Path | None, key: str | Path | None
) -> ssl.SSLContext:
    """`verify`: a file of the authorities to believe, None for the usual ones. `certificate` and
    `key`: PEM files of this device's own, for a server that asks for one; the key may lie in the
    certificate's file. Raises ConfigurationError."""
    try:
        context = (
            ssl.create_default_context(cafile=verify) if verify else httpx.create_ssl_context()
        )
    except (OSError, ssl.SSLError) as exc:
        raise ConfigurationError(f"CA bundle {verify}: {exc}") from exc
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate is not None:
        _load(context, Path(certificate), Path(key or certificate))
    elif key is not None:
        raise ConfigurationError("a client key without its certificate", hint="give both files")
    return context


def explained(exc: BaseException) -> tuple[str, str] | None:
    """The reason that a failed connection gives about TLS, and a hint; None if it gives none."""
    cause: BaseException | None = exc
    while cause is not None:
        text = str(cause)
        if "WRONG_VERSION_NUMBER" in text:
            return _NO_TLS
        for alert, reason in _ALERTS.items():
            if f"ALERT_{alert}" in text.upper().replace(" ", "_"):
                return reason
        if "CERTIFICATE_VERIFY_FAILED" in text:
            lower = text.lower()
            reasons = (reason for words, reason in _OF_THE_SERVER.items() if words in lower)
            return next(reasons, ("the server's certificate cannot be believed", text))
        cause = cause.__cause__ or cause.__context__
    return None


def silence(url: str, certificate: Path | None, now: float) -> str:
    """A hint for where a server ended a connection before it answered, as many do that ask for
    certificates; empty where that cannot be why. `now`: Unix seconds."""
    if not url.startswith("https:"):
        return ""
    if certificate is None:
        return "if the server asks devices for a certificate, give one (--client-certificate)"
    try:
        cert = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError):
        return f"look at {certificate}"
    moment = datetime.fromtimestamp(now, UTC)
    if not cert.not_valid_before_utc <= moment <= cert.not_valid_after_utc:
        since, until = cert.not_valid_before_utc, cert.not_valid_after_utc
        return f"{certificate} is valid from {since:%Y-%m-%d} to {until:%Y-%m-%d}: have one issued"
    return (
        f"the server may not take {certificate}, of the authority {cert.issuer.rfc4514_string()}: "
        "ask its operator which it takes, and whether this one was revoked"
    )


def is_about_the_client(reason: tuple[str, str]) -> bool:
    """Whether the server wanted another certificate of this side, or any."""
    return reason in _ALERTS.values()


def is_final(reason: tuple[str, str]) -> bool:
    """Whether no later try does better: this device's certificate was refused, or its URL names a
    port without TLS."""
    return reason == _NO_TLS or is_about_the_client(reason)


def _load(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    def no_passphrase() -> str:
        raise ConfigurationError(
            f"client key {key} is encrypted, and nobody is there to be asked for its passphrase",
            hint=f"write it without: openssl pkey -in {key} -out FILE, and chmod 0600 FILE",
        )

    check_private(key, "the client certificate's key")
    for file in (certificate, key):
        try:
            file.read_bytes()
        except OSError as exc:
            raise ConfigurationError(f"client certificate: {file}: {exc.strerror}") from exc
    try:
        context.load_cert_chain(certificate, key, no_passphrase)
    except ssl.SSLError as exc:
        if "MISMATCH" in str(exc):
            raise ConfigurationError(
                f"{key} is not the key of the client certificate {certificate}",
                hint="give the pair that belongs together",
            ) from exc
        raise ConfigurationError(
            f"{certificate} and {key} are not a client certificate and its private key in PEM",
            hint="openssl x509 -in FILE and openssl pkey -in FILE show what they are",
        ) from exc
