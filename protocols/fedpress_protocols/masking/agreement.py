"""The configuration of a masked session, derived from its round's plan.

The server derives it from the plan that it gave to the cohort. A device derives it from the plan
that it trained under, and declines a session that differs: the server may only choose its nonce and
the expiry time.
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
    """The configuration without the server's own choices, which are zero.

    `population` and `server_key` are known to the device from its enrolment.
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
    """Add the server's choices to `config`; `nonce` is 32 bytes that no session used before."""
    return replace(config, server_nonce=nonce, expires=expires)


def check_agreed(offered: SessionConfig, expected: SessionConfig) -> None:
    """Raise IncompatiblePlan unless `offered` is `expected`, except for the server's choices."""
    same = chosen(offered, nonce=_OPEN, expires=0)
    for name in expected.__dataclass_fields__:
        if getattr(same, name) != getattr(expected, name):
            raise IncompatiblePlan(
                f"the session's {name} differs from the plan's",
                hint="the server contradicts itself: report this to the operator",
            )
