"""The device's identity towards its server: enrolment, approval, changes of its key."""

from __future__ import annotations

import logging

from fedpress_client.answers import finite
from fedpress_client.device_key import change_key, is_changing, is_known_after, rotations
from fedpress_client.events import (
    ApprovalPending,
    DeviceApproved,
    DeviceEnrolled,
    EventLog,
    KeyRotated,
)
from fedpress_client.server_trust import ServerTrust, pinned_anew
from fedpress_client.settings import ClientSettings, Services
from fedpress_client.state import Identity, StateDirectory
from fedpress_client.transport import MAX_RETRY_AFTER, Transport
from fedpress_protocols.errors import (
    DeviceNotApproved,
    FedpressError,
    InvalidToken,
    UnknownDevice,
)
from fedpress_protocols.messages import EnrolRequest
from fedpress_protocols.signatures import DeviceKey, from_base64url, to_base64url

_log = logging.getLogger(__name__)

_APPROVAL_PAUSE = 30.0


class Enrolment:
    """Identity and key of one device; `key` signs what `services.transport` sends."""

    def __init__(self, services: Services, key: DeviceKey, url: str, token: str | None) -> None:
        self._settings: ClientSettings = services.settings
        self._directory: StateDirectory = services.directory
        self._transport: Transport = services.transport
        self._events: EventLog = services.events
        self._url, self._token = url, token
        self.key = key
        self._is_unapproved = False

    @property
    def key_id(self) -> str:
        return self.key.key_id

    def identity(self) -> Identity:
        """Enrol if need be, pin the server's key if one was named, end a change of key."""
        identity = self._pinned(self._directory.identity())
        if identity is not None:
            self._end_key_change()
            return identity
        identity = self.identify(self._transport)
        identity = self._pinned(identity) or identity
        self._events.emit(DeviceEnrolled(client_id=identity.client_id, key_id=self.key_id))
        return identity

    def identify(self, transport: Transport) -> Identity:
        """The device's identity; enrols by `transport` if it has none. Raises InvalidToken."""
        with self._directory.alone():
            identity = self._directory.identity()
            if identity is not None:
                return identity
            if self._token is None:
                raise InvalidToken(
                    "this device is not enrolled and has no token",
                    hint="ask the operator for an enrolment token",
                )
            answer = transport.enrol(self._token, self._request())
            identity = Identity(
                url=self._url, client_id=answer.client_id, server_key=answer.server_key
            )
            self._directory.enrolled(identity)
        return identity

    def trust(self, identity: Identity) -> ServerTrust:
        """The keys that this device believes to be the server's."""
        return ServerTrust(self._directory, identity, self._transport, self._settings.clock)

    # Changes of the device's key

    def rotate_key(self) -> None:
        """See `Client.rotate_key`."""
        if self._directory.identity() is None:
            self.identity()
        self._use(change_key(self._directory, self._transport))

    def become_known(self, refusal: UnknownDevice) -> None:
        """Recover from a key that the server does not know: another process may have changed it, or
        the server came back from a backup of before the change, or of before the enrolment. Raises
        UnknownDevice where there is no token, or the server knows the key as another device."""
        old_key_id = self.key_id
        if self._follow_key():
            return
        self._end_key_change()
        if self.key_id == old_key_id and not is_known_after(self._directory, self._transport):
            self._enrol_again(refusal)

    def _end_key_change(self) -> None:
        """Bring in the key whose change was begun; where it cannot be now, the old one goes on."""
        if is_changing(self._directory):
            try:
                self._use(change_key(self._directory, self._transport))
            except FedpressError as exc:
                _log.warning("the change of this device's key is not at its end: %s", exc)

    def _follow_key(self) -> bool:
        """Use the key that another process of this device has brought in; False if none has."""
        key = self._directory.key()
        if key.key_id == self.key_id:
            return False
        self._use(key)
        return True

    def _use(self, key: DeviceKey) -> None:
        self.key = key
        self._transport.use_key(key)
        self._events.emit(KeyRotated(key_id=key.key_id))

    def _enrol_again(self, refusal: UnknownDevice) -> None:
        """Enrol at a server that came back from a backup of before the enrolment: the same key has
        the same client id."""
        identity = self.identity()
        if self._token is None:
            raise UnknownDevice(
                f"the server does not know this device any more: {refusal.detail}",
                hint="ask the operator for an enrolment token, and give it to the client",
            ) from refusal
        request = self._request().model_copy(update={"rotations": rotations(self._directory)})
        answer = self._transport.enrol(self._token, request)
        is_same_server = self.trust(identity).believes(from_base64url(answer.server_key, 32))
        if answer.client_id != identity.client_id or not is_same_server:
            raise UnknownDevice(
                f"the server knows this device as {answer.client_id}, and it has been "
                f"{identity.client_id}",
                hint="is it the server that it enrolled with?",
            )
        self._events.emit(DeviceEnrolled(client_id=identity.client_id, key_id=self.key_id))

    def _request(self) -> EnrolRequest:
        return EnrolRequest(public_key=to_base64url(self.key.public), name=self._settings.name)

    def _pinned(self, identity: Identity | None) -> Identity | None:
        """`identity` with the server's key that the settings name, if they name one."""
        server_key = self._settings.server_key
        if identity is None or server_key is None:
            return identity
        return pinned_anew(self._directory, identity, server_key, self._transport)

    # Approval

    def await_approval(self, refusal: DeviceNotApproved) -> float:
        """The seconds until it is worth asking again; that the device waits is reported once."""
        if not self._is_unapproved:
            self._is_unapproved = True
            _log.warning("waiting for an operator to approve this device, key %s", self.key_id)
            self._events.emit(ApprovalPending(key_id=self.key_id))
        after = finite(refusal.members.get("retry_after"))
        return min(after, MAX_RETRY_AFTER) if after is not None and after > 0 else _APPROVAL_PAUSE

    def approved(self) -> None:
        """Report an approval that the device had to wait for."""
        if self._is_unapproved:
            self._is_unapproved = False
            self._events.emit(DeviceApproved())
