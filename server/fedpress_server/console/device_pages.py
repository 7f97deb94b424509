"""The console's pages of devices: the list, one device with what it did, and decisions about it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy.engine import Connection

from fedpress_protocols.enrolment import DeviceState
from fedpress_protocols.errors import Conflict
from fedpress_protocols.messages import Identifier, SignedReceipt
from fedpress_server.api.listeners import Parts
from fedpress_server.api.routing import By
from fedpress_server.console.rendering import confirm, render
from fedpress_server.console.routing import ConsoleRoute, form_of
from fedpress_server.storage import identities
from fedpress_server.storage.identities import Contribution, Participation

MAX_ROWS = 200
"""Rows of a table on one page."""
DeviceAction = Literal["approve", "reject", "revoke"]

device_pages = APIRouter(prefix="/console", route_class=ConsoleRoute, include_in_schema=False)


@device_pages.get("/devices")
async def show_devices(
    request: Request,
    services: Parts,
    state: DeviceState | Literal[""] = "",
    after: Identifier | None = None,
) -> Response:
    """The enrolled devices, in order of enrolment."""
    devices = await services.device_registry.devices(state or None, after, MAX_ROWS + 1)
    more = devices[MAX_ROWS - 1].client_id if len(devices) > MAX_ROWS else None
    return render(request, "devices.html", devices=devices[:MAX_ROWS], state=state, more=more)


class _Row(NamedTuple):
    """An assignment of the device, and what became of it."""

    of: Participation
    reason: str


@device_pages.get("/devices/{client_id}")
async def show_device(request: Request, client_id: Identifier, services: Parts) -> Response:
    """A device: its software, its clock, its link, and what it contributed."""
    device, former_keys = await services.device_registry.device(client_id)

    def read(connection: Connection) -> tuple[list[Contribution], list[Participation]]:
        return (
            identities.contributions(connection, client_id),
            identities.participations(connection, client_id, MAX_ROWS),
        )

    contributions, newest = await services.database.read(read)
    rows = [
        _Row(
            each,
            SignedReceipt.model_validate_json(each.receipt).receipt.reason
            if each.receipt
            else "open",
        )
        for each in newest
    ]
    return render(
        request,
        "device.html",
        device=device,
        former_keys=former_keys,
        contributions=contributions,
        rows=rows,
        most=MAX_ROWS,
    )


@device_pages.get("/devices/{client_id}/{action}")
async def confirm_device(
    request: Request, client_id: Identifier, action: DeviceAction, services: Parts
) -> Response:
    """The consequence of a decision about a device."""
    device, _ = await services.device_registry.device(client_id)
    consequence = {
        "approve": "The device may take part from now on. Compare the key with the one that the "
        "device itself shows; if they differ, somebody else may have used the token.",
        "reject": "The device may not take part; it can be approved later.",
        "revoke": "The device is refused permanently. This cannot be undone.",
    }[action]
    return confirm(
        request,
        f"{action.capitalize()} {client_id}",
        consequence,
        "/console/devices",
        hidden={"key": device.key_id},
        facts=[("Key", device.key_id), ("Name that it gives itself", device.name or "–")],
    )


@device_pages.post("/devices/{client_id}/{action}")
async def decide(
    request: Request, client_id: Identifier, action: DeviceAction, services: Parts, by: By
) -> Response:
    """Approve, reject or revoke a device; approve it only with the key that the form showed."""
    devices = services.device_registry
    if action == "approve":
        device, _ = await devices.device(client_id)
        shown = form_of(request).get("key", "")
        if shown != device.key_id:
            raise Conflict(
                f"client {client_id} has key {device.key_id}, and the form is for key "
                f"{shown[:64] or 'none'}",
                hint="look at the device again, and compare its key with what the device shows",
            )
        await devices.approve(client_id, by)
    elif action == "reject":
        await devices.reject(client_id, by)
    else:
        await devices.revoke(client_id, by)
    return RedirectResponse("/console/devices", 303)
