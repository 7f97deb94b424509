"""Authentication and authorization of operators: tokens with roles, and the permissions of a role.

The token in the settings belongs to the first administrator, who creates the others. The database
stores hashes of those, and this process caches them for at most `SEEN_WITHIN` seconds: a token
revoked on another server is refused here within a second.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple, NoReturn

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
"""Permissions. see: read non-secret data; run: tasks, rounds, models, aliases; enrol: enrolment
tokens and devices; administer: operators, the audit log, deletion, the server itself."""

MAY: dict[Role, frozenset[Permission]] = {
    "viewer": frozenset({"see"}),
    "operator": frozenset({"see", "run"}),
    "registrar": frozenset({"see", "enrol"}),
    "admin": frozenset({"see", "run", "enrol", "administer"}),
}
SETTINGS_TOKEN = "settings-token"  # noqa: S105
"""The actor with the token in the settings."""
METRICS_TOKEN = "metrics-token"  # noqa: S105
SEEN_WITHIN = 1.0
"""Maximum seconds until a change of a token on one server takes effect on all."""
UNGUESSABLE = 24
"""Length from which the settings' token cannot be guessed. A shorter one is not even compared for
an address that has sent too many wrong ones."""

_log = logging.getLogger(__name__)

_COLUMNS = [operators.c[name] for name in OperatorStatus.model_fields]


_CLOSED = "this server has no admin token"
_TO_OPEN = "set FEDPRESS_ADMIN_TOKEN or FEDPRESS_ADMIN_TOKEN_FILE and restart it"


class Identity(NamedTuple):
    """An operator whose token is valid now."""

    actor: str
    """The name in the audit log."""
    role: Role
    operator_id: str = ""
    """Empty for the token in the settings."""


class Operators:
    """Authenticates operators by the bearer token of a request."""

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

    async def start(self, name: str, **details: str) -> None:
        """Record the start of the server `name` in the audit log, and from now on its refusals."""
        now = self._clock()
        head = await self._database.write(
            lambda c: audit.add(c, now, audit.SERVER, "server.started", name, **details)
        )
        _log.info("the audit log is at %s", head)
        self._telling = asyncio.create_task(self._tell_forever())

    async def warn_if_closed(self) -> None:
        """Log a warning if no token opens the admin API."""
        await self._read()
        if self._settings_hash is None and not self._known:
            _log.warning("%s, so no operator can use it; %s", _CLOSED, _TO_OPEN)

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
        """Like `check`, but also accepts the metrics token."""
        address = address_of(request)
        if self._metrics_hash is not None and self._refusals.may_try(address):
            with suppress(InvalidToken):
                token_hash = hash_of(bearer_token(request))
                if hmac.compare_digest(token_hash, self._metrics_hash):
                    return METRICS_TOKEN
        return await self.check(request, permission)

    async def check(self, request: Request, permission: Permission) -> str:
        """The actor of the request's token, for the audit log.

        Raises InvalidToken, RoleRequired, or TooManyRequests after too many wrong tokens. A valid
        token gets the last only if it is the settings' and short.
        """
        address = address_of(request)
        try:
            token_hash = hash_of(bearer_token(request))
        except InvalidToken:
            self._refusals.note("no-token", address)
            raise
        return self.authorize(await self.identify(token_hash, address), permission, address)

    async def identify(self, token_hash: str, address: str) -> Identity:
        """The operator whose token has this hash; raises as `check`, but not RoleRequired."""
        if self._is_settings(token_hash, address):
            return Identity(SETTINGS_TOKEN, "admin")
        operator = await self._find(token_hash, address)
        if operator is None:
            self._refuse_unknown(address)
        if operator.revoked_at is not None:
            self._refusals.note("revoked", address, operator.operator_id)
            raise InvalidToken(
                "this operator's token was revoked", hint="ask an admin for a new one"
            )
        if self._clock() >= operator.expires_at:
            self._refusals.note("expired", address, operator.operator_id)
            raise InvalidToken(
                "this operator's token has expired", hint="ask an admin for a new one"
            )
        return Identity(f"operator:{operator.operator_id}", operator.role, operator.operator_id)

    def authorize(self, identity: Identity, permission: Permission, address: str) -> str:
        """The actor, for the audit log; raises RoleRequired."""
        if permission not in MAY[identity.role]:
            self._refusals.note("role", address, identity.operator_id)
            able = [role for role in ROLES if permission in MAY[role]]
            raise RoleRequired(
                f"the role {identity.role} is not allowed to do this; required: "
                f"{' or '.join(able)}",
                role=identity.role,
                roles=able,
            )
        return identity.actor

    def _is_settings(self, token_hash: str, address: str) -> bool:
        if self._settings_hash is None:
            return False
        if self._is_guessable and not self._refusals.may_try(address):
            return False
        return hmac.compare_digest(token_hash, self._settings_hash)

    def _refuse_unknown(self, address: str) -> NoReturn:
        self._refusals.note("unknown", address)
        if self._settings_hash is None and not self._known:
            raise InvalidToken(_CLOSED, hint=_TO_OPEN)
        raise InvalidToken(
            "the operator's token is wrong",
            hint="use the admin token, or one that fedpress server operator create printed",
        )

    async def _find(self, token_hash: str, address: str) -> OperatorStatus | None:
        if not 0 <= self._clock() - self._read_at < SEEN_WITHIN:
            await self._read()
        operator = self._known.get(token_hash)
        if operator is None and self._refusals.may_try(address):
            await self._read()  # it may have just been created on another server
            operator = self._known.get(token_hash)
        return operator

    async def _read(self) -> None:
        """Reload all tokens; a caller that waited for a reload that started later does not repeat
        it."""
        asked_at = self._begun
        async with self._reading:
            if self._begun > asked_at:
                return
            now = self._clock()
            self._known = await self._database.read(_by_hash)
            self._begun += 1  # after success only: a failed reload serves nobody
            self._read_at = now

    async def create(self, new: OperatorRequest, by: str) -> OperatorToken:
        """Create a token, of which only the hash is stored."""
        token, now = "fpo_" + secrets.token_urlsafe(24), self._clock()
        status = OperatorStatus(
            operator_id=secrets.token_hex(6),
            role=new.role,
            note=new.note,
            created_at=now,
            created_by=by,
            expires_at=now + new.expires_in,
        )

        def write(connection: Connection) -> None:
            row = {**status.model_dump(), "token_hash": hash_of(token)}
            connection.execute(sa.insert(operators), row)
            details = {"role": status.role, "note": status.note, "expires": int(status.expires_at)}
            audit.add(connection, now, by, "operator.created", status.operator_id, **details)

        await self._database.write(write)
        await self._read()
        return OperatorToken(**status.model_dump(), token=token)

    async def listed(self, after: str, limit: int) -> list[OperatorStatus]:
        """The first `limit` operators by id after `after`; without secrets."""
        query = sa.select(*_COLUMNS).where(operators.c.operator_id > after)
        query = query.order_by(operators.c.operator_id).limit(limit)
        rows = await self._database.read(lambda c: c.execute(query).all())
        return [OperatorStatus(**row._mapping) for row in rows]

    async def revoke(self, operator_id: str, by: str) -> OperatorStatus:
        """Revoke a token; idempotent. Raises NotFound."""
        now = self._clock()

        def write(connection: Connection) -> OperatorStatus:
            query = sa.select(*_COLUMNS).where(operators.c.operator_id == operator_id)
            row = connection.execute(query).one_or_none()
            if row is None:
                raise NotFound(f"no operator {operator_id[:64]!r}")
            operator = OperatorStatus(**row._mapping)
            if operator.revoked_at is None:
                is_this = operators.c.operator_id == operator_id
                connection.execute(sa.update(operators).where(is_this).values(revoked_at=now))
                audit.add(connection, now, by, "operator.revoked", operator_id, role=operator.role)
                operator = operator.model_copy(update={"revoked_at": now})
            return operator

        operator = await self._database.write(write)
        await self._read()
        return operator

    async def write_refusals(self) -> None:
        """Write the refusals since the last call to the audit log."""
        if write := self._refusals.take():
            try:
                await self._database.write(write)
            except Exception as exc:  # retried with the next window
                self._refusals.put_back()
                message = "could not write refused operator requests to the audit log"
                outages.tell(_log, exc, message)


def _by_hash(connection: Connection) -> dict[str, OperatorStatus]:
    rows = connection.execute(sa.select(operators.c.token_hash, *_COLUMNS))
    return {
        row.token_hash: OperatorStatus(**{c.name: row._mapping[c.name] for c in _COLUMNS})
        for row in rows
    }
