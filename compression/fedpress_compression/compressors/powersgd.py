"""PowerSGD (Vogels et al. 2019, arXiv:1905.13727, Algorithm 1): one step of a power iteration that
goes on from round to round.

As published it takes two trips: all send P_i = M_i Q, all receive an orthonormal basis of the mean
P, all send M_i^T P, and what comes out is the mean update projected on P. `two_trips` is that, for
a group in one process, and `PowerSGD(trips=2)` between a server and devices, where it is a second
wait for the slowest. With one trip a device sends both factors of its own update at once, and goes
on from its own last right factor. That is not linear: for sums under masks, see
`powersgd_onesided`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedpress_compression.coding.fields import Layout, Reals, Symbols
from fedpress_compression.compressor import (
    Compressor,
    Knowledge,
    Properties,
    Public,
    Stateful,
    check_finite,
    check_inner,
    compressor,
    properties,
)
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.matrices import (
    Matrix,
    View,
    in_range,
    orthonormal,
    product,
    public_basis,
    views,
)
from fedpress_compression.randomness import PublicStream
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Piece, Update
from fedpress_compression.values import LARGEST, check_positive, check_whole

_DEAD = 1e-9


class Warm(NamedTuple):
    """The right factors [columns, rank] of the last upload that was included, for each matrix, and
    the state of `rest`; zeros before the first."""

    rights: tuple[Matrix, ...]
    rest: Any


@compressor("powersgd")
@dataclass(frozen=True, slots=True)
class PowerSGD(Stateful):
    """Each matrix M as P Q^T: P orthonormal from M times the last Q, Q = M^T P, of `rank` columns.

    Columns of the last Q that are all but zero are drawn anew. Numbers are sent in `width` bytes,
    4 as published, the columns of P and Q in units of their largest magnitude. A tensor is factored
    if that makes it smaller than a `min_compression_rate`-th in numbers; the others go to `rest`
    together. Meant for error feedback, as in the paper. `lowrank` sends it in few bits.

    With two `trips`, Q is an orthonormal basis that both ends derive of the model's last step, the
    devices of a round send M Q, and the server publishes the basis P of their mean; then each sends
    M^T P for the very same M, and the others' part. What an upload stands for is M projected on P,
    so the mean over those who send it is exact, whoever else has helped to find P. Whatever the
    strategy did to the step, P is a basis, if perhaps not the best.
    """

    rank: int = 2
    width: Literal[2, 4] = 4
    min_compression_rate: float = 2.0
    rest: Compressor[Any] = field(default_factory=Uncompressed)
    trips: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, 1, 256)
        if self.width not in (2, 4):
            raise ValueError(f"width is 2 or 4 bytes, not {self.width}")
        check_positive("min_compression_rate", self.min_compression_rate)
        check_whole("trips", self.trips, 1, 2)
        check_inner(self.rest, "powersgd")

    @property
    def commutes_with_sum(self) -> bool:
        return False

    @property
    def needs(self) -> frozenset[Knowledge]:
        between: frozenset[Knowledge] = frozenset({"previous", "basis"} if self.trips == 2 else ())
        return self.rest.needs | between

    @property
    def properties(self) -> Properties:
        is_apart, rest = self.trips == 2, properties(self.rest)
        return Properties(
            rate="8 * width * rank * (rows + columns) / (rows * columns)",
            non_expansive=rest.suits_feedback,
            contracts_with=rest.contracts_with,
            client_state="its update, between trips" if is_apart else "right factors",
            server_state="previous model" if is_apart else rest.server_state,
            source="Vogels et al. 2019, Algorithm 1",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        matrices, others = self._views(spec)
        factors = (
            *(self.first_layout(spec)[:1] if self.trips == 1 else ()),
            Reals(sum(view.columns * view.rank for view in matrices), self.width),
            Reals(sum(view.rank for view in matrices)),
        )
        return (*factors, *(self.rest.layout(spec.select(others)) if others else ()))

    def first_layout(self, spec: ModelSpec) -> Layout:
        """Of what the first of two trips carries."""
        matrices, _ = self._views(spec)
        numbers = Reals(sum(view.rows * view.rank for view in matrices), self.width)
        return numbers, Reals(sum(view.rank for view in matrices))

    def init(self, spec: ModelSpec) -> Warm:
        matrices, others = self._views(spec)
        kept = matrices if self.trips == 1 else ()
        rights = tuple(np.zeros((view.columns, view.rank)) for view in kept)
        return Warm(rights, self.rest.init(spec.select(others)) if others else None)

    def compress(
        self, update: Vector, state: Warm, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Warm]:
        check_finite(update, public.spec)
        matrices, others = self._views(public.spec)
        symbols: Symbols
        warm: tuple[Matrix, ...] = ()
        if self.trips == 2:
            lefts = self._columns(public.known("basis"), matrices)
            pairs = zip(matrices, lefts, strict=True)
            symbols = self._packed([_second_factor(view.of(update), left) for view, left in pairs])
        else:
            symbols, warm = self._both_factors(update, matrices, state.rights, rng)
        rest = state.rest
        if others:
            part = np.concatenate([update[public.spec.slices[name]] for name in others])
            told, rest = self.rest.compress(part, rest, public.part(others), rng)
            symbols = (*symbols, *told)
        return symbols, Warm(warm, rest)

    def _both_factors(
        self,
        update: Vector,
        matrices: Sequence[View],
        last_rights: Sequence[Matrix],
        rng: np.random.Generator,
    ) -> tuple[Symbols, tuple[Matrix, ...]]:
        lefts, rights, scales, warm = [_NOTHING], [_NOTHING], [_NOTHING], []
        for view, last in zip(matrices, last_rights, strict=True):
            matrix = view.of(update)
            left = orthonormal(matrix @ orthonormal(revived(last, rng)))
            right = matrix.T @ left
            heights, widths = _largest(left), _largest(right)
            lefts.append((left / heights).T.ravel())
            rights.append((right / widths).T.ravel())
            scales.append(in_range(left / heights, right / widths, heights * widths))
            warm.append(right)
        dtype = np.dtype(f"<f{self.width}")
        symbols = (
            np.concatenate(lefts).astype(dtype),
            np.concatenate(rights).astype(dtype),
            np.concatenate(scales).astype("<f4"),
        )
        return symbols, tuple(warm)

    def first(self, update: Vector, public: Public) -> Symbols:
        """The symbols of the first of two exchanges: M Q for each matrix.

        Raises InvalidUpdate on NaN or infinity.
        """
        check_finite(update, public.spec)
        matrices, _ = self._views(public.spec)
        previous, stream = public.known("previous"), public.stream("powersgd")
        found = []
        for view in matrices:
            right, lengths = public_basis(view.of(previous).T, view.rank, stream)
            found.append(view.of(update) @ (right / lengths))
        return self._packed(found)

    def images(self, symbols: Symbols, spec: ModelSpec) -> Vector:
        """The values of `first` [basis_size]: one product after another, column by column."""
        matrices, _ = self._views(spec)
        numbers, scales = (array.astype(np.float64) for array in symbols)
        rows = [view.rows for view in matrices for _ in range(view.rank)]
        with np.errstate(over="ignore"):  # forged scales; Update.check refuses them
            return (numbers * np.repeat(scales, rows)).astype(np.float32)

    def basis(self, images: npt.NDArray[np.floating], spec: ModelSpec) -> Vector:
        """An orthonormal basis of each product's columns, laid out as they are: what the second
        trip is computed against, at both ends."""
        matrices, _ = self._views(spec)
        found = self._columns(images, matrices)
        flat = [_NOTHING, *(orthonormal(image).T.ravel() for image in found)]
        return np.concatenate(flat).astype(np.float32)

    def basis_size(self, spec: ModelSpec) -> int:
        """The size of `images` and `basis`."""
        matrices, _ = self._views(spec)
        return sum(view.rows * view.rank for view in matrices)

    def _columns(self, flat: npt.NDArray[np.floating], matrices: Sequence[View]) -> list[Matrix]:
        """[rows, rank] of each matrix."""
        found, start = [], 0
        for view in matrices:
            count = view.rows * view.rank
            columns = flat[start : start + count].reshape(view.rank, -1).T
            found.append(columns.astype(np.float64))
            start += count
        return found

    def _packed(self, found: Sequence[Matrix]) -> Symbols:
        """The columns of matrices in units of their largest magnitude, and these."""
        largest = [_largest(matrix) for matrix in found]
        units = [(m / top).T.ravel() for m, top in zip(found, largest, strict=True)]
        return (
            np.concatenate([_NOTHING, *units]).astype(np.dtype(f"<f{self.width}")),
            np.minimum(np.concatenate([_NOTHING, *largest]), LARGEST).astype("<f4"),
        )

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        matrices, others = self._views(public.spec)
        if self.trips == 2:
            symbols = (public.known("basis"), *symbols)
        lefts, rights, scales = (array.astype(np.float64) for array in symbols[:3])
        pieces, rows, columns, components = [], 0, 0, 0
        for view in matrices:
            left = lefts[rows : rows + view.rows * view.rank].reshape(view.rank, -1).T
            right = rights[columns : columns + view.columns * view.rank].reshape(view.rank, -1).T
            own = scales[components : components + view.rank]
            pieces.append(Piece(view.where, product(left, right, own)))
            rows, columns = rows + left.size, columns + right.size
            components += view.rank
        if others:
            slices = tuple(public.spec.slices[name] for name in others)
            part = self.rest.decompress(symbols[3:], public.part(others), num_summands)
            pieces.extend(part.placed(slices, public.spec.size).pieces)
        return Update(public.spec.size, tuple(pieces))

    def group_sum(
        self,
        update: Vector,
        state: Warm,
        public: Public,
        total: Callable[[list[Matrix], int], list[Matrix]],
    ) -> tuple[Vector, Warm]:
        """The sum [size] of what the members of a group bring as `update`, and the next state, by
        Algorithm 1: two all-reduces, which are `total` of matrices at a width in bytes.

        Tensors that are not factored go whole, in the first.
        """
        spec = public.spec
        matrices, others = self._views(spec)
        stream = public.stream("powersgd")
        starts = [orthonormal(_revived_alike(right, stream)) for right in state.rights]
        own = [view.of(update) for view in matrices]
        rest = [update[spec.slices[name]].astype(np.float64) for name in others]
        images = [matrix @ start for matrix, start in zip(own, starts, strict=True)]
        sums = total([*images, *rest], self.width)
        lefts = [orthonormal(image) for image in sums[: len(matrices)]]
        rights = [matrix.T @ left for matrix, left in zip(own, lefts, strict=True)]
        rights = total(rights, self.width)
        agreed = np.empty(spec.size, np.float32)
        for view, left, right in zip(matrices, lefts, rights, strict=True):
            agreed[view.where] = (left @ right.T).ravel()
        for name, part in zip(others, sums[len(matrices) :], strict=True):
            agreed[spec.slices[name]] = part
        return agreed, Warm(tuple(rights), state.rest)

    def _views(self, spec: ModelSpec) -> tuple[tuple[View, ...], tuple[str, ...]]:
        return views(spec, self.rank, self.min_compression_rate)


_NOTHING = np.empty(0)


def _second_factor(matrix: Matrix, left: Matrix) -> Matrix:
    """M^T P, smaller where P P^T M would leave float32."""
    right = matrix.T @ left
    return right * in_range(left, right, np.ones(left.shape[1]))


def _largest(columns: Matrix) -> Matrix:
    """The largest magnitude of each column, 1 where it is zero throughout."""
    found = np.abs(columns).max(axis=0)
    return np.where(found > 0, found, 1.0)


def revived(columns: Matrix, rng: np.random.Generator) -> Matrix:
    """`columns`, those drawn anew that are all but zero beside the largest."""
    norms = np.linalg.norm(columns, axis=0)
    dead = norms <= _DEAD * norms.max(initial=0.0)
    return np.where(dead, rng.standard_normal(columns.shape), columns)


def _revived_alike(columns: Matrix, stream: PublicStream) -> Matrix:
    """As `revived`, by signs that are the same everywhere."""
    norms = np.linalg.norm(columns, axis=0)
    dead = norms <= _DEAD * norms.max(initial=0.0)
    signs = 2.0 * stream.bits(columns.size).reshape(columns.shape) - 1.0
    return np.where(dead, signs, columns)


def two_trips(matrices: Sequence[Matrix], right: Matrix) -> tuple[Matrix, Matrix]:
    """The mean of `matrices`, one for each member of a group, as the group would agree on it in two
    trips from the last right factor, and the next right factor [columns, rank].

    A member's error is its own matrix less that mean's approximation, as in Algorithm 2.
    """
    start = orthonormal(right)
    left = orthonormal(np.sum([matrix @ start for matrix in matrices], axis=0))
    after = np.mean([matrix.T @ left for matrix in matrices], axis=0)
    return left @ after.T, after
