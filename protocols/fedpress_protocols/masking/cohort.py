"""The cohort of a session once its roster is closed: slots, graph and share holders.

This is the server's view of all clients; a client computes its own part by the same rules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from fedpress_protocols.masking.messages import Advertise, Listing, Roster
from fedpress_protocols.masking.transcript import SessionConfig, Topology


@dataclass(frozen=True)
class Cohort:
    """The closed roster and the values derived from it; `members` are in the order of their
    slots."""

    config: SessionConfig
    members: tuple[Advertise, ...]

    @classmethod
    def of(cls, config: SessionConfig, advertised: Iterable[Advertise]) -> Cohort:
        return cls(config, tuple(sorted(advertised, key=lambda each: each.row.identity)))

    @cached_property
    def listing(self) -> Listing:
        return Listing(tuple(each.row for each in self.members))

    @cached_property
    def sid(self) -> bytes:
        return self.config.session_id(self.listing.root)

    @cached_property
    def topology(self) -> Topology:
        return Topology.of(self.config, len(self.members), self.sid)

    @cached_property
    def slots(self) -> Mapping[bytes, int]:
        return {each.certificate.identity: slot for slot, each in enumerate(self.members)}

    @cached_property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.topology.neighbours(slot) for slot in range(len(self.members)))

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.topology.holders(slot) for slot in range(len(self.members)))

    def place(self, owner: int, neighbour: int) -> int:
        """The index of `neighbour` in the owner's list of sealed shares."""
        return bisect_left(self.neighbours[owner], neighbour)

    def point(self, owner: int, holder: int) -> int:
        """The x coordinate of `holder`'s share of the owner's secrets."""
        return bisect_left(self.holders[owner], holder) + 1

    def roster(self, slot: int) -> Roster:
        """The unsigned Roster message for the client in `slot`."""
        near = sorted({slot, *self.neighbours[slot]})
        return Roster(self.listing, tuple(self.members[each] for each in near))

    def owners(self, holder: int, sharers: frozenset[int]) -> list[int]:
        """The owners among `sharers` whose shares a holder has: those of its `Reveal`, in order."""
        return [owner for owner in self.holders[holder] if owner in sharers]

    def needed(self, sharers: frozenset[int], survivors: frozenset[int]) -> list[int]:
        """The secrets to reconstruct: the seeds of the survivors, and the mask secrets of the other
        clients that a survivor masked with."""
        return [
            slot
            for slot in sorted(sharers)
            if slot in survivors or not survivors.isdisjoint(self.neighbours[slot])
        ]
