"""A certificate authority for tests of TLS."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = timedelta(days=1)


class Pair(NamedTuple):
    """Two PEM files."""

    certificate: Path
    key: Path


class TestAuthority:
    """Signs certificates; its own lies at `file`."""

    __test__ = False

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._serial = 1
        basic = x509.BasicConstraints(ca=True, path_length=0)
        certificate = self._begun(self._name, self._key, 3650, -1)
        certificate = certificate.add_extension(basic, critical=True).add_extension(
            x509.KeyUsage(
                digital_signature=False,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=True,
                crl_sign=True,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        self.file = folder / f"{name}.crt"
        signed = certificate.sign(self._key, hashes.SHA256())
        self.file.write_bytes(signed.public_bytes(Encoding.PEM))

    def issue(
        self, name: str, *, days: float = 30, of_a_client: bool = False, passphrase: bytes = b""
    ) -> Pair:
        """For the host `name`, or for a device of that name; ends in so many days."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = ExtendedKeyUsageOID.CLIENT_AUTH if of_a_client else ExtendedKeyUsageOID.SERVER_AUTH
        try:
            host: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            host = x509.DNSName(name)
        signed = (
            self._begun(subject, key, days, days - 90)
            .add_extension(x509.SubjectAlternativeName([host]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        pair.certificate.write_bytes(signed.public_bytes(Encoding.PEM))
        how = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
        pair.key.touch(0o600)
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how))
        return pair

    def revocations(self, *pairs: Pair) -> bytes:
        """A list (CRL, PEM) of these certificates."""
        now = datetime.now(UTC)
        made = x509.CertificateRevocationListBuilder().issuer_name(self._name)
        made = made.last_update(now - DAY).next_update(now + DAY)
        for pair in pairs:
            found = x509.load_pem_x509_certificate(pair.certificate.read_bytes())
            revoked = x509.RevokedCertificateBuilder().serial_number(found.serial_number)
            made = made.add_revoked_certificate(revoked.revocation_date(now - DAY).build())
        return made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def _begun(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, until: float, since: float
    ) -> x509.CertificateBuilder:
        now, self._serial = datetime.now(UTC), self._serial + 1
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(self._serial)
            .not_valid_before(now + timedelta(days=min(since, -1)))
            .not_valid_after(now + timedelta(days=until))
        )
