"""Who operates the server: tokens with a role each, and what a role may do.

The token of the settings is the first administrator and makes the others. Of those the database has
hashes, and this process a copy that is never older than `SEEN_WITHIN`: with the next second a token
that was revoked on another server is refused by this one too.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NoReturn

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from starlette.requests import Request

from fedpress_protocols.errors import InvalidToken, NotFound, RoleRequired
from fedpress_protocols.operators import (
    ROLES,
    OperatorRequest,
    OperatorStatus,
    OperatorToken,
    Role,
)
from fedpress_server.identity import audit
from fedpress_server.identity.authentication import bearer_token, hash_of
from fedpress_server.identity.limits import address_of
from fedpress_server.identity.refusals import WINDOW_SECONDS, Refusals
from fedpress_server.observing import outages
from fedpress_server.storage.database import Database
from fedpress_server.storage.tables import operators

Permission = Literal["see", "run", "enrol", "administer"]
"""see: read what is no secret; run: tasks, rounds, models, aliases; enrol: enrolment tokens and
devices; administer: operators, the audit log, what is given up for good, the server itself."""

MAY: dict[Role, frozenset[Permission]] = {
    "viewer": frozenset({"see"}),
    "operator": frozenset({"see", "run"}),
    "registrar": frozenset({"see", "enrol"}),
    "admin": frozenset({"see", "run", "enrol", "administer"}),
}
SETTINGS_TOKEN = "settings-token"  # noqa: S105
"""The actor who has the token of the settings."""
METRICS_TOKEN = "metrics-token"  # noqa: S105
SEEN_WITHIN = 1.0
"""Seconds after which every server of a database knows what another did to a token, at most."""
UNGUESSABLE = 24
"""Characters from which on nobody finds the settings' token by trying. A shorter one is not even
compared for an address that has sent too many wrong ones."""

_log = logging.getLogger(__name__)

_COLUMNS = [operators.c[name] for name in OperatorStatus.model_fields]


class Operators:
    """Tells operators from strangers by the bearer token of a request."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        refusals: Refusals,
        *,
        settings_token: str | None,
        metrics_token: str | None = None,
    ) -> None:
        self._database = database
        self._clock = clock
        self._refusals = refusals
        self._settings_hash = hash_of(settings_token) if settings_token else None
        self._metrics_hash = hash_of(metrics_token) if metrics_token else None
        self._is_guessable = len(settings_token or "") < UNGUESSABLE
        self._known: dict[str, OperatorStatus] = {}
        self._read_at = -SEEN_WITHIN
        self._reading = asyncio.Lock()
        self._begun = 0
        self._telling: asyncio.Task[None] | None = None

    async def start(self, name: str, **told: str) -> None:
        """Tell the audit log that the server `name` begins, and from now on what it refuses."""
        now = self._clock()
        head = await self._database.write(
            lambda c: audit.add(c, now, audit.SERVER, "server.started", name, **told)
        )
        _log.info("the audit log is at %s", head)
        self._telling = asyncio.create_task(self._tell_forever())

    async def stop(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        await self.write_refusals()

    async def _tell_forever(self) -> None:
        while True:
            await asyncio.sleep(WINDOW_SECONDS)
            await self.write_refusals()

    async def check_reader(self, request: Request, permission: Permission) -> str:
        """As `check`, for what the metrics token opens, too."""
        address = address_of(request)
        if self._metrics_hash is not None and self._refusals.may_try(address):
            with suppress(InvalidToken):
                token_hash = hash_of(bearer_token(request))
                if hmac.compare_digest(token_hash, self._metrics_hash):
                    return METRICS_TOKEN
        return await self.check(request, permission)

    async def check(self, request: Request, permission: Permission) -> str:
        """The actor whose token the request carries, for the audit log.

        Raises InvalidToken, RoleRequired, or TooManyRequests for wrong tokens that come too fast. A
        right token is refused with that only if it is the settings' and short.
        """
        address = address_of(request)
        try:
            token_hash = hash_of(bearer_token(request))
        except InvalidToken:
            self._refusals.note("no-token", address)
            raise
        if self._is_settings(token_hash, address):
            return SETTINGS_TOKEN
        found = await self._find(token_hash, address)
        if found is None:
            self._refuse_unknown(address)
        if found.revoked_at is not None:
            self._refusals.note("revoked", address, found.operator_id)
            raise InvalidToken(
                "this operator's token was revoked", hint="ask an admin for a new one"
            )
        if self._clock() >= found.expires_at:
            self._refusals.note("expired", address, found.operator_id)
            raise InvalidToken(
                "this operator's token has expired", hint="ask an admin for a new one"
            )
        if permission not in MAY[found.role]:
            self._refusals.note("role", address, found.operator_id)
            able = [role for role in ROLES if permission in MAY[role]]
            raise RoleRequired(
                f"the role {found.role} may not do this; {' or '.join(able)} may",
                role=found.role,
                roles=able,
            )
        return f"operator:{found.operator_id}"

    def _is_settings(self, token_hash: str, address: str) -> bool:
        if self._settings_hash is None:
            return False
        if self._is_guessable and not self._refusals.may_try(address):
            return False
        return hmac.compare_digest(token_hash, self._settings_hash)

    def _refuse_unknown(self, address: str) -> NoReturn:
        self._refusals.note("unknown", address)
        if self._settings_hash is None and not self._known:
            raise InvalidToken(
                "this server has no admin token",
                hint="set FEDPRESS_ADMIN_TOKEN or FEDPRESS_ADMIN_TOKEN_FILE and restart it",
            )
        raise InvalidToken(
            "the operator's token is wrong",
            hint="use the admin token, or one that fedpress server operator create printed",
        )

    async def _find(self, token_hash: str, address: str) -> OperatorStatus | None:
        if not 0 <= self._clock() - self._read_at < SEEN_WITHIN:
            await self._read()
        found = self._known.get(token_hash)
        if found is None and self._refusals.may_try(address):
            await self._read()  # it may have been made a moment ago, on another server
            found = self._known.get(token_hash)
        return found

    async def _read(self) -> None:
        """All of them anew; whoever waits for a reading that began later needs none of his own."""
        asked_at = self._begun
        async with self._reading:
            if self._begun > asked_at:
                return
            now = self._clock()
            self._known = await self._database.read(_by_hash)
            self._begun += 1  # after it succeeded: a reading that failed is nobody's
            self._read_at = now

    async def create(self, asked: OperatorRequest, by: str) -> OperatorToken:
        """A new token, of which only the hash is kept."""
        token, now = "fpo_" + secrets.token_urlsafe(24), self._clock()
        status = OperatorStatus(
            operator_id=secrets.token_hex(6),
            role=asked.role,
            note=asked.note,
            created_at=now,
            created_by=by,
            expires_at=now + asked.expires_in,
        )

        def write(connection: Connection) -> None:
            row = {**status.model_dump(), "token_hash": hash_of(token)}
            connection.execute(sa.insert(operators), row)
            told = {"role": status.role, "note": status.note, "expires": int(status.expires_at)}
            audit.add(connection, now, by, "operator.created", status.operator_id, **told)

        await self._database.write(write)
        await self._read()
        return OperatorToken(**status.model_dump(), token=token)

    async def listed(self, after: str, limit: int) -> list[OperatorStatus]:
        """The first `limit` by their ids, those after `after`; without secrets."""
        query = sa.select(*_COLUMNS).where(operators.c.operator_id > after)
        query = query.order_by(operators.c.operator_id).limit(limit)
        rows = await self._database.read(lambda c: c.execute(query).all())
        return [OperatorStatus(**row._mapping) for row in rows]

    async def revoke(self, operator_id: str, by: str) -> OperatorStatus:
        """Refuse the token from now on; done again, it changes nothing. Raises NotFound."""
        now = self._clock()

        def write(connection: Connection) -> OperatorStatus:
            query = sa.select(*_COLUMNS).where(operators.c.operator_id == operator_id)
            row = connection.execute(query).one_or_none()
            if row is None:
                raise NotFound(f"no operator {operator_id[:64]!r}")
            found = OperatorStatus(**row._mapping)
            if found.revoked_at is None:
                is_this = operators.c.operator_id == operator_id
                connection.execute(sa.update(operators).where(is_this).values(revoked_at=now))
                audit.add(connection, now, by, "operator.revoked", operator_id, role=found.role)
                found = found.model_copy(update={"revoked_at": now})
            return found

        found = await self._database.write(write)
        await self._read()
        return found

    async def write_refusals(self) -> None:
        """Tell the audit log of what was refused since the last time."""
        if write := self._refusals.take():
            try:
                await self._database.write(write)
            except Exception as exc:  # tried again with the next window
                self._refusals.put_back()
                told = "refused attempts to operate the server could not be written down"
                outages.tell(_log, exc, told)


def _by_hash(connection: Connection) -> dict[str, OperatorStatus]:
    rows = connection.execute(sa.select(operators.c.token_hash, *_COLUMNS))
    return {
        row.token_hash: OperatorStatus(**{c.name: row._mapping[c.name] for c in _COLUMNS})
        for row in rows
    }
