"""Experimental names: each may change or go in any release, without a deprecation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpress.lazy import exports

if TYPE_CHECKING:
    from fedpress_client.zeroth_order import ZerothOrderTrainer
    from fedpress_protocols.subspace import materialised

__all__ = ["ZerothOrderTrainer", "materialised"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "ZerothOrderTrainer": "fedpress_client.zeroth_order",
        "materialised": "fedpress_protocols.subspace",
    },
    extra="torch",
)
