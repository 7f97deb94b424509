"""The permission that each route requires of an operator, in one table.

A route for operators cannot be added without a line here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedpress_server.identity.operators import Permission

PERMISSIONS: Mapping[tuple[str, str], Permission] = {
    # What devices read too.
    ("GET", "/v1/tasks"): "see",
    ("GET", "/v1/tasks/{task}"): "see",
    ("GET", "/v1/tasks/{task}/rounds"): "see",
    ("GET", "/v1/tasks/{task}/rounds/{number}"): "see",
    ("GET", "/v1/models/{digest}"): "see",
    ("GET", "/v1/models/{digest}/coded"): "see",
    ("GET", "/v1/models/{digest}/from/{base}"): "see",
    ("GET", "/v1/models/{digest}/over/{base}"): "see",
    # What tells about the server.
    ("GET", "/metrics"): "see",
    ("GET", "/openapi.json"): "see",
    ("GET", "/docs"): "see",
    # Tasks and their rounds.
    ("POST", "/v1/admin/tasks"): "run",
    ("GET", "/v1/admin/tasks/{task}/configuration"): "see",
    ("POST", "/v1/admin/tasks/{task}/continue"): "run",
    ("POST", "/v1/admin/tasks/{task}/pause"): "run",
    ("POST", "/v1/admin/tasks/{task}/resume"): "run",
    ("POST", "/v1/admin/tasks/{task}/finish"): "run",
    ("POST", "/v1/admin/tasks/{task}/cancel"): "run",
    ("POST", "/v1/admin/tasks/{task}/abort-round"): "run",
    # Models.
    ("PUT", "/v1/admin/models/{digest}"): "run",
    ("POST", "/v1/admin/models/collect"): "administer",
    ("GET", "/v1/admin/tasks/{task}/versions"): "see",
    ("GET", "/v1/admin/tasks/{task}/versions/{which}"): "see",
    ("GET", "/v1/admin/tasks/{task}/aliases"): "see",
    ("PUT", "/v1/admin/tasks/{task}/aliases/{alias}"): "run",
    ("POST", "/v1/admin/tasks/{task}/aliases/{alias}/rollback"): "run",
    # Devices.
    ("GET", "/v1/admin/tokens"): "see",
    ("POST", "/v1/admin/tokens"): "enrol",
    ("POST", "/v1/admin/tokens/{token_id}/revoke"): "enrol",
    ("GET", "/v1/admin/clients"): "see",
    ("GET", "/v1/admin/clients/{client_id}"): "see",
    ("POST", "/v1/admin/clients/{client_id}/approve"): "enrol",
    ("POST", "/v1/admin/clients/{client_id}/reject"): "enrol",
    ("POST", "/v1/admin/clients/{client_id}/revoke"): "enrol",
    # The server itself.
    ("GET", "/v1/admin/restores"): "see",
    ("GET", "/v1/admin/operators"): "administer",
    ("POST", "/v1/admin/operators"): "administer",
    ("DELETE", "/v1/admin/operators/{operator_id}"): "administer",
    ("GET", "/v1/admin/audit"): "administer",
    ("GET", "/v1/admin/fleet"): "see",
    ("GET", "/v1/admin/servers"): "see",
    ("GET", "/v1/admin/log-level"): "see",
    ("PUT", "/v1/admin/log-level"): "administer",
    # The console.
    ("GET", "/console"): "see",
    ("POST", "/console/logout"): "see",
    ("GET", "/console/create"): "run",
    ("POST", "/console/create"): "run",
    ("GET", "/console/compare"): "see",
    ("GET", "/console/compare.csv"): "see",
    ("GET", "/console/tasks/{task}"): "see",
    ("GET", "/console/tasks/{task}/rounds/{number}"): "see",
    ("GET", "/console/tasks/{task}/do/{action}"): "run",
    ("POST", "/console/tasks/{task}/do/{action}"): "run",
    ("GET", "/console/tasks/{task}/models"): "see",
    ("GET", "/console/tasks/{task}/difference"): "see",
    ("GET", "/console/tasks/{task}/promote/{version}"): "run",
    ("POST", "/console/tasks/{task}/promote/{version}"): "run",
    ("GET", "/console/tasks/{task}/rollback/{alias}"): "run",
    ("POST", "/console/tasks/{task}/rollback/{alias}"): "run",
    ("GET", "/console/models/{digest}"): "see",
    ("GET", "/console/devices"): "see",
    ("GET", "/console/devices/{client_id}"): "see",
    ("GET", "/console/devices/{client_id}/{action}"): "enrol",
    ("POST", "/console/devices/{client_id}/{action}"): "enrol",
    ("GET", "/console/audit"): "administer",
    ("POST", "/console/audit"): "administer",
    ("GET", "/console/settings"): "administer",
    ("POST", "/console/settings"): "administer",
}


def permission_of(methods: Iterable[str] | None, path: str) -> Permission:
    """Return the permission that the route requires; raises LookupError without a line for it."""
    of = sorted(methods or ())
    needed = {PERMISSIONS.get((method, path)) for method in of}
    if len(needed) != 1 or (permission := needed.pop()) is None:
        raise LookupError(
            f"{'/'.join(of)} {path}: say in PERMISSIONS in "
            "server/fedpress_server/api/permissions.py what an operator has to be allowed for it"
        )
    return permission
