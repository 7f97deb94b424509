"""An enrolment authority: the key that it signs with, and beside it the register of certificates.

It runs where the aggregation server does not, and so the server cannot certify devices that do not
exist. Whoever issues a certificate has seen to it that the key is a real device's.

A certificate of the masked lane is good until it expires, and nobody asks anybody before: what is
taken back is not renewed, and the server revokes the device meanwhile.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import gmtime, strftime
from typing import Annotated, Literal

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field, ValidationError

from fedpress_client.state import StateDirectory
from fedpress_protocols.errors import ConfigurationError, FedpressError, MalformedRequest, NotFound
from fedpress_protocols.local_files import OPEN_FLAGS, check_private, locked, open_lock
from fedpress_protocols.masking.certificates import Certificate
from fedpress_protocols.plan import Digest, Term
from fedpress_protocols.signatures import DeviceKey, from_base64url, key_id_of, to_base64url
from fedpress_protocols.validation import format_validation_errors

_DAY = 24 * 3600
_MAX_REGISTER = 2**28
_MAX_CERTIFICATE = 2**16
Ask = Callable[[], str]
"""For the passphrase of a key that is encrypted."""
State = Literal["good", "expired", "superseded", "revoked"]


class Issued(Term):
    """A line of the register; a later line of the same `serial`, the SHA-256 of the certificate,
    takes its place. Times are Unix seconds.
    """

    serial: Digest
    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{43}$")]
    name: str
    population: str
    issued_at: int
    expires: int
    revoked_at: int | None = None

    @property
    def key_id(self) -> str:
        return key_id_of(from_base64url(self.key, 32))


class Entry(Issued):
    state: State
    """"superseded": the same key, or the same name, has a later certificate."""


@dataclass(frozen=True, slots=True)
class Request:
    """A device's public key (base64url), and what the device is to be called."""

    key: str
    name: str


def make_authority(path: Path, passphrase: str = "") -> str:
    """Write a new private key to `path`, for its owner alone and encrypted if there is a
    `passphrase`; the public key, base64url.

    Raises ConfigurationError where there is a file already.
    """
    key = Ed25519PrivateKey.generate()
    how: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase:
        how = serialization.BestAvailableEncryption(passphrase.encode())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600)
    except OSError as exc:
        raise ConfigurationError(
            f"{path} cannot be made: {exc.strerror}", hint="a key is never overwritten"
        ) from exc
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
        file.flush()
        os.fsync(descriptor)
    return to_base64url(key.public_key().public_bytes_raw())


def device_key(state_dir: Path) -> str:
    """The public key, base64url, of the device whose state lies in `state_dir`; made if need be."""
    return to_base64url(StateDirectory.open(state_dir).key().public)


def read_requests(text: str) -> list[Request]:
    """One request a line, `KEY NAME`; empty lines and what follows a # are passed over. Raises
    ConfigurationError for the first line that is none, and where two ask for one name or key."""
    requests: list[Request] = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.partition("#")[0].split()
        if not parts:
            continue
        if len(parts) != 2:
            raise ConfigurationError(f"line {number}: {line[:80]!r} is not a key and a name")
        made = Request(*parts)
        if any(each.key == made.key or each.name == made.name for each in requests):
            raise ConfigurationError(f"line {number}: the key or the name comes twice")
        requests.append(made)
    return requests


def inspected(file: Path) -> Certificate:
    """Read a certificate; raises ConfigurationError if the file is none. The signature is not
    looked at."""
    try:
        with file.open("rb") as opened:
            return Certificate.from_bytes(opened.read(_MAX_CERTIFICATE))
    except OSError as exc:
        raise ConfigurationError(f"{file} cannot be read: {exc.strerror}") from exc
    except MalformedRequest as exc:
        raise ConfigurationError(f"{file} is not a certificate: {exc.detail}") from exc


class Said(Term):
    """The contents of a certificate."""

    serial: Digest
    key: str
    key_id: str
    name: str
    population: str
    expires: int


def summary_of(certificate: Certificate) -> Said:
    return Said(
        serial=hashlib.sha256(certificate.to_bytes()).hexdigest(),
        key=to_base64url(certificate.identity),
        key_id=key_id_of(certificate.identity),
        name=certificate.client_id,
        population=certificate.population,
        expires=certificate.expires,
    )


def file_name(certificate: Certificate) -> str:
    """By the device's name, if that can be a file's and no folder's, or else by its key's id."""
    name = certificate.client_id
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        name = key_id_of(certificate.identity)
    return f"{name}.cert"


class EnrolmentAuthority:
    """The authority whose key lies in `path`, and its register in a file beside it."""

    def __init__(self, path: Path, ask: Ask, clock: Callable[[], float]) -> None:
        """Raises ConfigurationError for a key that cannot be read, or that others can read."""
        self._path, self._ask, self._clock = path, ask, clock
        self._register = path.with_name(path.name + ".issued")
        check_private(path, "the authority's key")

    def issue(
        self, requests: Iterable[Request], *, population: str, days: float, new_key: bool = False
    ) -> list[Certificate]:
        """A certificate for each request, good for `days` from now, in the register before anybody
        has it.

        Raises ConfigurationError for a key that is none, or for a name that has a good certificate
        under another key, unless `new_key` says that the device has changed its key.
        """
        now = self._clock()
        key, made = self._key(), list[Certificate]()
        with locked(open_lock(self._register)):
            for asked in requests:
                self._check(asked, population, new_key=new_key)
                made.append(_certificate(key, asked, population, int(now + days * _DAY)))
            self._write([_issued(each, now) for each in made])
        return made

    def _check(self, asked: Request, population: str, *, new_key: bool) -> None:
        for each in self.entries():
            if each.key == asked.key and each.state == "revoked":
                raise ConfigurationError(
                    f"the certificates of key {each.key_id} were revoked",
                    hint="have the device make a new key (fedpress client rotate-key)",
                )
            is_named_so = asked.name != "" and (each.name, each.population) == (
                asked.name,
                population,
            )
            if is_named_so and each.key != asked.key and each.state == "good" and not new_key:
                raise ConfigurationError(
                    f"{asked.name!r} has a certificate for key {each.key_id} until "
                    f"{_day(each.expires)}",
                    hint="if the device has changed its key, say --new-key; else give the other "
                    "device another name",
                )

    def renew(self, *, within_days: float, days: float) -> list[Certificate]:
        """New certificates for those that expire within so many days, or have expired: the newest
        of each key, unless it was revoked or its name has another key by now."""
        now = self._clock()
        key, made = self._key(), list[Certificate]()
        with locked(open_lock(self._register)):
            for each in self.entries():
                if each.state in ("good", "expired") and each.expires < now + within_days * _DAY:
                    asked = Request(each.key, each.name)
                    made.append(_certificate(key, asked, each.population, int(now + days * _DAY)))
            self._write([_issued(each, now) for each in made])
        return made

    def revoke(self, which: str) -> list[Entry]:
        """Renew nothing of the key, the name or the serial `which`; returns those that are good
        still, which the server has to keep out until they expire. Raises NotFound."""
        now = int(self._clock())
        with locked(open_lock(self._register)):
            matching = [
                each
                for each in self.entries()
                if which in (each.key, each.key_id, each.name, each.serial)
            ]
            if not matching:
                raise NotFound(
                    f"nothing was issued to {which[:64]!r}",
                    hint="fedpress authority list shows all",
                )
            fresh = [each for each in matching if each.revoked_at is None]
            lines = [
                Issued.model_validate(each.model_dump(exclude={"state"}) | {"revoked_at": now})
                for each in fresh
            ]
            self._write(lines)
        return [each for each in matching if each.expires > now]

    def entries(self) -> list[Entry]:
        """The issued certificates, in order, with their current state."""
        now, latest = self._clock(), dict[str, Issued]()
        for line in self._lines():
            latest[line.serial] = line  # a later line about the same certificate counts
        owners = {(each.population, each.name): each for each in latest.values() if each.name}
        newest = {(each.population, each.key): each for each in latest.values()}

        def state(each: Issued) -> State:
            if each.revoked_at is not None:
                return "revoked"
            owner = owners.get((each.population, each.name), each)
            if newest[each.population, each.key] is not each or owner.key != each.key:
                return "superseded"
            return "good" if each.expires > now else "expired"

        return [Entry(**each.model_dump(), state=state(each)) for each in latest.values()]

    @property
    def public(self) -> str:
        """The public key, base64url."""
        return to_base64url(self._key().public)

    def _key(self) -> DeviceKey:
        try:
            pem = self._path.read_bytes()
        except OSError as exc:
            raise ConfigurationError(f"{self._path} cannot be read: {exc.strerror}") from exc
        is_encrypted = b"ENCRYPTED" in pem
        try:
            password = self._ask().encode() if is_encrypted else None
            key = serialization.load_pem_private_key(pem, password or None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
            raise ConfigurationError(
                f"{self._path}: "
                + ("the passphrase is wrong" if is_encrypted else "not a private key in PEM")
            ) from exc
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigurationError(
                f"{self._path}: not an Ed25519 key", hint="fedpress authority init"
            )
        return DeviceKey(key)

    def _lines(self) -> Iterator[Issued]:
        try:
            with self._register.open("rb") as file:
                text = file.read(_MAX_REGISTER)
        except FileNotFoundError:
            return
        for number, line in enumerate(text.splitlines(), 1):
            try:
                yield Issued.model_validate_json(line)
            except ValidationError as exc:
                raise ConfigurationError(
                    f"{self._register}, line {number}: {format_validation_errors(exc)}",
                    hint="bring it back from a copy; without it, nobody knows what was issued",
                ) from exc

    def _write(self, lines: Iterable[Issued]) -> None:
        data = "".join(each.model_dump_json() + "\n" for each in lines).encode()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | OPEN_FLAGS
        descriptor = os.open(self._register, flags, 0o600)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _certificate(key: DeviceKey, asked: Request, population: str, expires: int) -> Certificate:
    try:
        identity = from_base64url(asked.key, 32)
        return Certificate.issue(
            key, identity=identity, client_id=asked.name, population=population, expires=expires
        )
    except FedpressError as exc:
        raise ConfigurationError(
            f"the certificate cannot be issued: {exc.detail}",
            hint="give the key that `fedpress authority request` prints on the device",
        ) from exc


def _issued(made: Certificate, now: float) -> Issued:
    return Issued(
        serial=hashlib.sha256(made.to_bytes()).hexdigest(),
        key=to_base64url(made.identity),
        name=made.client_id,
        population=made.population,
        issued_at=int(now),
        expires=made.expires,
    )


def _day(seconds: int) -> str:
    return strftime("%Y-%m-%d", gmtime(seconds))
