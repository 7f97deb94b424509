"""A probe's uploads, decoded once more for the comparison."""

from __future__ import annotations

from collections.abc import Sequence

from fedpress_protocols.policies import Comparison
from fedpress_server.aggregation.accumulate import StagedUpload, read_body
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_strategies.policies.probing import Probe


def compare(terms: RoundTerms, uploads: Sequence[StagedUpload]) -> Comparison | None:
    """Compare the uploads with the sketches in them, in the order of their assignments; None with
    too few of them, or if they move nothing."""
    probe = Probe(terms.public, terms.plan.sketch)
    for staged in uploads:
        if staged.plan is not None and staged.plan.public_seed != terms.plan.public_seed:
            continue  # of an asynchronous task's earlier model or attempt
        upload = terms.read(read_body(staged, terms.payloads), staged.profile)
        probe.add(upload, terms.updated(upload, staged.profile, staged.client_id))
    return probe.comparison()
