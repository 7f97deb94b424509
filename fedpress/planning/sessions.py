"""Costs of a masked session besides the bodies, in bytes and CPU: those of its messages.

The sizes are those of `masking.messages`, each made once with as many entries as the cohort's graph
asks for, so that nobody has to lose a session to know. Nobody is lost in them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from fedpress.planning.rehearsal import Workload, rehearse
from fedpress_protocols.masking.certificates import Certificate
from fedpress_protocols.masking.keys import PUBLIC_BYTES, SEAL_BYTES
from fedpress_protocols.masking.keystream import MATERIAL_BYTES, add_keystream
from fedpress_protocols.masking.messages import (
    Advertise,
    Consent,
    Consents,
    Inbox,
    Listing,
    MaskedInput,
    Offer,
    Receipt,
    Reveal,
    Roster,
    RosterRow,
    SealedShares,
    Shares,
    Survivors,
)
from fedpress_protocols.masking.shamir import SHARE_BYTES
from fedpress_protocols.masking.transcript import SessionConfig

ROUND_TRIPS = 12
"""Ready, the offer, and what is said and heard in each of five phases."""

_KEY_ID = "0" * 22
_REHEARSED = 12
_DIGEST = bytes(32)


@dataclass(frozen=True, slots=True)
class SessionBytes:
    """Of one client that stays to the end, its masked body left out."""

    sent: int
    received: int


def session_bytes(config: SessionConfig) -> SessionBytes:
    """Of a session of `config.maximum` clients; raises IncompatiblePlan if no graph is for them."""
    n = config.maximum
    graph = config.parameters(n)
    degree = graph.degree
    complete = degree == n - 1
    holders = degree + complete  # of the client's own secrets, itself among them in such a graph
    # Once everybody has enough consents the phase ends; in a sparse graph some then have more.
    consents = graph.threshold - 1 if complete else degree
    everybody = frozenset(range(n))
    certificate = Certificate(_DIGEST, _KEY_ID, config.population, config.expires)
    advertise = Advertise(certificate, bytes(PUBLIC_BYTES), bytes(PUBLIC_BYTES), _DIGEST)
    sealed = (SealedShares(bytes(2 * SHARE_BYTES + SEAL_BYTES), b""),) * degree
    consent = Consent(n - 1, _DIGEST)
    sent = (
        advertise,
        Shares(n - 1, _DIGEST, sealed),
        MaskedInput(n - 1, everybody, _DIGEST, 0),
        *((consent,) if config.adversary == "malicious" else ()),
        Reveal(n - 1, _DIGEST, bytes(SHARE_BYTES * holders)),
    )
    received = (
        Offer(config),
        Roster(Listing((RosterRow(bytes(16), _DIGEST),) * n), (advertise,) * (degree + 1)),
        Inbox(everybody, sealed),
        Survivors(everybody),
        *((Consents((consent,) * consents),) if config.adversary == "malicious" else ()),
        Receipt(_DIGEST, everybody, _DIGEST),
    )
    return SessionBytes(
        *(sum(len(each.to_bytes()) for each in messages) for messages in (sent, received))
    )


@dataclass(frozen=True, slots=True)
class SessionSeconds:
    """CPU of this machine: what a client has with each of its neighbours, and one mask."""

    neighbour: float
    mask: float

    @classmethod
    def measured(cls, num_words: int) -> SessionSeconds:
        """By a session of a dozen clients, and by masks over `num_words` words.

        A client's work is in proportion to its neighbours, so what is the same for any number of
        them (a few signatures) is spread over the dozen.
        """
        steps = rehearse(Workload(_REHEARSED, 8, 1, 0, 0, 0)).client_seconds
        words = np.zeros(num_words, np.uint64)
        times = []
        for number in range(5):
            begun = time.thread_time()
            add_keystream(words, bytes([number]) * MATERIAL_BYTES, "chacha20")
            times.append(time.thread_time() - begun)
        return cls(sum(steps.values()) / (_REHEARSED - 1), median(times))
