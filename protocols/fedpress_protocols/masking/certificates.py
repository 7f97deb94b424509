"""Membership certificates: an enrolment authority's statement about a device's key.

A server that could invent clients could fill a cohort with its own and read the update of the one
that is left. So clients accept only members certified by an authority, whose key the server need
not have. If one operator has both keys, the protection is only against a semi-honest server.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fedpress_protocols.errors import InvalidSignature
from fedpress_protocols.masking.transcript import (
    U64,
    UNSIGNED,
    Bytes32,
    Signature,
    Signed,
    Text,
)
from fedpress_protocols.signatures import DeviceKey

_CONTEXT = b""


@dataclass(frozen=True, slots=True)
class Certificate(Signed):
    """A certificate that `identity` (an Ed25519 public key) is the device `client_id` of
    `population` until `expires` (Unix seconds); signed by the enrolment authority."""

    NAME = "certificate"

    identity: Bytes32
    client_id: Text
    population: Text
    expires: U64
    signature: Signature = UNSIGNED

    @classmethod
    def issue(
        cls, authority: DeviceKey, *, identity: bytes, client_id: str, population: str, expires: int
    ) -> Certificate:
        """Issue a certificate; the caller must have verified the device."""
        return cls(identity, client_id, population, expires).signed(authority, _CONTEXT)

    def check(self, authority: bytes, *, population: str, now: float) -> None:
        """Raise InvalidSignature unless the pinned key `authority` certified this for `population`
        and it has not expired at `now`."""
        if self.population != population:
            raise InvalidSignature(
                f"a certificate for the population {self.population!r}, expected {population!r}"
            )
        if self.expires <= now:
            raise InvalidSignature(
                f"the certificate of {self.client_id!r} expired at {self.expires}",
                hint="enrol the device again",
            )
        _verify(self, authority)


@lru_cache(maxsize=4096)
def _verify(certificate: Certificate, authority: bytes) -> None:
    """Verify a certificate; cached, since the same members meet in every round."""
    certificate.verify(authority, _CONTEXT)
