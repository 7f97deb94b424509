"""The certificate authority of the masked lane: a separate one, or the server itself.

A separate authority certifies devices with a key that this server never sees, so the server cannot
fill a cohort with its own clients. If the server has the key itself, masking only protects against
a semi-honest server.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedpress_protocols.errors import ConfigurationError, MalformedRequest
from fedpress_protocols.masking.certificates import Certificate
from fedpress_protocols.messages import Membership
from fedpress_protocols.signatures import DeviceKey, from_base64url, to_base64url
from fedpress_server.storage.records import Device

CERTIFICATE_SECONDS = 90 * 24 * 3600


@dataclass(frozen=True)
class Authority:
    """The authority with key `public` for `population`; `key` is the private half if on this
    server."""

    population: str
    public: bytes
    key: DeviceKey | None

    @classmethod
    def apart(cls, population: str, public: str) -> Authority:
        """A separate authority with the key `public` (base64url). Raises ConfigurationError."""
        try:
            return cls(population, from_base64url(public, 32), None)
        except MalformedRequest as exc:
            raise ConfigurationError(
                f"masking_authority: {exc.detail}",
                hint="give the public key that `fedpress authority init` printed",
            ) from exc

    @classmethod
    def here(cls, population: str, key: DeviceKey) -> Authority:
        """The server itself as the authority."""
        return cls(population, key.public, key)

    def membership(self, device: Device, now: float) -> Membership:
        """The membership proof of `device` for other devices."""
        issued = None
        if self.key is not None:
            certificate = Certificate.issue(
                self.key,
                identity=device.public_key,
                client_id=device.client_id,
                population=self.population,
                expires=int(now) + CERTIFICATE_SECONDS,
            )
            issued = to_base64url(certificate.to_bytes())
        return Membership(
            population=self.population,
            authority=to_base64url(self.public),
            certificate=issued,
        )
