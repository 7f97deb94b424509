"""Top-k with error feedback on a GPU, by the kernels of FEDPRESS_KERNELS=triton.

The gradient, the residual and the mean stay on the device. The indices and values that are sent
cross the bus; levels, coding and collectives are those of the host, and so are the bits of means,
residuals and bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedpress_compression import kernels
from fedpress_compression.compressor import Compressor, Public
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.tensors import Vector
from fedpress_compression.update import Indices, Update
from fedpress_ddp.collectives import Gathered, Trip, added
from fedpress_ddp.metrics import square
from fedpress_protocols.errors import InvalidUpdate, MissingExtra

try:
    import torch
except ModuleNotFoundError as exc:
    raise MissingExtra(
        "exchanging gradients needs PyTorch", hint="pip install fedpress[torch]"
    ) from exc


class Exchanged(NamedTuple):
    """The mean and the residual [spec.size], on the device, and the updates of all processes, whose
    sum is the mean."""

    mean: torch.Tensor
    residual: torch.Tensor
    updates: Sequence[Update]


def lies_on_device(values: torch.Tensor) -> bool:
    """Whether the chosen kernels take `values` where they lie."""
    if kernels.CHOSEN != "triton":
        return False
    from fedpress_compression.kernels import on_device

    return values.device.type == on_device.DEVICE.type


def selection(made: Compressor[Any], values: torch.Tensor) -> TopK | None:
    """The TopK by which `send` exchanges `values` as `made` does; None: it cannot.

    Not in chunks, of which a vector has thousands: each would take a selection of its own.
    """
    lossy = made.lossy
    if type(lossy) is not TopK or lossy.chunk is not None or made != ErrorFeedback(lossy):
        return None
    return lossy if lies_on_device(values) else None


def send(
    lossy: TopK, values: torch.Tensor, residual: torch.Tensor, public: Public, trip: Trip
) -> Exchanged:
    """Exchange `values` [spec.size] and the `residual`, which stays as it is, by `lossy`.

    Raises NotFinite, in all processes, if one brings NaN or infinity.
    """
    from fedpress_compression.kernels.on_device import device_largest

    if values.shape != residual.shape:
        raise InvalidUpdate(
            f"an update of {list(values.shape)} values where {public.spec.size} are expected",
            hint="give the spec of this vector's tensors",
        )
    # All is in the calling thread, on the current stream of the values' device, as is what autograd
    # computed them with. Triton launches on the current device, which need not be theirs.
    with torch.cuda.device_of(values):
        # By a tensor on the device: on a GPU torch multiplies by the reciprocal of a number.
        divided = values / torch.full((), trip.size, dtype=torch.float32, device=values.device)
        trip.measured.gradient += trip.finite_square(divided)
        total = torch.empty_like(divided)

        def kept(chunk: slice, k: int) -> tuple[Indices, Vector]:
            where, largest = device_largest(divided[chunk], residual[chunk], k, total[chunk])
            trip.measured.brought += trip.finite_square(total[chunk])
            return _to_host(where).astype(np.int64), _to_host(largest)

        with np.errstate(over="ignore"):  # between levels near the largest float32
            symbols = lossy.compress_kept(public.spec, kept)
        crossing = np.int32 if public.spec.size < 1 << 31 else np.int64
        channel = Gathered(trip, lossy, added)
        updates = list(channel.gather(symbols, public))
        mean = divided.zero_()  # in its memory, which is no longer read
        for update in updates:
            for piece in update.pieces:
                where = _to_device(piece.indices().astype(crossing), values.device).long()
                sent = _to_device(piece.values, values.device)
                # No index_add_: a GPU's atomic sums take subnormal numbers for 0.
                mean[where] += sent
                if update is channel.own:
                    total[where] -= sent
        left = square(total)  # waits for all of the above: nothing returned is yet to be computed
    trip.measured.lost += left
    trip.measured.waiting += left
    return Exchanged(mean, total, updates)


def _to_host(tensor: torch.Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = tensor.cpu().numpy()
    return array


def _to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
