"""The device registry: enrolled devices, their approval, revocation and key rotation.

    enrolled → waiting → approved → revoked
                      ↘ rejected ↗

Without required approval a device starts as approved. A rejected device may still be approved;
revoked is final. Only an approved device may rotate its key, which does not change its state. Every
change is in the audit log, by the same transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from sqlalchemy.engine import Connection
from starlette.requests import Request

from fedpress_protocols.device_keys import Link, chain
from fedpress_protocols.enrolment import DeviceState
from fedpress_protocols.errors import (
    AlreadyExists,
    Conflict,
    InvalidSignature,
    MalformedRequest,
    NotFound,
    UnknownDevice,
)
from fedpress_protocols.messages import RotationRequest
from fedpress_protocols.signatures import Content
from fedpress_server import failpoints
from fedpress_server.identity import audit
from fedpress_server.identity.authentication import Authenticator, revoked
from fedpress_server.identity.enrolment import former
from fedpress_server.storage import identities
from fedpress_server.storage.database import Database
from fedpress_server.storage.identities import FormerKey
from fedpress_server.storage.records import Approval, Device


class DeviceRegistry:
    """Operators' decisions about devices, and key rotation by devices."""

    def __init__(self, gate: Authenticator, database: Database, clock: Callable[[], float]) -> None:
        self._gate = gate
        self._database = database
        self._clock = clock

    async def device(self, client_id: str) -> tuple[Device, list[FormerKey]]:
        """A device with its former keys; raises NotFound."""

        def read(connection: Connection) -> tuple[Device, list[FormerKey]]:
            return _known(connection, client_id), identities.former_of(connection, client_id)

        return await self._database.read(read)

    async def devices(
        self, state: DeviceState | None, after: str | None, limit: int
    ) -> list[Device]:
        """Devices in order of enrolment, after the client `after`. Raises NotFound."""

        def read(connection: Connection) -> list[Device]:
            at = None if after is None else _known(connection, after)
            return identities.devices(connection, state, at, limit)

        return await self._database.read(read)

    # Decisions

    async def approve(self, client_id: str, by: str) -> Device:
        """Approve a waiting or rejected device. Raises NotFound; Conflict if revoked."""
        return await self._decide(client_id, "approved", by)

    async def reject(self, client_id: str, by: str) -> Device:
        """Reject a waiting device. Raises NotFound; Conflict if it was approved before."""
        return await self._decide(client_id, "rejected", by)

    async def _decide(self, client_id: str, approval: Approval, by: str) -> Device:
        now = self._clock()

        def write(connection: Connection) -> Device:
            device = _known(connection, client_id)
            if device.revoked_at is not None:
                raise Conflict(
                    f"client {client_id} was revoked, which is final",
                    hint="enrol it again, with a new state directory",
                )
            if device.approval == approval:
                return device
            if device.approval == "approved":
                raise Conflict(f"client {client_id} was approved before", hint="revoke it")
            identities.decide(connection, client_id, approval, now)
            action: audit.Action = (
                "device.approved" if approval == "approved" else "device.rejected"
            )
            audit.add(connection, now, by, action, client_id, key_id=device.key_id)
            self._gate.announce(connection)
            return replace(device, approval=approval, decided_at=now)

        return await self._changed(client_id, write)

    async def revoke(self, client_id: str, by: str) -> Device:
        """Revoke a device; its acknowledged uploads stay."""
        now = self._clock()

        def write(connection: Connection) -> Device:
            device = _known(connection, client_id)
            if device.revoked_at is not None:
                return device
            identities.revoke(connection, client_id, now)
            audit.add(connection, now, by, "device.revoked", client_id, key_id=device.key_id)
            self._gate.announce(connection)
            return replace(device, revoked_at=now)

        return await self._changed(client_id, write)

    async def _changed(self, client_id: str, write: Callable[[Connection], Device]) -> Device:
        """Run `write` and update the authenticator with the changed device, even if the request was
        cancelled or the outcome of the commit is unknown."""

        async def change() -> Device:
            try:
                device = await self._database.write(write)
                failpoints.reach("device-changed")
                return device
            finally:
                await self._gate.look_again(client_id)

        return await asyncio.shield(asyncio.ensure_future(change()))

    # Keys

    async def rotate(self, request: Request, body: RotationRequest) -> Device:
        """Rotate the device to its newest key. Idempotent; the request may be signed by either key.
        Raises errors of the Unauthorized family, those of a device that is not approved,
        MalformedRequest, and AlreadyExists for a key that is or was a device's."""
        links = chain(body.rotations)
        newest = links[-1]
        signer = self._gate.signer_of(request)
        if signer not in (newest.old_id, newest.new_id):
            raise InvalidSignature(
                f"signed by key {signer}, expected the newest key or the previous one"
            )
        keys = [link.old_id for link in links] + [newest.new_id]
        devices = await self._database.read(lambda c: identities.devices_by_key(c, keys))
        if not devices:
            raise await self._gate.stranger(keys[0])
        public_key = newest.new if signer == newest.new_id else newest.old
        content = self._gate.check_key(request, public_key)
        content.check(Content.of(await request.body()))
        await asyncio.to_thread(_check, links)
        now = self._clock()

        def write(connection: Connection) -> Device:
            return self._rotated(connection, links, now)

        return await self._changed(next(iter(devices.values())).client_id, write)

    def _rotated(self, connection: Connection, links: Sequence[Link], now: float) -> Device:
        newest = links[-1]
        keys = [link.old_id for link in links] + [newest.new_id]
        current = identities.devices_by_key(connection, keys)
        past = identities.former_by_key(connection, keys)
        successor = current.get(newest.new_id)
        if successor is not None:
            predecessor = past.get(newest.old_id)
            if predecessor is None or predecessor.client_id != successor.client_id:
                raise _taken(newest.new_id)
            return self._welcome(successor, links)
        index = max((n for n, key in enumerate(keys[:-1]) if key in current), default=None)
        if index is None:
            raise UnknownDevice("none of these keys is the current key of a device")
        device = self._welcome(current[keys[index]], links)
        for link in links[index:]:
            if link.new_id in current or link.new_id in past:
                raise _taken(link.new_id)
        identities.retire_keys(connection, former(tuple(links[index:]), device.client_id, now))
        identities.set_key(connection, device.client_id, newest.new_id, newest.new, now)
        audit.add(
            connection,
            now,
            audit.by_device(device.client_id),
            "device.key-rotated",
            device.client_id,
            keys=keys[index:],
        )
        self._gate.announce(connection)
        return replace(device, key_id=newest.new_id, public_key=newest.new, rotated_at=now)

    def _welcome(self, device: Device, links: Sequence[Link]) -> Device:
        """The device, if these statements allow it to rotate its key."""
        if device.revoked_at is not None:
            raise revoked(device)
        if device.approval != "approved":
            raise self._gate.unapproved(device)
        if links[0].signed.rotation.client_id != device.client_id:
            raise MalformedRequest(
                "the key rotations name another device than the owner of the key"
            )
        return device


def _known(connection: Connection, client_id: str) -> Device:
    device = identities.device(connection, client_id)
    if device is None:
        raise NotFound(f"no client {client_id[:64]!r}")
    return device


def _taken(key_id: str) -> AlreadyExists:
    return AlreadyExists(
        f"key {key_id} is, or was, a device's",
        hint="create a new key: a replaced key is never valid again",
    )


def _check(links: Sequence[Link]) -> None:
    for link in links:
        link.check()
