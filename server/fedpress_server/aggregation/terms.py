"""A plan with the model and the artefacts that it names: enough to read any upload."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from fedpress_compression import activity
from fedpress_compression.coding import Found
from fedpress_compression.coding.fields import Contexts, Layout
from fedpress_compression.compressor import Knowledge, Public
from fedpress_compression.contexts import contexts_of
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update
from fedpress_protocols.errors import InvalidUpdate, ServerError
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.model import Model
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.privacy.clipping import Bounds
from fedpress_protocols.upload import Upload
from fedpress_server.storage.files import (
    artefact_name,
    base_name,
    model_name,
)
from fedpress_server.storage.payloads import Payloads
from fedpress_strategies.strategy import (
    Report,
)


@dataclass(frozen=True)
class RoundTerms:
    """A plan with the spec of its model and the place of the models it names: enough to read any
    upload. What is derived is made once, in the thread that asks first."""

    plan: RoundPlan
    spec: ModelSpec
    payloads: Payloads
    bases: Mapping[str, str] = field(default_factory=dict)
    """By client: the digest of what its last included upload stood for, where the plan reads it."""

    @cached_property
    def shared(self) -> ModelSpec:
        """The tensors that uploads are over."""
        return self.plan.shared(self.spec)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        return self.plan.layouts(self.spec)

    @cached_property
    def public(self) -> Public:
        values: dict[Knowledge, Vector] = {
            kind: self._map(digest) if kind == "activity" else self.since(digest)
            for kind, digest in self.plan.sources.items()
        }
        return self.plan.public(self.spec, values)

    @cached_property
    def bounds(self) -> Bounds | None:
        """On the norms of uploads that the server adds noise to; None where it adds none. Raises
        IncompatiblePlan where the terms do not fit the model."""
        terms = self.plan.privacy
        return None if terms is None or terms.lane != "central" else terms.bounds(self.shared)

    @cached_property
    def payload(self) -> Payload:
        """Of a plan of the masked lane."""
        return Payload(self.plan, self.public)

    @cached_property
    def contexts(self) -> tuple[Contexts, ...]:
        """Those of each profile's layout."""
        return tuple(contexts_of(layout, self.public) for layout in self.layouts)

    def since(self, earlier: str | None) -> Vector:
        """The plan's model less an `earlier` one, in float32, as the device subtracts them."""
        if earlier is None or earlier == self.plan.model:
            return np.zeros(self.shared.size, np.float32)
        after, before = (
            Model.from_bytes(self.payloads.get(model_name(digest))).parameters
            for digest in (self.plan.model, earlier)
        )
        return self.spec.part(after - before, self.shared)

    def _map(self, digest: str | None) -> Vector:
        if digest is None:  # the first round
            return np.zeros(self.shared.size, np.float32)
        return activity.from_bytes(self.payloads.get(artefact_name(digest)), self.shared)

    def known_to(self, client_id: str) -> Public:
        """Return what the server and this client share; `public` where no profile reads more."""
        if "own" not in self.plan.needs:
            return self.public
        own, digest = np.zeros(self.shared.size, np.float32), self.bases.get(client_id)
        if digest is not None:
            name = base_name(self.plan.task, client_id, digest)
            data = self.payloads.get(name)
            if hashlib.sha256(data).hexdigest() != digest:
                raise ServerError(f"{name} was changed on the disk")
            own = np.frombuffer(data, "<f4").astype(np.float32)
        return replace(self.public, knowledge={**self.public.knowledge, "own": own})

    def keep_base(self, client_id: str, update: Update) -> str:
        """Store the update that a client's included upload decodes to; returns its digest."""
        data = update.dense().astype("<f4").tobytes()
        digest = hashlib.sha256(data).hexdigest()
        self.payloads.put(base_name(self.plan.task, client_id, digest), data)
        return digest

    def profile(self, index: int, requested: str | None = None) -> str:
        """The profile of the assignment at `index`: `requested`, if the plan has it; else the
        plan's profiles take turns."""
        names = [each.name for each in self.plan.profiles]
        return requested if requested in names else names[index % len(names)]

    def read(self, body: bytes, profile: str) -> Upload:
        """The symbols in `body` and the number of examples, as the plan allows them.

        Raises InvalidUpdate, DecodingError among it, or WireVersionMismatch.
        """
        index = self.plan.profile_index(profile)
        plan = self.plan
        upload = Upload.from_bytes(
            body, self.layouts, index, self.contexts[index], plan.report, plan.sketch
        )
        self._check(upload.num_examples)
        return upload

    def fields(self, body: bytes, profile: str) -> tuple[Found, int, Report]:
        """Return the fields that `decode_add` takes, the number of examples and the report; raises
        as `read` does."""
        index, names = self.plan.profile_index(profile), self.plan.report
        num_examples, values, fields = Upload.find(
            body, self.layouts, index, self.contexts[index], names, self.plan.sketch
        )
        self._check(num_examples)
        return fields, num_examples, dict(zip(names, values, strict=True))

    def _check(self, num_examples: int) -> None:
        maximum = self.plan.fixed_point.max_examples
        if num_examples > maximum:
            raise InvalidUpdate(f"num_examples is {num_examples}, expected at most {maximum}")

    def _check_norm(self, update: Update) -> None:
        if self.bounds is not None:
            self.bounds.check(update)

    def decoded(self, body: bytes, profile: str, client_id: str) -> tuple[Update, int, Report]:
        """The update in `body`, its number of examples and what is reported, within the plan's
        bounds; raises as `read` does."""
        upload = self.read(body, profile)
        update = self.updated(upload, profile, client_id)
        return update, upload.num_examples, dict(zip(self.plan.report, upload.report, strict=True))

    def updated(self, upload: Upload, profile: str, client_id: str) -> Update:
        """The update of an `upload` as it was read; InvalidUpdate beyond the plan's bounds."""
        with np.errstate(over="ignore", invalid="ignore"):  # forged values; check refuses them
            symbols, public = upload.symbols, self.known_to(client_id)
            update = self.plan.compressor(profile).decompress(symbols, public)
            update.check(self.plan.fixed_point.max_abs)
        self._check_norm(update)
        return update
