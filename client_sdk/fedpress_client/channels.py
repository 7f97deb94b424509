"""Channels from an update to the body of an upload: the plan's bounds, and coding or rounding.

Each channel takes the place of the compressor whose symbols are sent, see `Compressor.send`: error
feedback around it then counts as sent what the server decodes, and nothing else.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedpress_compression import kernels
from fedpress_compression.coding.fields import Symbols
from fedpress_compression.compressor import Compressor, Public, check_values
from fedpress_compression.compressors.error_feedback import compress_sum
from fedpress_compression.contexts import contexts_of
from fedpress_compression.linear import support_of
from fedpress_compression.tensors import Vector
from fedpress_compression.update import Piece, Update
from fedpress_protocols.errors import InvalidUpdate
from fedpress_protocols.masking.payload import SECRET_BYTES, Payload
from fedpress_protocols.plan import PrivacyTerms, RoundPlan
from fedpress_protocols.privacy.grid import Grid
from fedpress_protocols.upload import Upload

Sections = Callable[[bytes], None]
_TRIES = 16
"""Of scaling an update down until what is sent of it is within the clip."""


class Channel:
    """A channel that has carried one update; `body` is what is sent, `sent` what it stands for."""

    body: bytes = b""
    sent: Update

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        return self.sent


@dataclass(slots=True)
class ClearChannel(Channel):
    """Compress by `lossy` within the plan's `max_abs`, encode, and decode again as the server does.

    `sections` receives the body section by section, each once it is coded.
    """

    lossy: Compressor[Any]
    plan: RoundPlan
    profile: str
    num_examples: int
    report: tuple[float, ...]
    sections: Sections | None = None
    sketch: bytes = b""
    body: bytes = field(default=b"", init=False)
    sent: Update = field(init=False)

    def compress(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        within = clipped(update, self.plan)
        symbols, after = self.lossy.compress(within, state, public, rng)
        return self._encoded(symbols, public), after

    def compress_sum(
        self,
        update: Vector,
        other: Vector,
        state: Any,
        public: Public,
        rng: np.random.Generator,
    ) -> tuple[Vector, Symbols, Any]:
        total, symbols, after = compress_sum(self.lossy, update, other, state, public, rng)
        if (within := clipped(total, self.plan)) is not total:
            symbols, after = self.lossy.compress(within, state, public, rng)
        return total, self._encoded(symbols, public), after

    def _encoded(self, symbols: Symbols, public: Public) -> Symbols:
        index = self.plan.profile_index(self.profile)
        layout = self.lossy.layout(public.spec)
        contexts = contexts_of(layout, public)
        upload = Upload(index, self.num_examples, symbols, self.report, self.sketch)
        coded = []
        for section in upload.sections(layout, contexts):
            if self.sections is not None:
                self.sections(section)
            coded.append(section)
        self.body = b"".join(coded)
        layouts = tuple(each.compressor.layout(public.spec) for each in self.plan.profiles)
        received = Upload.from_bytes(
            self.body, layouts, index, contexts, self.plan.report, self.plan.sketch
        )
        self.sent = self.lossy.decompress(received.symbols, public)
        return received.symbols


@dataclass(slots=True)
class PrivateChannel(Channel):
    """Bound the norm of what the clear channel sends, or those of its tensors, by the plan's terms.

    In the central lane that holds for the values that the server decodes: what is beyond its bound,
    the update or a tensor, is scaled down, and all compressed again; the body of an adaptive clip
    says so.
    In the local lane the numbers are clipped and noised before they are compressed, and `sent` has
    them without noise. `clear` must have no `sections`: what it makes first may not be what is
    sent.
    """

    clear: ClearChannel
    terms: PrivacyTerms
    body: bytes = field(default=b"", init=False)
    sent: Update = field(init=False)

    def compress(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        check_values(update)
        if self.terms.lane == "local":
            return self._noised(update, state, public, rng)
        terms, bounds = self.terms, self.terms.bounds(public.spec)
        factors = np.ones(bounds.clips.size)
        is_within = self._peak(update, public) <= terms.clip  # the channel cuts single values off
        update = clipped(update, self.clear.plan)  # scaling what would be cut off has no effect
        for attempt in range(_TRIES):
            if terms.adaptive is not None:
                self.clear.report = (float(is_within),)
            within = bounds.scaled(update, factors)
            symbols, after = self.clear.compress(within, state, public, rng)
            norms = bounds.norms(self.clear.sent)
            is_beyond = norms > bounds.clips
            if not is_beyond.any():
                self.body, self.sent = self.clear.body, self.clear.sent
                return symbols, after
            is_within = False
            # Ever further, or values that are rounded to few steps would stay where they are.
            shrunk = min(0.999, 1 - attempt / 25) * bounds.clips[is_beyond] / norms[is_beyond]
            if attempt < _TRIES // 2:
                factors[is_beyond] *= shrunk
            else:
                factors *= shrunk.min()  # some compressors spread a tensor's values over others
            if terms.adaptive is not None and attempt == _TRIES - 2:
                factors[:] = 0.0  # below what can be sent: the bit raises the clip, the rest stays
        raise InvalidUpdate(
            f"compressed again and again, {bounds.excess(self.clear.sent)}",
            hint="choose a compressor that rounds less, with more bits or a smaller clip of its "
            "own, or raise privacy.clip",
        )

    def _peak(self, update: Vector, public: Public) -> float:
        """The largest magnitude at the coordinates that are sent."""
        support = support_of(self.clear.lossy, public)
        return float(kernels.peak(update if support is None else update[support]))

    def _noised(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        support = support_of(self.clear.lossy, public)
        where = slice(0, update.size) if support is None else support
        numbers = update[where].astype(np.float64)
        terms = self.terms
        grid = Grid(numbers.size, terms.clip, terms.noise_multiplier, 1, is_gaussian=True)
        plain = grid.rounded(numbers, os.urandom(SECRET_BYTES))
        noise = grid.noise(os.urandom(SECRET_BYTES))
        noised = np.zeros(update.size, np.float32)
        noised[where] = (plain + noise) * grid.step
        symbols, after = self.clear.compress(noised, state, public, rng)
        self.body = self.clear.body
        values = (plain * grid.step).astype(np.float32)
        self.sent = Update(update.size, (Piece(where, values),))
        return symbols, after


@dataclass(slots=True)
class MaskedChannel(Channel):
    """Round to the integers that are to be masked, by `secret` (SECRET_BYTES used once) or the
    system's randomness."""

    payload: Payload
    plan: RoundPlan
    num_examples: int
    report: Mapping[str, float]
    secret: bytes | None = None
    body: bytes = field(default=b"", init=False)
    sent: Update = field(init=False)

    def compress(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        secret = secrets.token_bytes(SECRET_BYTES) if self.secret is None else self.secret
        within = clipped(update, self.plan)
        compressed = self.payload.compress(within, self.num_examples, self.report, secret)
        self.body = self.payload.packing.to_bytes(self.payload.packing.pack(compressed.integers))
        self.sent = compressed.update
        return (), None


class ClosedChannel(Channel):
    """Nothing gets through: all of an update is left."""

    def compress(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        self.sent = Update(update.size, ())
        return (), None


def clipped(update: Vector, plan: RoundPlan) -> Vector:
    """`update` within the plan's `max_abs`; itself where it is. Raises InvalidUpdate on NaN or
    infinity."""
    limit = np.float32(plan.fixed_point.max_abs)
    if kernels.peak(update) <= limit:
        return update
    check_values(update)
    return np.clip(update, -limit, limit)
