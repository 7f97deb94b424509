"""Bounds on the L2 norms of what a device sends: of the whole update, or of each tensor.

Bounds C_t on tensors are a bound on the whole, sqrt(sum of C_t**2) = C, which is what one device
moves a sum by at most. Noise and accounting are those of C.

McMahan, Ramage, Talwar and Zhang 2018, arXiv:1710.06963, Section 3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update
from fedpress_protocols.errors import IncompatiblePlan, InvalidUpdate

Shares = tuple[tuple[str, float], ...]
"""Pairs of a name pattern (shell style) and a share; a tensor has that of the first that fits."""
NORM_TOLERANCE = 1e-9
"""Relative: a device may sum the squares of a norm in another order."""
_SLACK = 1e-12
"""Relative, for the arithmetic of float64."""


@dataclass(frozen=True, eq=False)
class Bounds:
    """The largest norms `clips` [n] of an update's n parts, one behind the other: of all of it as
    one part without a name, or of the tensors `names`."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    clips: npt.NDArray[np.float64]

    @classmethod
    def of(cls, clip: float, shares: Shares, spec: ModelSpec) -> Bounds:
        """`clip` on an update over `spec` or, by `shares`, on its tensors: in proportion to them,
        and with `clip` as the root of the sum of their squares.

        Raises IncompatiblePlan for a tensor that no pattern fits, and a pattern without tensors.
        """
        if not shares:
            return cls(("",), (spec.size,), np.array([clip]))
        fitting = [
            next((i for i, (pattern, _) in enumerate(shares) if fnmatchcase(name, pattern)), None)
            for name in spec.slices
        ]
        for name, index in zip(spec.slices, fitting, strict=True):
            if index is None:
                raise IncompatiblePlan(
                    f"no pattern of privacy.per_tensor fits the tensor {name!r}, which would have "
                    "no bound",
                    hint='end privacy.per_tensor with ["*", 1]',
                )
        for index, (pattern, _) in enumerate(shares):
            if index not in fitting:
                raise IncompatiblePlan(
                    f"{pattern!r} in privacy.per_tensor is the first pattern to fit of no tensor",
                    hint="leave it out, or move it in front of those that fit the same names",
                )
        each = [shares[index][1] for index in fitting if index is not None]
        whole = math.sqrt(math.fsum(share * share for share in each))
        clips = np.array([(1 - _SLACK) * clip * (share / whole) for share in each])
        return cls(tuple(spec.slices), tuple(tensor.size for tensor in spec.trained), clips)

    def norms(self, update: Update) -> npt.NDArray[np.float64]:
        """Those of the update's parts [n]."""
        return update.norms(self.sizes)

    def excess(self, update: Update, tolerance: float = 0.0) -> str:
        """The part that is most beyond its bound, in words; empty where none is.

        `tolerance` is relative.
        """
        ratios = self.norms(update) / self.clips
        worst = int(np.argmax(ratios))
        if ratios[worst] <= 1 + tolerance:
            return ""
        part = f"norm of tensor {self.names[worst]!r}" if self.names[worst] else "update's norm"
        clip = self.clips[worst]
        return f"the {part} is {ratios[worst] * clip:g}, larger than the clip of {clip:g}"

    def check(self, update: Update) -> None:
        """Raise InvalidUpdate for a received update with a part beyond its bound."""
        if excess := self.excess(update, NORM_TOLERANCE):
            raise InvalidUpdate(
                excess,
                hint="the device does not keep the task's privacy terms; nothing was counted",
            )

    def scaled(self, update: Vector, factors: npt.NDArray[np.float64]) -> Vector:
        """`update`, each part multiplied by its factor."""
        if (factors == 1).all():
            return update
        return update * np.repeat(factors.astype(np.float32), self.sizes)
