"""What a test reads out of a device's account."""

from __future__ import annotations

from fedpress_client import Ledger
from fedpress_compression.compressor import state_name
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.error_feedback import Feedback
from fedpress_compression.tensors import Vector


def residual(ledger: Ledger) -> Vector:
    """Where there is one."""
    assert ledger.residual is not None
    return ledger.residual


def velocity(ledger: Ledger) -> Vector:
    """Of dgc."""
    _, stored = ledger.states[state_name(Dgc())]
    found = Feedback(*stored).velocity
    assert found is not None
    return found
