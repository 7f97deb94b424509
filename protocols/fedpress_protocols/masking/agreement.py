"""The configuration of a session, as its round's plan has it.

The server makes it of the plan that it gave to the cohort. A device makes it of the plan that it
trained under, and takes part in no session that differs from it: what a server may still choose is
its nonce and the time until which the session lasts.
"""

from __future__ import annotations

from dataclasses import replace

from fedpress_protocols.errors import IncompatiblePlan
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.masking.transcript import (
    PhaseSeconds,
    SessionConfig,
    VectorSpec,
    rule_of,
)
from fedpress_protocols.plan import MaskingTerms

_OPEN = bytes(32)


def agreed(payload: Payload, *, population: str, server_key: bytes) -> SessionConfig:
    """All of the configuration but the server's own choices, which are zero.

    `population` and `server_key` are those that the device knows since it was enrolled.
    """
    plan = payload.plan
    terms = plan.masking or MaskingTerms()
    return SessionConfig(
        population=population,
        task=plan.task,
        round=plan.round,
        attempt=plan.attempt,
        server_key=server_key,
        server_nonce=_OPEN,
        model=bytes.fromhex(plan.model),
        support=bytes.fromhex(payload.digest),
        plan=bytes.fromhex(plan.digest),
        vectors=tuple(VectorSpec(v.name, v.length, v.bound) for v in payload.vectors),
        minimum=plan.cohort.minimum,
        maximum=plan.cohort.size,
        expires=0,
        adversary=terms.adversary,
        corrupt=round(terms.corrupt * 1e4),
        dropout=round(terms.dropout * 1e4),
        suite=terms.suite,
        hybrid=terms.hybrid,
        seconds=PhaseSeconds(**terms.seconds.model_dump()),
        rule=rule_of(terms.adversary, plan.cohort.size),
    )


def chosen(config: SessionConfig, *, nonce: bytes, expires: int) -> SessionConfig:
    """`config` with the server's choices; `nonce` is 32 bytes that no session had before."""
    return replace(config, server_nonce=nonce, expires=expires)


def check_agreed(offered: SessionConfig, due: SessionConfig) -> None:
    """Raises IncompatiblePlan unless `offered` is `due`, the server's choices aside."""
    same = chosen(offered, nonce=_OPEN, expires=0)
    for name in due.__dataclass_fields__:
        if getattr(same, name) != getattr(due, name):
            raise IncompatiblePlan(
                f"the session's {name} is not the one that the plan gives",
                hint="the server says one thing in the plan and another in the session",
            )
