"""From the survivors' shares to the masks that have to come off, and to the sum.

Every secret that is put together is held to what its owner said of it before the input was masked:
the commitment to its seed, or its public mask key. So a wrong share costs time, and never gives a
wrong sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import numpy.typing as npt

from fedpress_compression.randomness import PublicRandomness
from fedpress_protocols.errors import InvalidKey, InvalidSeal, InvalidShare
from fedpress_protocols.masking import shamir
from fedpress_protocols.masking.cohort import Cohort
from fedpress_protocols.masking.keys import MaskKey, commitment, same, self_mask
from fedpress_protocols.masking.keystream import add_keystreams
from fedpress_protocols.masking.messages import Reveal, Shares
from fedpress_protocols.masking.transcript import SessionConfig

Words = npt.NDArray[np.uint64]

_MASKS_AT_ONCE = 256
_MAX_TRIES = 2**10
"""Choices of shares for all secrets, once all have answered; a tenth of a millisecond each."""
_FIRST_TRIES = 2**7
"""Choices while others may answer."""


@dataclass(frozen=True)
class UnmaskJob:
    """What turns the sum of the survivors' bodies into the sum of their words.

    `suspects` are the slots whose shares were found to be wrong.
    """

    config: SessionConfig
    survivors: tuple[int, ...]
    """Whose bodies are to be added, rising; their digests are in `MaskingServer.masked`."""
    masks: tuple[tuple[bytes, int], ...] = field(repr=False)
    """Key material and sign of every mask that is to be added."""
    suspects: tuple[int, ...] = ()

    def unmask(self, bodies: Iterable[Words], *, threads: int = 1) -> Words:
        """The sum of the survivors' words, exact in the bits that count; memory O(words).

        `bodies` are the words (`config.packing.from_bytes`) of every survivor's body once, in any
        order, or a sum of them made before. `config.packing.unpack` gives the sums of the vectors.
        """
        total = np.zeros(self.config.packing.num_words, np.uint64)
        for words in bodies:
            total += words
        for at in range(0, len(self.masks), _MASKS_AT_ONCE):
            masks = self.masks[at : at + _MASKS_AT_ONCE]
            add_keystreams(total, masks, self.config.suite, threads=threads)
        return total


def recovered(
    cohort: Cohort,
    *,
    sharers: frozenset[int],
    survivors: frozenset[int],
    shares: Mapping[int, Shares],
    reveals: Mapping[int, Reveal],
) -> UnmaskJob:
    """The job for these `survivors`, from what they revealed.

    Raises InvalidShare if no shares give some secret, or a secret does not lead to its masks. Where
    the shares tell who is at fault, `members["suspects"]` has the slots: an owner whose shares
    agree with each other and not with what it said of its secret, or fit nothing though all have
    answered.
    """
    commitments = {slot: shares[slot].commitment for slot in survivors}
    recovery = _Recovery(cohort, sharers, commitments, reveals, reveals.keys() >= survivors)
    masks: list[tuple[bytes, int]] = []
    for slot, secret in recovery.secrets(cohort.needed(sharers, survivors)).items():
        if slot in survivors:
            masks.append((self_mask(secret, sid=cohort.sid, slot=slot), -1))
        else:
            masks += _pair_masks(cohort, slot, secret, survivors, shares)
    return UnmaskJob(
        cohort.config, tuple(sorted(survivors)), tuple(masks), tuple(sorted(recovery.suspects))
    )


def _pair_masks(
    cohort: Cohort,
    slot: int,
    secret: bytes,
    survivors: frozenset[int],
    shares: Mapping[int, Shares],
) -> Iterator[tuple[bytes, int]]:
    """What takes off the masks that the survivors have in common with the lost client in `slot`."""
    key = MaskKey(secret, hybrid=cohort.config.hybrid)
    for peer in cohort.neighbours[slot]:
        if peer not in survivors:
            continue
        is_lower = peer < slot
        introduction = b""
        if is_lower:
            introduction = shares[peer].sealed[cohort.place(peer, slot)].introduction
        try:
            material = key.pair_mask(
                cohort.members[peer].mask_key,
                sid=cohort.sid,
                cfg_hash=cohort.config.digest,
                own=slot,
                peer=peer,
                introduction=introduction,
            )
        except (InvalidKey, InvalidSeal) as exc:
            raise InvalidShare(
                f"the mask of slots {peer} and {slot} is lost: {exc.detail}",
                suspects=[peer, slot],
            ) from exc
        yield material, -1 if is_lower else 1


class _Recovery:
    """Secrets from shares, those of one pattern of holders together; `suspects` are the holders
    that gave wrong ones."""

    def __init__(
        self,
        cohort: Cohort,
        sharers: frozenset[int],
        commitments: Mapping[int, bytes],
        reveals: Mapping[int, Reveal],
        has_all: bool,
    ) -> None:
        """`commitments` are the survivors'; `has_all`: nobody else can answer."""
        self._cohort, self._has_all = cohort, has_all
        self._tries = _MAX_TRIES if has_all else _FIRST_TRIES
        self._threshold = cohort.topology.threshold
        self._commitments = commitments
        self.suspects: set[int] = set()
        self._given: dict[int, dict[int, Words]] = {}
        """By owner and holder: [5], a share."""
        for holder, reveal in sorted(reveals.items()):
            shares = np.frombuffer(reveal.shares, "<u8").astype(np.uint64)
            rows = shares.reshape(-1, shamir.LIMBS)
            for owner, share in zip(cohort.owners(holder, sharers), rows, strict=True):
                self._given.setdefault(owner, {})[holder] = share

    def secrets(self, owners: Iterable[int]) -> dict[int, bytes]:
        """By slot, of all `owners`."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for owner in owners:
            groups.setdefault(self._points(owner, self._first(owner)), []).append(owner)
        found: dict[int, bytes] = {}
        for points, group in groups.items():
            for owner, secret in zip(group, self._of_group(points, group), strict=True):
                found[owner] = secret or self._search(owner)
        return found

    def _first(self, owner: int) -> list[int]:
        return list(self._given[owner])[: self._threshold]

    def _points(self, owner: int, holders: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._cohort.point(owner, holder) for holder in holders)

    def _of_group(self, points: tuple[int, ...], owners: Sequence[int]) -> list[bytes | None]:
        """The secrets of `owners`, whose first holders have these points; None for wrong ones."""
        shares = [[self._given[owner][each] for each in self._first(owner)] for owner in owners]
        try:
            secrets = shamir.combine_many(points, np.array(shares), self._threshold)
        except InvalidShare:  # of one of them: each by itself then
            return [self._secret(owner, self._first(owner)) for owner in owners]
        return [
            secret if self._is_right(owner, secret) else None
            for owner, secret in zip(owners, secrets, strict=True)
        ]

    def _secret(self, owner: int, holders: Sequence[int]) -> bytes | None:
        """The owner's secret, if the shares of `holders` give it."""
        shares = np.array([self._given[owner][holder] for holder in holders])
        try:
            secret = shamir.combine(self._points(owner, holders), shares, self._threshold)
        except InvalidShare:
            return None
        return secret if self._is_right(owner, secret) else None

    def _is_right(self, owner: int, secret: bytes) -> bool:
        """Whether it is what the owner has committed to."""
        cohort = self._cohort
        if owner in self._commitments:
            bound = commitment(secret, sid=cohort.sid, slot=owner)
            return same(bound, self._commitments[owner])
        public = MaskKey(secret, hybrid=cohort.config.hybrid).public
        return same(public, cohort.members[owner].mask_key)

    def _search(self, owner: int) -> bytes:
        """Try other shares: at first those of holders that nothing is known against.

        Then every other holder is tried in the place of one that was right, and so is known. Where
        all shares lie on one polynomial none but the owner can be at fault, given more of them than
        corrupt holders could bend: then nothing is tried.
        """
        given = self._given[owner]
        holders = list(given)
        config = self._cohort.config
        num_spare = len(given) - self._threshold
        is_sure = self._has_all or num_spare >= config.corrupt * len(self._cohort.members) // 10_000
        shares = np.array([given[each] for each in holders])
        if num_spare and shamir.agree(self._points(owner, holders), shares, self._threshold):
            raise InvalidShare(
                f"{len(given)} shares of slot {owner} agree on a secret that it did not announce",
                hint="leave that client out",
                **({"suspects": [owner]} if is_sure else {}),
            )
        pools = [holders]
        if not self.suspects.isdisjoint(given):
            pools.insert(0, [holder for holder in given if holder not in self.suspects])
        for pool in pools:
            for chosen in self._choices(owner, pool):
                if not self._tries:
                    break
                self._tries -= 1
                if secret := self._secret(owner, chosen):
                    for holder in given.keys() - set(chosen):
                        if not self._secret(owner, [*chosen[1:], holder]):
                            self.suspects.add(holder)
                    return secret
        raise InvalidShare(
            f"no {self._threshold} of {len(given)} shares give the secret of slot {owner}",
            hint="wait for the answers of more clients",
            **({"suspects": [owner]} if self._has_all else {}),
        )

    def _choices(self, owner: int, pool: list[int]) -> Iterator[Sequence[int]]:
        """As many holders as are needed: every such choice, or random ones without end."""
        if math.comb(len(pool), self._threshold) <= _MAX_TRIES:
            yield from combinations(pool, self._threshold)
            return
        stream = PublicRandomness(self._cohort.sid).stream(f"shares of {owner}")
        while True:
            yield [pool[place] for place in stream.distinct(len(pool), self._threshold)]
