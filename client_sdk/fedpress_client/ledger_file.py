"""A ledger as one file: safetensors, with everything but the arrays as JSON in its metadata."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import safetensors
from safetensors.numpy import load as load_arrays

from fedpress_client.ledger_records import Discard, Included, Pending
from fedpress_compression.plain_states import State
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Piece, Update
from fedpress_protocols.errors import StateCorrupt

if TYPE_CHECKING:
    from fedpress_client.ledger import Ledger

FORMAT = 2
_METADATA = "fedpress.ledger"
_PERSONAL = "personal."
_FEEDBACK = json.dumps("error_feedback")
"""The name of error feedback's state."""
_DTYPES = {
    np.dtype(kind + str(size)).str: name + str(8 * size)
    for kind, name in (("u", "U"), ("i", "I"), ("f", "F"))
    for size in (1, 2, 4, 8)
    if (kind, size) != ("f", 1)
} | {"|b1": "BOOL"}
"""By numpy's names, safetensors' own."""
_SEAL = re.compile(rb"sha256:[0-9a-f]{64}")
_BLANK = b"sha256:" + b"0" * 64


def parts_of(ledger: Ledger) -> tuple[bytes | memoryview, ...]:
    """The file's bytes, in parts that share memory: an account is as large as its model."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    document = {
        "seal": _BLANK.decode(),
        "format": FORMAT,
        "task": ledger.task,
        "client_id": ledger.client_id,
        "spec": ledger.spec,
        "tensors": None if ledger.tensors is None else ledger.tensors.to_json(),
        "round": ledger.round,
        "counter": ledger.counter,
        "own": None if ledger.own is None else ledger.own[0],
        "included": ledger.included,
        "not_included": ledger.not_included,
        "settled": list(ledger.settled.items()),
        "states": [
            [name, number, _stored(state, f"states.{index}", arrays)]
            for index, (name, (number, state)) in enumerate(ledger.states.items())
        ],
        "pending": [
            {
                "assignment": key,
                "update": _stored_update(upload.update, f"pending.{index}.update", arrays),
                "mark": _stored(upload.mark, f"pending.{index}.mark", arrays),
                **{name: getattr(upload, name) for name in _PENDING_SCALARS},
            }
            for index, (key, upload) in enumerate(ledger.pending.items())
        ],
        "discards": [
            {
                "number": discard.number,
                "reason": discard.reason,
                "assignment": discard.assignment,
                "update": _stored_update(discard.update, f"discards.{index}", arrays),
                "lost_norm": discard.lost_norm,
            }
            for index, discard in enumerate(ledger.discards)
        ],
        "epoch": ledger.epoch,
        "backup_at": ledger.backup_at,
        "kept": [
            {
                "assignment": key,
                "update": None
                if each.update is None
                else _stored_update(each.update, f"kept.{index}", arrays),
                **{name: getattr(each, name) for name in _INCLUDED_SCALARS},
            }
            for index, (key, each) in enumerate(ledger.kept.items())
        ],
    }
    for index, upload in enumerate(ledger.pending.values()):
        arrays[f"pending.{index}.body"] = np.frombuffer(upload.body, np.uint8)
    if ledger.residual is not None:
        arrays["residual"] = ledger.residual
    if ledger.control is not None:
        arrays["control"] = ledger.control
    if ledger.own is not None:
        arrays["own"] = ledger.own[1]
    arrays |= {_PERSONAL + name: values for name, values in ledger.personal.items()}
    header, values = _header({_METADATA: json.dumps(document)}, arrays)
    digest = hashlib.sha256(header)
    for part in values:
        digest.update(part)
    start = _seal_of(header)
    seal = b"sha256:" + digest.hexdigest().encode()
    return header[:start], seal, header[start + len(seal) :], *values


def _header(
    metadata: Mapping[str, str], arrays: Mapping[str, npt.NDArray[Any]]
) -> tuple[bytes, list[memoryview]]:
    """The header of a safetensors file and what follows it, without a copy of any array: the
    library's own `save` makes two."""
    names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))  # so all are aligned
    described: dict[str, Any] = {"__metadata__": metadata}
    values, end = list[memoryview](), 0
    for name in names:
        array = np.ascontiguousarray(arrays[name])
        begin, end = end, end + array.nbytes
        described[name] = {
            "dtype": _DTYPES[array.dtype.str],
            "shape": arrays[name].shape,
            "data_offsets": [begin, end],
        }
        values.append(array.reshape(-1).view(np.uint8).data)
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, values


def fields_of(data: bytes) -> dict[str, Any]:
    """The fields of the ledger whose `to_bytes` are `data`; raises StateCorrupt for anything
    else."""
    try:
        start = _seal_of(data)
        stop = start + len(_BLANK)
        digest = hashlib.sha256(data[:start])
        digest.update(_BLANK)
        digest.update(memoryview(data)[stop:])
        if data[start:stop] != b"sha256:" + digest.hexdigest().encode():
            raise StateCorrupt("its bytes do not match their SHA-256")
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        document = json.loads(header["__metadata__"][_METADATA])
        arrays = load_arrays(data)
        if document["format"] == 1:
            _renew(document, arrays)
        elif document["format"] != FORMAT:
            raise StateCorrupt(
                f"its format is {document['format']}, this release reads 1 to {FORMAT}",
                hint="run the release of fedpress that wrote it, or a newer one",
            )
        return _parsed(document, arrays)
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as exc:
        raise StateCorrupt(f"not a ledger: {exc!r}") from exc


def _renew(document: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Bring a document of format 1 to this one.

    There a residual, and dgc's velocity, stood apart from states, which were known by the inner
    compressor alone. Which profile such a state is of cannot be seen, so it is kept for either.
    """
    inner = {name: state for name, _, state in document["states"]}
    velocity = {"array": "velocity"} if "velocity" in arrays else None
    if inner or velocity or "residual" in arrays:
        feedback = [None, {"map": inner}, document["round"], velocity, None]
        document["states"].append([_FEEDBACK, 0, feedback])
    for item in document["pending"]:
        name, state = item["compressor"], item.pop("state")
        item["compressor"] = ""
        if item.pop("stills", False):
            item["compressor"] = json.dumps({"id": "dgc", "inner": {"id": "none"}})
        item["state_name"] = _FEEDBACK if item["feedback"] else name
        if item["feedback"] and state is not None:
            state = {"map": {"name": name, "state": state}}
        item["mark"] = state
    for item in document.get("kept", ()):
        item["compressor"], item["state_name"] = "", _FEEDBACK if item["feedback"] else ""


def _parsed(document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    tensors = document.get("tensors")
    return {
        "task": document["task"],
        "client_id": document["client_id"],
        "spec": document["spec"],
        "tensors": None if tensors is None else ModelSpec.from_json(tensors),
        "round": document["round"],
        "residual": arrays.get("residual"),
        "control": arrays.get("control"),
        "own": (document["own"], arrays["own"]) if "own" in arrays else None,
        "personal": {
            name.removeprefix(_PERSONAL): array
            for name, array in arrays.items()
            if name.startswith(_PERSONAL)
        },
        "states": {
            name: (number, _loaded(state, arrays)) for name, number, state in document["states"]
        },
        "pending": {
            item["assignment"]: Pending(
                body=arrays[f"pending.{index}.body"].tobytes(),
                update=_loaded_update(item["update"], arrays),
                mark=_loaded(item["mark"], arrays),
                **{name: item[name] for name in _PENDING_SCALARS if name in item},
            )
            for index, item in enumerate(document["pending"])
        },
        "settled": dict(document["settled"]),
        "discards": tuple(
            Discard(
                item["number"],
                item["reason"],
                item["assignment"],
                _loaded_update(item["update"], arrays),
                item.get("lost_norm"),
            )
            for item in document["discards"]
        ),
        "counter": document["counter"],
        "included": document["included"],
        "not_included": document["not_included"],
        "epoch": document.get("epoch"),
        "backup_at": document.get("backup_at"),
        "kept": {
            item["assignment"]: Included(
                update=item["update"] and _loaded_update(item["update"], arrays),
                **{name: item[name] for name in _INCLUDED_SCALARS},
            )
            for item in document.get("kept", ())
        },
    }


_PENDING_SCALARS = (
    "num_examples",
    "round",
    "attempt",
    "model",
    "spec",
    "profile",
    "feedback",
    "compressor",
    "state_name",
    "number",
    "control",
    "is_base",
    "report",
    "lane",
    "session",
)


_INCLUDED_SCALARS = (
    "norm",
    "round",
    "attempt",
    "model",
    "issued_at",
    "epoch",
    "spec",
    "feedback",
    "number",
    "control",
    "compressor",
    "state_name",
)


def _seal_of(data: bytes) -> int:
    """The offset of the file's own SHA-256; raises ValueError if its header has none."""
    match = _SEAL.search(data, 8, 8 + int.from_bytes(data[:8], "little"))
    if match is None:
        raise ValueError("it has no SHA-256 of itself")
    return match.start()


def _stored(plain: State, name: str, arrays: dict[str, npt.NDArray[Any]]) -> Any:
    match plain:
        case np.ndarray():
            arrays[name] = np.ascontiguousarray(plain).reshape(plain.shape)
            return {"array": name}
        case dict():
            items = {key: _stored(item, f"{name}.{key}", arrays) for key, item in plain.items()}
            return {"map": items}
        case list():
            return [_stored(item, f"{name}.{index}", arrays) for index, item in enumerate(plain)]
        case _:
            return plain


def _loaded(stored: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> State:
    match stored:
        case {"array": name}:
            return arrays[name]
        case {"map": items}:
            return {key: _loaded(item, arrays) for key, item in items.items()}
        case list():
            return [_loaded(item, arrays) for item in stored]
        case _:
            return stored


def _stored_update(update: Update, name: str, arrays: dict[str, npt.NDArray[Any]]) -> Any:
    pieces = []
    for index, piece in enumerate(update.pieces):
        arrays[f"{name}.{index}.values"] = np.ascontiguousarray(piece.values)
        if isinstance(piece.where, slice):
            pieces.append([piece.where.start, piece.where.stop])
        else:
            arrays[f"{name}.{index}.where"] = np.ascontiguousarray(piece.where)
            pieces.append([])
    return {"size": update.size, "pieces": pieces, "name": name}


def _loaded_update(stored: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Update:
    pieces = []
    for index, bounds in enumerate(stored["pieces"]):
        name = f"{stored['name']}.{index}"
        where = slice(*bounds) if bounds else arrays[f"{name}.where"]
        pieces.append(Piece(where, cast(Vector, arrays[f"{name}.values"])))
    return Update(stored["size"], tuple(pieces))
