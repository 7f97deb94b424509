"""The way down under Flower: models on a grid, coded whole or as differences to one that is held.

The wire and the steps are those of fedpress's server (docs/downlink.md). Flower's messages go one
way before a reply comes, so the server remembers which model each node has confirmed, and sends the
difference to that; a node that is new, was away for too long or has lost its files gets the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedpress_compression.tensors import Vector
from fedpress_flower import envelope
from fedpress_flower.server.arrays import moved, num_bytes, record_of
from fedpress_protocols.downlink import decode_model, encode_difference, encode_model
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import DownlinkTerms
from fedpress_protocols.model import Model
from fedpress_strategies.downlink import rounded, stepped

_log = logging.getLogger(__name__)
_ANY_SIZE = 2**62
Reader = tuple[int, str]
"""A node and the kind of message: an app may have our mod around one of its functions alone."""


@dataclass(frozen=True, slots=True)
class _Sent:
    message: Message
    content: RecordDict
    """The content before the model was coded."""
    key: str
    is_whole: bool


@dataclass
class Downlink:
    """The models that clients hold, and the coding of the next one.

    `own` are the strategy's arrays, as if nothing were rounded; what is published is as near to
    them as the terms allow, and the rest is in the difference, from which the next step is taken.
    """

    terms: DownlinkTerms
    task: str
    own: ArrayRecord = field(init=False)
    _model: Model = field(init=False)
    _arrays: Mapping[str, npt.NDArray[Any]] = field(init=False)
    _known: set[str] = field(default_factory=set)
    """The digests of arrays that stand for what is published."""
    _kept: dict[str, bytes] = field(default_factory=dict)
    """The newest models by digest, coded whole, the oldest first."""
    _holding: dict[int, str] = field(default_factory=dict)
    """By node: the digest of the model that it has confirmed last."""
    _readers: set[Reader] = field(default_factory=set)
    _plain: set[Reader] = field(default_factory=set)
    """The clients that read coded models, and those that do not; others are not known yet."""
    _coded: dict[str | None, ArrayRecord] = field(default_factory=dict)
    """The newest model by the base it is coded from; None: whole."""
    _sent: dict[int, _Sent] = field(default_factory=dict)

    def published(self, arrays: ArrayRecord) -> ArrayRecord:
        """The model that clients get where the strategy has come to `arrays`. Starts again with
        arrays that are neither what was published last nor what the run began with.

        Raises ConfigurationError for a model that has no coded form.
        """
        values = {name: array.numpy() for name, array in arrays.items()}
        model = envelope.model_of(values)
        digest = model.digest
        if digest not in self._known:
            self._arrays, self.own = values, arrays
            self._publish(rounded(model, self.terms))
            self._known.add(digest)
        return moved(self._arrays, self._model.spec, self._model.parameters)

    def step(self, own: ArrayRecord) -> ArrayRecord:
        """Go on from the strategy's next model `own`: the model to publish."""
        self.own = own
        target = self._model.spec.flatten({name: array.numpy() for name, array in own.items()})
        self._publish(stepped(self._model, target, self.terms))
        return moved(self._arrays, self._model.spec, self._model.parameters)

    def _publish(self, model: Model) -> None:
        whole = encode_model(model, self.terms.coder)
        self._model, self._coded, self._known = model, {None: _record(whole)}, {model.digest}
        self._kept.pop(model.digest, None)
        self._kept[model.digest] = whole
        while len(self._kept) > self.terms.keep + 1:
            del self._kept[next(iter(self._kept))]

    def send(
        self, messages: list[Message], key: str, beside: Mapping[str, Vector] | None = None
    ) -> None:
        """Put the published model, coded, in the place of the arrays `key` of the messages, but for
        nodes that cannot read it. `beside` are other models [size] by the names of their records,
        which all others get as they are."""
        self._sent = {}
        models, spec = (beside or {}).items(), self._model.spec
        plain = {name: record_of(vector, spec) for name, vector in models}
        coded = {name: self._difference(vector) for name, vector in models}
        for message in messages:
            content = RecordDict({**message.content, **plain})
            reader = (message.metadata.dst_node_id, _kind(message))
            message.content = content
            if reader not in self._plain:
                self._send(message, content, key, coded, base=self._holding.get(reader[0]))

    def _send(
        self,
        message: Message,
        content: RecordDict,
        key: str,
        beside: Mapping[str, ArrayRecord],
        base: str | None,
    ) -> None:
        model, base = self._coded_from(base)
        fields: dict[str, Any] = {
            **content.get(envelope.RECORD, {}),
            envelope.TASK: self.task,
            envelope.CLIENT: str(message.metadata.dst_node_id),
            envelope.ARRAYS: key,
            envelope.DIGEST: self._model.digest,
        }
        if base is not None:
            fields[envelope.BASE] = base
        doubles = [name for name, array in self._arrays.items() if array.dtype.name == "float64"]
        if doubles:
            fields[envelope.DOUBLES] = doubles
        message.content = RecordDict(
            {**content, key: model, **beside, envelope.RECORD: ConfigRecord(fields)}
        )
        self._sent[message.metadata.dst_node_id] = _Sent(message, content, key, base is None)

    def _coded_from(self, base: str | None) -> tuple[ArrayRecord, str | None]:
        """The least that leads to the published model, and from which: the whole where the base is
        not kept, or the difference to it is larger."""
        whole = self._coded[None]
        if base is None or base not in self._kept:
            return whole, None
        if base not in self._coded:
            try:
                before = decode_model(self._kept[base], _ANY_SIZE)
                difference = encode_difference(before, self._model, self.terms.coder)
            except ConfigurationError:  # of another spec, or with other buffers
                difference = None
            if difference is None or len(difference) >= num_bytes(whole):
                self._coded[base] = whole
            else:
                self._coded[base] = _record(difference)
        coded = self._coded[base]
        return coded, None if coded is whole else base

    def _difference(self, vector: Vector) -> ArrayRecord:
        """A published model [size] as the difference to the newest."""
        other = self._model.with_parameters(vector)
        return _record(encode_difference(self._model, other, self.terms.coder))

    def again(self, reply: Message) -> Message | None:
        """Take note of what a node has; the message to send it instead, where it could not read
        what it was sent."""
        node = reply.metadata.src_node_id
        sent = self._sent.pop(node, None)
        if sent is None:
            return None
        reader = (node, _kind(sent.message))
        ours: Any = {} if reply.has_error() else reply.content.get(envelope.RECORD, {})
        holds = ours.get(envelope.HOLDS)
        if isinstance(holds, str):
            self._readers.add(reader)
            self._holding[node] = holds
            if holds or sent.is_whole:
                return None
            _log.info("node %d lacks the model that it held, and is sent the whole", node)
            message = _copy(sent.message)
            beside = {
                name: record
                for name, record in sent.message.content.array_records.items()
                if name != sent.key
            }
            self._send(message, sent.content, sent.key, beside, base=None)
            return message
        if reader in self._readers:
            return None
        self._plain.add(reader)
        if not reply.has_error():
            return None
        _log.info("node %d did not read a coded model, and is sent the arrays", node)
        message = _copy(sent.message)
        message.content = sent.content
        return message


def _record(data: bytes) -> ArrayRecord:
    array = Array("uint8", (len(data),), envelope.MODEL_STYPE, data)
    return ArrayRecord({envelope.MODEL: array})


def _kind(message: Message) -> str:
    return str(message.metadata.message_type).partition(".")[0]


def _copy(message: Message) -> Message:
    """Another message to the same node, of the same type."""
    meta = message.metadata
    return Message(
        message.content,
        meta.dst_node_id,
        meta.message_type,
        ttl=meta.ttl,
        group_id=meta.group_id,
    )
