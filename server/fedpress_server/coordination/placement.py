"""The choice of clients and of their profiles, where a task's selection or its policies choose."""

from __future__ import annotations

import secrets

from fedpress_server.coordination.adaptive import Rates
from fedpress_server.coordination.commands import GivePlace, GivePlaces, Happen, LeftQueue
from fedpress_server.coordination.live import LiveTask
from fedpress_server.rounds import ClientCheckedIn, CohortChosen
from fedpress_server.rounds.selection import choose, stream_of
from fedpress_server.storage import participants
from fedpress_server.storage.database import Database


def check_in_of(client_id: str, profile: str | None = None) -> ClientCheckedIn:
    """The event of a client that asks for work, with an assignment drawn for it."""
    return ClientCheckedIn(client_id, secrets.token_urlsafe(16), profile)


class Placement:
    """Decides on places, one task at a time; `is_shared`: whether servers share who waits."""

    def __init__(self, database: Database, rates: Rates, *, is_shared: bool) -> None:
        self._database = database
        self._rates = rates
        self._is_shared = is_shared

    def is_due(self, task: LiveTask, now: float) -> bool:
        """Whether it is time to choose among those who wait."""
        attempt = task.attempt
        if attempt is None or not attempt.round.chooses or attempt.round.phase != "collecting":
            return False
        if task.record.held_at is not None:
            return False
        places, maximum = attempt.round.places_left, attempt.round.may_come
        return task.candidates.is_due(task.config.selection, attempt.key, places, maximum, now)

    async def resolve(
        self, task: LiveTask, command: GivePlace | GivePlaces, now: float
    ) -> Happen | None:
        """The event that the command comes to for the task as it is; None without a place.

        To be called with the task's newest state, which nobody changes meanwhile: each choice may
        hang on the ones before.
        """
        attempt = task.attempt
        if attempt is None:
            return None
        if isinstance(command, GivePlace):
            if not attempt.has_place_for(command.client_id):
                return None
            said = {command.client_id: command.uplink}
            profiles = await self._rates.profiles_for(task.config, attempt, said, now)
            return Happen(check_in_of(command.client_id, profiles[0]))
        if not self.is_due(task, now):
            return None
        name, number, attempt_number = attempt.key
        waiting = [each for each in task.candidates.waiting(now) if attempt.round.admits(each)]
        table = await self._database.read(lambda c: participants.candidates(c, name, waiting))
        stream = stream_of(task.config.seed or 0, name, number, attempt_number, attempt.seq + 1)
        chosen = tuple(choose(task.config.selection, table, attempt.round.places_left, stream))
        said = {each: task.candidates.uplink(each) for each in chosen}
        profiles = await self._rates.profiles_for(task.config, attempt, said, now)
        event = CohortChosen(tuple(map(check_in_of, chosen, profiles)))
        return Happen(event, payload=LeftQueue(chosen) if self._is_shared else None)
