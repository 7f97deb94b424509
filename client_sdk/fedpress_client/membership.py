"""Membership of the masked lane: the device's certificate, and the authority that it trusts."""

from __future__ import annotations

from dataclasses import dataclass

from fedpress_client.masking_rules import MaskingRules
from fedpress_client.state import Identity
from fedpress_protocols.errors import ConfigurationError, InvalidSignature, MalformedRequest
from fedpress_protocols.masking.certificates import Certificate
from fedpress_protocols.masking.client import ClientPolicy
from fedpress_protocols.messages import Membership
from fedpress_protocols.signatures import from_base64url, to_base64url

RENEW_SECONDS = 30 * 24 * 3600
"""A certificate that expires sooner is renewed."""


@dataclass(frozen=True, slots=True)
class Member:
    """The device's certificate towards the others of a session, and its policy of trust."""

    certificate: Certificate
    policy: ClientPolicy

    @classmethod
    def of(cls, identity: Identity, rules: MaskingRules) -> Member | None:
        """As far as it is known already; None if the server has to be asked.

        Raises ConfigurationError if the rules name another authority than was pinned before.
        """
        if not identity.certificate:
            return None
        if rules.authority not in (None, identity.authority):
            raise ConfigurationError(
                f"this device has pinned the enrolment authority {identity.authority}, its rules "
                f"name {rules.authority}",
                hint="enrol it anew, with an empty state directory",
            )
        certificate = Certificate.from_bytes(_decoded(identity.certificate))
        policy = ClientPolicy(
            authority=from_base64url(identity.authority, 32),
            server_key=from_base64url(identity.server_key, 32),
            population=identity.population,
            minimum=rules.minimum,
            adversary=rules.adversary,
            corrupt=rules.corrupt,
            suites=rules.suites,
            hybrid=rules.hybrid,
        )
        return cls(certificate, policy)


def joined(
    identity: Identity, membership: Membership, rules: MaskingRules, *, key: bytes, now: float
) -> Identity:
    """`identity` with the server's `membership` of its population; the authority is pinned by it.

    Raises ConfigurationError for another authority than the one that is pinned, or where there is
    no certificate of it for the device's public `key` that is good at `now`.
    """
    pinned = rules.authority or identity.authority
    if pinned and membership.authority != pinned:
        raise ConfigurationError(
            f"the server names the enrolment authority {membership.authority}, pinned is {pinned}",
            hint="whoever made certificates with another key may be inventing devices",
        )
    if identity.population and membership.population != identity.population:
        raise ConfigurationError(
            f"the server names the population {membership.population!r}, it was "
            f"{identity.population!r}"
        )
    certificate = membership.certificate
    if rules.certificate is not None:
        try:
            certificate = to_base64url(rules.certificate.read_bytes())
        except OSError as exc:
            raise ConfigurationError(f"{rules.certificate}: {exc.strerror}") from exc
    if certificate is None:
        raise ConfigurationError(
            f"this device has no certificate of the authority {membership.authority}",
            hint="have one issued (fedpress authority issue) and give its file",
        )
    _check(certificate, membership, key, now)
    fields = {
        "population": membership.population,
        "authority": membership.authority,
        "certificate": certificate,
    }
    return identity.model_copy(update=fields)


def _check(certificate: str, membership: Membership, key: bytes, now: float) -> None:
    try:
        parsed = Certificate.from_bytes(_decoded(certificate))
    except MalformedRequest as exc:
        raise ConfigurationError(f"not a certificate: {exc.detail}") from exc
    if parsed.identity != key:
        raise ConfigurationError(
            "the certificate is of another key than this device's",
            hint="after a change of key have one issued for the new key, which `fedpress authority "
            "request` prints, and give its file",
        )
    try:
        authority = from_base64url(membership.authority, 32)
        parsed.check(authority, population=membership.population, now=now)
    except InvalidSignature as exc:
        raise ConfigurationError(
            f"the certificate is not good for {membership.population!r}: {exc.detail}",
            hint=exc.hint,
        ) from exc


def _decoded(text: str) -> bytes:
    return from_base64url(text, len(text) * 3 // 4)
