"""The device's next key: written down, brought in, and only then its own.

    key.pem          the key that signs
    next-key.pem     the one that is to follow it, from before the server hears of it
    rotations.json   every change so far, signed by both keys: the way from the first to this one

A device that dies anywhere in between has both keys, and asks again: the server takes the same
change from either, any number of times. The changes are kept for a server that comes back from a
backup, and knows an earlier key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pydantic import TypeAdapter, ValidationError

from fedpress_client.masking import session_under_way
from fedpress_client.state import StateDirectory, write_durably
from fedpress_client.transport import Transport
from fedpress_protocols.device_keys import signed_rotation
from fedpress_protocols.errors import ConfigurationError, Conflict, StateCorrupt, UnknownDevice
from fedpress_protocols.local_files import replace_file, sync_folder
from fedpress_protocols.messages import MAX_ROTATIONS, RotationRequest, SignedRotation
from fedpress_protocols.signatures import DeviceKey
from fedpress_protocols.validation import format_validation_errors

_ROTATIONS: TypeAdapter[tuple[SignedRotation, ...]] = TypeAdapter(tuple[SignedRotation, ...])
_KEY, _NEXT, _CHAIN = "key.pem", "next-key.pem", "rotations.json"


def is_changing(directory: StateDirectory) -> bool:
    """Whether a change of key was begun, and its end is not known."""
    return (directory.path / _NEXT).exists()


def rotations(directory: StateDirectory) -> tuple[SignedRotation, ...]:
    """Every change of key so far, in order; raises StateCorrupt."""
    path = directory.path / _CHAIN
    if not path.exists():
        return ()
    try:
        return _ROTATIONS.validate_json(path.read_bytes())
    except ValidationError as exc:
        raise StateCorrupt(
            f"{path}: {format_validation_errors(exc)}",
            hint="restore it, or remove it: it is needed only where a server loses its records",
        ) from exc


def change_key(directory: StateDirectory, transport: Transport) -> DeviceKey:
    """Have the server know the device by a new key, or by the one whose change was begun.

    When this returns, the new key is the device's own and signs what `transport` sends; the old one
    is refused from then on. Whatever it raises, one of the two is good, and to call it again ends
    the same change. Raises Conflict while the device takes part in a masked session, whose other
    members know it by the old key, StateLocked if another process may be about to, and what the
    server refuses.
    """
    with directory.alone(), _out_of_sessions(directory):
        identity = directory.identity()
        if identity is None:
            raise ConfigurationError(
                "this device is not enrolled", hint="a key that no server knows needs no change"
            )
        key = _load(directory, _KEY)
        before = rotations(directory)
        if not is_changing(directory):
            if len(before) >= MAX_ROTATIONS:
                raise ConfigurationError(
                    f"this device has changed its key {len(before)} times, which is the most",
                    hint="enrol it anew, with an empty state directory",
                )
            write_durably(directory.path / _NEXT, DeviceKey.generate().to_pem())
        following = _load(directory, _NEXT)
        change = signed_rotation(identity.client_id, key, following)
        chain = before if change in before[-1:] else (*before, change)
        transport.use_key(key)
        answer = transport.rotate(RotationRequest(rotations=chain))
        if (answer.client_id, answer.key_id) != (identity.client_id, following.key_id):
            raise Conflict(
                f"the server knows client {answer.client_id} by key {answer.key_id}, due were "
                f"{identity.client_id} and {following.key_id}"
            )
        write_durably(directory.path / _CHAIN, _ROTATIONS.dump_json(chain))
        replace_file(directory.path / _NEXT, directory.path / _KEY)
        sync_folder(directory.path)
        transport.use_key(following)
    return following


def is_known_after(directory: StateDirectory, transport: Transport) -> bool:
    """Whether a server that knew an earlier key of this device knows the one of today now."""
    chain = rotations(directory)
    if not chain:
        return False
    try:
        transport.rotate(RotationRequest(rotations=chain))
    except UnknownDevice:
        return False
    return True


def _load(directory: StateDirectory, name: str) -> DeviceKey:
    path = directory.path / name
    try:
        return DeviceKey.from_pem(path.read_bytes())
    except ConfigurationError as exc:
        raise StateCorrupt(f"{path}: {exc.detail}", hint="restore it") from exc


@contextmanager
def _out_of_sessions(directory: StateDirectory) -> Iterator[None]:
    """While no process of this device can enter a masked session."""
    with ExitStack() as stack:
        for path in sorted((directory.path / "tasks").glob("*/session")):
            files = directory.task(path.parent.name)
            stack.callback(files.close)
            assignment = session_under_way(files)
            if assignment is not None:
                raise Conflict(
                    f"this device is in a masked session, for assignment {assignment} of task "
                    f"{path.parent.name!r}, whose members know it by its key",
                    hint="let it take part until that round has ended, then change the key",
                )
        yield
