"""The privacy of a run: who took part how often, and what the server's noise is drawn from.

It lasts as long as the run does, which ends with its server app. What a device has spent before
that, its own account says.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from flwr.app import Message

from fedpress_protocols.messages import PrivacyStatus
from fedpress_protocols.plan import PrivacyTerms, RoundPlan
from fedpress_protocols.upload import WITHIN_CLIP
from fedpress_strategies.private import (
    NoisedSum,
    PlannedSum,
    adapted_clip,
    noised_mean,
)
from fedpress_strategies.strategy import Delta, WeightedMean

_SECRET_BYTES = 32
_log = logging.getLogger(__name__)


class Spending:
    """The account of a run under privacy terms. `size` is the number of clients in a cohort, 0
    before the first round."""

    def __init__(self, terms: PrivacyTerms) -> None:
        self.terms, self.size = terms, 0  # with the clip of the next round
        self._first_clip = terms.clip
        self._counts, self._last = Counter[int](), dict[int, int]()
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._before: tuple[NoisedSum, ...] = ()
        self._newest: RoundPlan | None = None

    @property
    def report(self) -> tuple[str, ...]:
        """The names of the numbers that uploads report."""
        return () if self.terms.adaptive is None else (WITHIN_CLIP,)

    def chosen(
        self,
        messages: Sequence[Message],
        nodes: Iterable[int],
        number: int,
        *,
        minimum: int,
        seed: int | None,
    ) -> list[Message]:
        """`messages` of round `number` to a cohort at most, others of the `nodes` in the place of
        those who have spent their budget, or rest; none where fewer than `minimum` are left."""
        rng = np.random.default_rng(None if seed is None else [seed, number])
        asked = {message.metadata.dst_node_id for message in messages}
        free = [node for node in sorted(set(nodes) - asked) if self._may_take_part(node, number)]
        spare, kept = [free[index] for index in rng.permutation(len(free))], list[Message]()
        for message in messages:
            if self._may_take_part(message.metadata.dst_node_id, number):
                kept.append(message)
            elif spare:
                kept.append(_to(message, spare.pop()))
        if len(kept) < minimum:
            _log.warning(
                "round %d: %d clients have not spent their budget and do not rest, and the plan's "
                "minimum is %d: nobody trains",
                number,
                len(kept),
                minimum,
            )
            return []
        self.size = self.size or len(kept)
        return kept[: self.size]

    def _may_take_part(self, node: int, number: int) -> bool:
        last = self._last.get(node)
        is_rested = last is None or number >= last + self.terms.separation
        return is_rested and self._counts[node] < self.terms.participations

    def count(self, nodes: Iterable[int], number: int) -> None:
        """Count a participation of each of these, who sent a body in round `number` or may have."""
        for node in nodes:
            self._counts[node] += 1
            self._last[node] = number

    def status(self, plan: RoundPlan) -> PrivacyStatus | None:
        return PrivacyStatus.of(plan, max(self._counts.values(), default=0))

    def mean(self, here: PlannedSum, sums: WeightedMean, uploads: Sequence[str]) -> Delta:
        """The mean [size] of a round's sums with noise; `uploads` are the digests in it.

        Noise that is correlated over rounds begins anew after a round without a sum, or of others.
        """
        plan, newest = here.plan, self._newest
        is_next = newest is not None and newest.round == plan.round - 1
        same = (plan.spec, plan.fixed_point, plan.privacy)
        if (
            newest is None
            or not is_next
            or (newest.spec, newest.fixed_point, newest.privacy) != same
        ):
            self._before = ()
        correlation = self.terms.correlation
        if correlation is None or (plan.round - 1) % correlation.rounds == 0:
            self._before = ()
        mean = noised_mean(here, sums, uploads, self._secret, self._before)
        own = NoisedSum(plan.digest, tuple(uploads))
        self._before, self._newest = (own, *self._before), plan
        return mean

    def adapt(self, plan: RoundPlan, within: Sequence[float], uploads: Sequence[str]) -> None:
        """Choose the next round's clip, where it is adaptive, by the devices' bits."""
        clip = adapted_clip(plan, within, uploads, self._secret, self._first_clip)
        if clip is not None:
            self.terms = self.terms.with_clip(clip)


def _to(message: Message, node: int) -> Message:
    return Message(
        message.content,
        dst_node_id=node,
        message_type=message.metadata.message_type,
        group_id=message.metadata.group_id,
    )
