"""Who vouches for the devices of the masked lane: an authority apart, or the server itself.

An authority apart certifies devices with a key that this server never sees, and so the server
cannot fill a cohort with clients of its own making. Where the server holds the key itself, masking
protects from a server that only looks at what it gets.
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
    """`public` certifies devices of `population`; `key` is the private half, if it is here."""

    population: str
    public: bytes
    key: DeviceKey | None

    @classmethod
    def apart(cls, population: str, public: str) -> Authority:
        """One whose private key is elsewhere; `public` in base64url. Raises ConfigurationError."""
        try:
            return cls(population, from_base64url(public, 32), None)
        except MalformedRequest as exc:
            raise ConfigurationError(
                f"masking_authority: {exc.detail}",
                hint="give the public key that `fedpress authority init` printed",
            ) from exc

    @classmethod
    def here(cls, population: str, key: DeviceKey) -> Authority:
        """The server itself."""
        return cls(population, key.public, key)

    def membership(self, device: Device, now: float) -> Membership:
        """What `device` needs to show others that it is one."""
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
