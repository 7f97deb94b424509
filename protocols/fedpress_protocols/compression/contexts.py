"""What both ends know of a coordinate before an upload comes, as the contexts of its code.

Where the last step was large, or the model has gone far, the next update is likely to be large
too; and where the last step went up, a correction of it goes down. Ranks rather than values, since
ranks need no scale.
"""

from __future__ import annotations

import numpy as np

from fedpress_protocols.coding.fields import Alphabet, Contexts, Integers, Layout, Positions
from fedpress_protocols.compression.compressor import Public
from fedpress_protocols.kernels.wire import Octets
from fedpress_protocols.model import Vector

CLASSES = 10
_POSITIVE, _NEGATIVE = 16, 32


def contexts_of(layout: Layout, public: Public) -> Contexts:
    """One entry for each field of `layout`, whose compressor works on the tensors of `public`."""
    return tuple(
        _ranks(public.part(field.grid.names).known(field.grid.known))
        if isinstance(field, Positions | Alphabet | Integers)
        and field.grid is not None
        and field.grid.known is not None
        else None
        for field in layout
    )


def _ranks(vector: Vector) -> Octets:
    """Each value's context: c, plus 16 if it is positive, plus 32 if it is negative.

    c is the largest of 1 .. 10 for which the value is among the size >> c largest in magnitude,
    ties among them; 0 for those among none, and for zero. Magnitudes are compared by their bits.
    """
    bits = np.abs(vector).view(np.uint32)
    counts = [count for c in range(1, CLASSES + 1) if (count := vector.size >> c)]
    ranks = np.array([vector.size - count for count in counts], np.intp)
    thresholds = np.partition(bits, ranks)
    contexts = np.zeros(vector.size, np.uint8)
    for count in counts:
        contexts += bits >= max(thresholds[vector.size - count], 1)
    contexts += np.uint8(_POSITIVE) * (vector > 0)
    contexts += np.uint8(_NEGATIVE) * (vector < 0)
    return contexts
