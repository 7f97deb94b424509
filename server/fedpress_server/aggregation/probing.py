"""A probe's uploads, decoded once more for the comparison."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fedpress_protocols.errors import ServerError
from fedpress_protocols.policies import Comparison
from fedpress_server.aggregation.accumulate import StagedUpload
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_strategies.policies.probing import Probe


def compare(
    terms: RoundTerms, uploads: Sequence[StagedUpload], reference: str
) -> Comparison | None:
    """Compare the uploads with the profile `reference` to the others, in the order of their
    assignments; None with fewer than two of either kind, or if they move nothing."""
    probe = Probe(terms.shared.size)
    for staged in uploads:
        if staged.plan is not None and staged.plan.round != terms.plan.round:
            continue  # of an asynchronous task's earlier model
        body = terms.payloads.get(staged.name)
        if hashlib.sha256(body).hexdigest() != staged.digest:
            raise ServerError(f"{staged.name} was changed on the disk")
        update, num_examples, _ = terms.decoded(body, staged.profile, staged.client_id)
        probe.add(update, num_examples, len(body), is_reference=staged.profile == reference)
    return probe.comparison()
