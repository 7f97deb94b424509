"""The server's identity in masked rounds, and the enrolment of its clients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fedpress_flower import envelope
from fedpress_protocols.errors import MalformedRequest
from fedpress_protocols.masking.certificates import Certificate
from fedpress_protocols.messages import Membership
from fedpress_protocols.signatures import DeviceKey, to_base64url, verify_signature

CERTIFICATE_SECONDS = 90 * 24 * 3600
_RENEW_SECONDS = 30 * 24 * 3600


@dataclass
class Host:
    """Settings shared by all sessions of a run: the server's `key`, the `authority`'s public key,
    and its private key, `issuer`, if this server has it."""

    key: DeviceKey
    authority: bytes
    issuer: DeviceKey | None
    population: str
    _issued: dict[int, tuple[bytes, Certificate]] = field(default_factory=dict)
    _keys: set[bytes] = field(default_factory=set)

    def lacks(self, nodes: Iterable[int]) -> list[int]:
        """Of these nodes, those whose keys are to be asked for before they can be certified."""
        return [] if self.issuer is None else [n for n in nodes if n not in self._issued]

    def enrol(self, node: int, task: str, answer: bytes, now: float) -> None:
        """Certify the Ed25519 key of a node, by what it says to JOIN; raises MalformedRequest or
        InvalidSignature for one that is not its own."""
        public, signature = answer[:32], answer[32:]
        if len(answer) != 32 + 64 or public in self._keys:
            raise MalformedRequest("no key of its own that could be certified")
        server_key = to_base64url(self.key.public)
        verify_signature(public, envelope.joining(server_key, task, str(node)), signature)
        self._keys.add(public)
        self._certify(node, public, now)

    def _certify(self, node: int, public: bytes, now: float) -> None:
        assert self.issuer is not None  # noqa: S101 - else nobody is asked for a key
        certificate = Certificate.issue(
            self.issuer,
            identity=public,
            client_id=str(node),
            population=self.population,
            expires=int(now) + CERTIFICATE_SECONDS,
        )
        self._issued[node] = (public, certificate)

    def is_of(self, certificate: Certificate, node: int) -> bool:
        """Whether it may be the node's, as far as that can be known here."""
        return self.issuer is None or certificate.client_id == str(node)

    def membership(self, node: int, now: float) -> Membership:
        """Return the membership that the node shows to others."""
        certificate = None
        if self.issuer is not None:
            public, issued = self._issued[node]
            if issued.expires < now + _RENEW_SECONDS:
                self._certify(node, public, now)
            certificate = to_base64url(self._issued[node][1].to_bytes())
        return Membership(
            population=self.population,
            authority=to_base64url(self.authority),
            certificate=certificate,
        )
