"""Flower's records of arrays, and models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord

from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_flower import envelope
from fedpress_protocols.model import Model


def record_of(vector: Vector, spec: ModelSpec) -> ArrayRecord:
    """The trained tensors of a model [spec.size], in float32."""
    return ArrayRecord({name: Array(array) for name, array in spec.unflatten(vector).items()})


def num_bytes(record: ArrayRecord) -> int:
    """Those that travel."""
    return sum(len(array.data) for array in record.values())


def moved(
    arrays: Mapping[str, npt.NDArray[Any]], spec: ModelSpec, parameters: Vector
) -> ArrayRecord:
    """`arrays` with these trained values [spec.size], each in the type that it had."""
    whole = envelope.moved(arrays, spec, parameters)
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in whole.items()})


def retyped(arrays: ArrayRecord, like: Mapping[str, npt.NDArray[Any]]) -> ArrayRecord:
    """In the types of `like`: strategies of Flower's turn integers, and some float32, to float64,
    and a model that changes its types would lose what clients hold back of it."""
    retyped = {}
    for name, array in arrays.items():
        values, dtype = array.numpy(), like[name].dtype
        if values.dtype != dtype:
            array = Array(
                np.asarray((values if dtype.kind == "f" else np.rint(values)).astype(dtype))
            )
        retyped[name] = array
    return ArrayRecord(retyped)


def model_of(arrays: ArrayRecord) -> Model:
    return envelope.model_of({name: array.numpy() for name, array in arrays.items()})
