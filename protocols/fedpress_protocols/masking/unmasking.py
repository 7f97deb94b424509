"""Unmasking: reconstructs secrets from shares, derives the masks to remove, and computes the sum.

Every reconstructed secret is compared with its owner's earlier commitment: that to its seed, or its
public mask key. So a wrong share costs time, but never gives a wrong sum.

Who is named is at fault for certain, if no more clients are corrupt than the session allows for. A
wrong share alone names nobody: its owner may have dealt it, or its holder changed it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import numpy.typing as npt

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
"""Maximum choices of shares that are tried for all secrets; 0.1 ms each."""


@dataclass(frozen=True)
class UnmaskJob:
    """The masks that turn the sum of the survivors' bodies into the sum of their words.

    `suspects` are the slots that revealed wrong shares of more owners than can be corrupt.
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

    Raises InvalidShare if some secret cannot be found, or does not lead to its masks. Then
    `members` may have `suspects`, owners that are certainly at fault: that so many shares are
    wrong, or that they agree on a secret that contradicts the commitment, would take more corrupt
    holders than there can be. Or `failures`, pairs of slots of which one is at fault.
    """
    commitments = {slot: shares[slot].commitment for slot in survivors}
    recovery = _Recovery(cohort, sharers, commitments, reveals)
    masks: list[tuple[bytes, int]] = []
    failures: list[tuple[int, int]] = []
    for slot, secret in recovery.secrets(cohort.needed(sharers, survivors)).items():
        if slot in survivors:
            masks.append((self_mask(secret, sid=cohort.sid, slot=slot), -1))
            continue
        key = MaskKey(secret, hybrid=cohort.config.hybrid)
        for peer in cohort.neighbours[slot]:
            if peer in survivors:
                try:
                    masks.append(_pair_mask(cohort, slot, peer, key, shares))
                except (InvalidKey, InvalidSeal):
                    failures.append((slot, peer))
    if failures:
        pairs = ", ".join(f"{slot} and {peer}" for slot, peer in failures[:10])
        raise InvalidShare(
            f"{len(failures)} masks are lost, of slots {pairs}: what one sealed for the other does "
            "not open",
            hint="one of each pair is at fault: keep the two apart",
            failures=failures,
        )
    return UnmaskJob(cohort.config, tuple(sorted(survivors)), tuple(masks), recovery.suspects)


def _pair_mask(
    cohort: Cohort, slot: int, peer: int, key: MaskKey, shares: Mapping[int, Shares]
) -> tuple[bytes, int]:
    """The mask that the survivor `peer` shares with the lost client in `slot`, with inverted sign;
    raises InvalidKey or InvalidSeal if one of the two has prevented it."""
    is_lower = peer < slot
    introduction = b""
    if is_lower:
        introduction = shares[peer].sealed[cohort.place(peer, slot)].introduction
    material = key.pair_mask(
        cohort.members[peer].mask_key,
        sid=cohort.sid,
        cfg_hash=cohort.config.digest,
        own=slot,
        peer=peer,
        introduction=introduction,
    )
    return material, -1 if is_lower else 1


class _Recovery:
    """Reconstruction of secrets, batched by the set of holders."""

    def __init__(
        self,
        cohort: Cohort,
        sharers: frozenset[int],
        commitments: Mapping[int, bytes],
        reveals: Mapping[int, Reveal],
    ) -> None:
        """`commitments` are the survivors'."""
        self._cohort, self._commitments = cohort, commitments
        self._threshold, self._tries = cohort.topology.threshold, _MAX_TRIES
        self._num_wrong: Counter[int] = Counter()
        """By holder: the number of owners, if they are honest, of which its share is wrong."""
        self._doubted: set[int] = set()
        """Holders of shares that did not fit the others."""
        self._lost: dict[int, str] = {}
        """By owner whose secret is not found: why not."""
        self._at_fault: dict[int, int] = {}
        """Those of them whose honesty would take more corrupt holders than there can be: how many
        it would take."""
        self._given: dict[int, dict[int, Words]] = {}
        """By owner and holder: a share [5]."""
        for holder, reveal in sorted(reveals.items()):
            shares = np.frombuffer(reveal.shares, "<u8").astype(np.uint64)
            rows = shares.reshape(-1, shamir.LIMBS)
            for owner, share in zip(cohort.owners(holder, sharers), rows, strict=True):
                self._given.setdefault(owner, {})[holder] = share

    def secrets(self, owners: Iterable[int]) -> dict[int, bytes]:
        """The secrets of all `owners` by slot; raises InvalidShare if one is not found."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for owner in owners:
            groups.setdefault(self._points(owner, self._first(owner)), []).append(owner)
        by_owner: dict[int, bytes] = {}
        for points, group in groups.items():
            for owner, found in zip(group, self._of_group(points, group), strict=True):
                if secret := found or self._corrected(owner):
                    by_owner[owner] = secret
        if self._lost:
            at_fault = sorted(self._at_fault)
            if len(at_fault) > min(self._at_fault.values(), default=0):
                at_fault = []  # it is more likely that more holders are corrupt than there can be
            raise InvalidShare(
                self._lost[min(at_fault or self._lost)],
                hint="exclude that client" if at_fault else "wait for more clients' answers",
                **({"suspects": at_fault} if at_fault else {}),
            )
        return by_owner

    @property
    def suspects(self) -> tuple[int, ...]:
        """The holders with wrong shares of more owners than can be corrupt, ascending."""
        wrong = self._num_wrong.items()
        return tuple(sorted(each for each, num in wrong if num > self._most_corrupt(each)))

    def _most_corrupt(self, slot: int) -> int:
        """The number of corrupt clients that there can be among the holders of this slot's shares,
        which are those of whose secrets it holds shares: the session's part of them, at least 1."""
        num = len(self._cohort.holders[slot])
        return max(1, math.ceil(self._cohort.config.corrupt * num / 10_000))

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

    def _corrected(self, owner: int) -> bytes | None:
        """The owner's secret in spite of wrong shares; None if it is not found, which is noted.

        Up to half of the shares beyond the threshold may be wrong, or all of these where few
        choices of shares are to be tried.
        """
        by_holder, threshold = self._given[owner], self._threshold
        holders, num_spare = list(by_holder), len(by_holder) - threshold
        shares = np.array(list(by_holder.values()))
        wrong = shamir.wrong_places(self._points(owner, holders), shares, threshold)
        if wrong is not None:
            right = [holder for place, holder in enumerate(holders) if place not in wrong]
            if secret := self._secret(owner, right[:threshold]):
                self._note(owner, [holders[place] for place in wrong])
                return secret
            why = f"agree on a secret that contradicts the commitment of slot {owner}"
            self._lost[owner] = f"{len(right)} of {len(holders)} shares {why}"
            # If the owner is honest, fewer than the threshold of these shares are.
            num_corrupt = len(right) - threshold + 1
        elif math.comb(len(holders), threshold) <= self._tries:
            if secret := self._searched(owner, holders):
                return secret
            self._lost[owner] = (
                f"no {threshold} of {len(holders)} shares give the secret of slot {owner}"
            )
            num_corrupt = num_spare + 1
        else:
            self._lost[owner] = (
                f"more than {num_spare // 2} of {len(holders)} shares of slot {owner} are wrong"
            )
            num_corrupt = num_spare // 2 + 1
        if num_corrupt > self._most_corrupt(owner):
            self._at_fault[owner] = num_corrupt
        return None

    def _searched(self, owner: int, holders: list[int]) -> bytes | None:
        """The owner's secret by the first choice of shares that gives it, where doubted holders
        come last."""
        in_order = sorted(holders, key=self._doubted.__contains__)
        for chosen in combinations(in_order, self._threshold):
            self._tries -= 1
            if secret := self._secret(owner, chosen):
                # Each other one replaces one of these: the secret stays the same if it is right.
                others = [each for each in holders if each not in chosen]
                wrong = [each for each in others if not self._secret(owner, [*chosen[1:], each])]
                self._note(owner, wrong)
                return secret
        return None

    def _note(self, owner: int, wrong: list[int]) -> None:
        """Note the holders whose shares do not fit those that gave the owner's secret.

        Corrupt holders can make another polynomial give the same secret. It misses more shares than
        are counted here, as any two polynomials agree on fewer than the threshold.
        """
        self._doubted.update(wrong)
        if len(wrong) + self._most_corrupt(owner) <= len(self._given[owner]) - self._threshold:
            self._num_wrong.update(wrong)
