"""Unmasking: reconstructs secrets from shares, derives the masks to remove, and computes the sum.

Every reconstructed secret is compared with its owner's earlier commitment: that to its seed, or its
public mask key. So a wrong share costs time, but never gives a wrong sum.
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
"""Maximum choices of shares for all secrets, once all have answered; 0.1 ms each."""
_FIRST_TRIES = 2**7
"""Maximum choices while more answers may arrive."""


@dataclass(frozen=True)
class UnmaskJob:
    """The masks that turn the sum of the survivors' bodies into the sum of their words.

    `suspects` are the slots whose shares were wrong.
    """

    config: SessionConfig
    survivors: tuple[int, ...]
    """Slots whose bodies are added, ascending; their digests are in `MaskingServer.masked`."""
    masks: tuple[tuple[bytes, int], ...] = field(repr=False)
    """Key material and sign of every mask to add."""
    suspects: tuple[int, ...] = ()

    def unmask(self, bodies: Iterable[Words], *, threads: int = 1) -> Words:
        """The sum of the survivors' words, exact in the used bits; memory O(words).

        `bodies` are the words (`config.packing.from_bytes`) of every survivor's body, once each, in
        any order, or their sum. `config.packing.unpack` gives the sums of the vectors.
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
    """The unmasking job for these `survivors`, from the shares that they revealed.

    Raises InvalidShare if no shares give some secret, or a secret does not lead to its masks. If
    the shares identify the clients at fault, `members["suspects"]` has their slots: owners whose
    shares are consistent but contradict the commitment, or fit nothing though all have answered.
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
    """The masks that the survivors share with the lost client in `slot`, with inverted signs."""
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
    """Reconstruction of secrets, batched by the set of holders; `suspects` are the holders with
    wrong shares."""

    def __init__(
        self,
        cohort: Cohort,
        sharers: frozenset[int],
        commitments: Mapping[int, bytes],
        reveals: Mapping[int, Reveal],
        has_all: bool,
    ) -> None:
        """`commitments` are the survivors'; `has_all`: no more answers can arrive."""
        self._cohort, self._has_all = cohort, has_all
        self._tries = _MAX_TRIES if has_all else _FIRST_TRIES
        self._threshold = cohort.topology.threshold
        self._commitments = commitments
        self.suspects: set[int] = set()
        self._given: dict[int, dict[int, Words]] = {}
        """By owner and holder: a share [5]."""
        for holder, reveal in sorted(reveals.items()):
            shares = np.frombuffer(reveal.shares, "<u8").astype(np.uint64)
            rows = shares.reshape(-1, shamir.LIMBS)
            for owner, share in zip(cohort.owners(holder, sharers), rows, strict=True):
                self._given.setdefault(owner, {})[holder] = share

    def secrets(self, owners: Iterable[int]) -> dict[int, bytes]:
        """The secrets of all `owners` by slot."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for owner in owners:
            groups.setdefault(self._points(owner, self._first(owner)), []).append(owner)
        by_owner: dict[int, bytes] = {}
        for points, group in groups.items():
            for owner, secret in zip(group, self._of_group(points, group), strict=True):
                by_owner[owner] = secret or self._search(owner)
        return by_owner

    def _first(self, owner: int) -> list[int]:
        return list(self._given[owner])[: self._threshold]

    def _points(self, owner: int, holders: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._cohort.point(owner, holder) for holder in holders)

    def _of_group(self, points: tuple[int, ...], owners: Sequence[int]) -> list[bytes | None]:
        """The secrets of `owners`, whose first holders have these points; None for invalid ones."""
        shares = [[self._given[owner][each] for each in self._first(owner)] for owner in owners]
        try:
            secrets = shamir.combine_many(points, np.array(shares), self._threshold)
        except InvalidShare:  # one of them is invalid: reconstruct each separately
            return [self._secret(owner, self._first(owner)) for owner in owners]
        return [
            secret if self._is_right(owner, secret) else None
            for owner, secret in zip(owners, secrets, strict=True)
        ]

    def _secret(self, owner: int, holders: Sequence[int]) -> bytes | None:
        """The owner's secret, if the shares of `holders` give a valid one."""
        shares = np.array([self._given[owner][holder] for holder in holders])
        try:
            secret = shamir.combine(self._points(owner, holders), shares, self._threshold)
        except InvalidShare:
            return None
        return secret if self._is_right(owner, secret) else None

    def _is_right(self, owner: int, secret: bytes) -> bool:
        """Whether the secret matches the owner's commitment."""
        cohort = self._cohort
        if owner in self._commitments:
            bound = commitment(secret, sid=cohort.sid, slot=owner)
            return same(bound, self._commitments[owner])
        public = MaskKey(secret, hybrid=cohort.config.hybrid).public
        return same(public, cohort.members[owner].mask_key)

    def _search(self, owner: int) -> bytes:
        """Try other shares: first those of holders that are not suspects.

        Then each other holder replaces one with a correct share, which identifies the wrong ones.
        If all shares lie on one polynomial, and are more than corrupt holders could change, only
        the owner can be at fault: then nothing is tried.
        """
        by_holder = self._given[owner]
        holders = list(by_holder)
        config = self._cohort.config
        num_spare = len(by_holder) - self._threshold
        is_sure = self._has_all or num_spare >= config.corrupt * len(self._cohort.members) // 10_000
        shares = np.array([by_holder[each] for each in holders])
        if num_spare and shamir.agree(self._points(owner, holders), shares, self._threshold):
            raise InvalidShare(
                f"{len(by_holder)} shares of slot {owner} agree on a secret that contradicts its "
                "commitment",
                hint="exclude that client",
                **({"suspects": [owner]} if is_sure else {}),
            )
        pools = [holders]
        if not self.suspects.isdisjoint(by_holder):
            pools.insert(0, [holder for holder in by_holder if holder not in self.suspects])
        for pool in pools:
            for chosen in self._choices(owner, pool):
                if not self._tries:
                    break
                self._tries -= 1
                if secret := self._secret(owner, chosen):
                    for holder in by_holder.keys() - set(chosen):
                        if not self._secret(owner, [*chosen[1:], holder]):
                            self.suspects.add(holder)
                    return secret
        raise InvalidShare(
            f"no {self._threshold} of {len(by_holder)} shares give the secret of slot {owner}",
            hint="wait for answers of more clients",
            **({"suspects": [owner]} if self._has_all else {}),
        )

    def _choices(self, owner: int, pool: list[int]) -> Iterator[Sequence[int]]:
        """Choices of `threshold` holders: all of them, or an endless random sequence."""
        if math.comb(len(pool), self._threshold) <= _MAX_TRIES:
            yield from combinations(pool, self._threshold)
            return
        stream = PublicRandomness(self._cohort.sid).stream(f"shares of {owner}")
        while True:
            yield [pool[place] for place in stream.distinct(len(pool), self._threshold)]
