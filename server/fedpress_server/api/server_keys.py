"""Route for the key that signs receipts, with the rollovers to it from earlier keys."""

from __future__ import annotations

from fastapi import APIRouter

from fedpress_protocols.key_rollover import ServerKeys
from fedpress_protocols.signatures import to_base64url
from fedpress_server.api.listeners import Parts
from fedpress_server.api.problems import responses
from fedpress_server.api.routing import DeviceRoute
from fedpress_server.identity.signing import statements

server_key_routes = APIRouter(
    prefix="/v1", route_class=DeviceRoute, tags=["devices"], responses=responses(401)
)


@server_key_routes.get("/server-keys")
async def get_server_keys(services: Parts) -> ServerKeys:
    """The key that signs now, and the statements by which each key before it named the next one, as
    the database has them: a device that pinned an earlier key follows them to the newest
    (SPEC-signatures.md, "When the server's key changes")."""
    keys = services.server_keys
    rollovers = await services.database.read(statements)
    newest = rollovers[-1].succession.successor if rollovers else to_base64url(keys.current.public)
    return ServerKeys(server_key=newest, successions=tuple(rollovers))
