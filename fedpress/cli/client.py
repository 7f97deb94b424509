"""The commands `fedpress client ...`: a device, or a region as one, takes part."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from fedpress.command_line import (
    PATH,
    Group,
    admin_token,
    argument,
    heed_stop_signals,
    log,
    operator,
    read,
    secret_option,
    stopped,
    verbose,
)
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.privacy.accounting import PrivacyLane

if TYPE_CHECKING:
    from fedpress_client import Event, MaskingRules, PrivacyRules
    from fedpress_client.participation import Condition
    from fedpress_protocols.masking.graph import Adversary

client_certificate = click.option(
    "--client-certificate", type=PATH, help="PEM file, for a server that asks devices for one."
)
client_key = click.option("--client-key", type=PATH, help="PEM file of the certificate's key.")


_MASKING_OPTIONS = (
    click.option(
        "--require-masking",
        is_flag=True,
        help="Secure aggregation: send no update unmasked; every option below implies it.",
    ),
    click.option("--authority", help="Secure aggregation: public key of the enrolment authority."),
    click.option(
        "--certificate",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Secure aggregation: what `fedpress authority issue` wrote.",
    ),
    click.option(
        "--least-cohort",
        type=click.IntRange(min=3),
        help="Secure aggregation: clients in a sum, at least; 3 if not set.",
    ),
    click.option(
        "--semi-honest", is_flag=True, help="Secure aggregation: trust the server to only look."
    ),
    click.option(
        "--max-weight",
        type=click.IntRange(min=1),
        help="Secure aggregation: examples by which one update may count, at most.",
    ),
    click.option(
        "--allow-compressor",
        multiple=True,
        metavar="ID",
        help="Secure aggregation: a compressor that a plan may use; may be repeated.",
    ),
    click.option(
        "--min-support",
        type=click.IntRange(min=1),
        help="Secure aggregation: numbers of an update in a sum, at least.",
    ),
    click.option(
        "--max-rounds",
        type=click.IntRange(min=1),
        help="Secure aggregation: updates for one task, at most.",
    ),
)
_PRIVACY_OPTIONS = (
    click.option(
        "--require-privacy", is_flag=True, help="Differential privacy: decline plans without noise."
    ),
    click.option(
        "--max-epsilon",
        type=click.FloatRange(min=0, min_open=True),
        help="Differential privacy: spend no more, over all tasks; implies --require-privacy.",
    ),
    click.option(
        "--privacy-delta",
        type=click.FloatRange(min=1e-11, max=1, max_open=True),
        default=1e-5,
        help="Differential privacy: the delta at which --max-epsilon counts.",
    ),
    click.option(
        "--privacy-lane",
        type=click.Choice(get_args(PrivacyLane)),
        multiple=True,
        help="Differential privacy: a lane to accept, may be repeated; distributed and local if "
        "not set. In the central lane the server sees updates, and is trusted.",
    ),
)


def own_rules(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a device's own rules on masks and privacy, which no plan overrides."""
    for option in reversed((*_MASKING_OPTIONS, *_PRIVACY_OPTIONS)):
        command = option(command)
    return command


@click.group("client", cls=Group)
def client() -> None:
    """Take part in tasks from this device: join, identity, relay."""


@client.command("join")
@argument("url", help="The server's URL.")
@click.option(
    "--app",
    "app_path",
    required=True,
    metavar="MODULE:FACTORY",
    help="The trainer, as module:factory.",
)
@click.option(
    "--state-dir",
    type=PATH,
    default="fedpress-state",
    help="Identity, outbox and residual; private to this device.",
)
@click.option("--task", help="The task to join; needed if several run.")
@secret_option("token", "The enrolment token, on first contact.", is_needed=False)
@click.option("--seed", type=int, help="Makes training repeatable.")
@click.option(
    "--server-key",
    help="The server's public key, if you have it from its operator; no other is trusted.",
)
@click.option("--ca", type=PATH, help="PEM file of the authority that signed the server.")
@client_certificate
@client_key
@click.option("--proxy", help="Proxy, http://host:port.")
@click.option(
    "--fine-tune",
    type=click.IntRange(min=0),
    default=0,
    help="Epochs to train the last model on, for this device alone.",
)
@click.option(
    "--attribute", multiple=True, metavar="KEY=VALUE", help="Of this device, for a task's rules."
)
@click.option(
    "--max-upload-rate",
    type=click.FloatRange(min=1024),
    metavar="BYTES",
    help="Bytes a second to send, at most.",
)
@click.option(
    "--max-download-rate",
    type=click.FloatRange(min=1024),
    metavar="BYTES",
    help="Bytes a second to receive, at most.",
)
@click.option(
    "--max-disk-bytes",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="Bytes in --state-dir, at most; cached models make room.",
)
@click.option(
    "--max-model-bytes",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="Bytes of a model to download, at most; 4 GiB by default.",
)
@click.option(
    "--min-battery",
    type=click.FloatRange(0, 100),
    metavar="PERCENT",
    help="Take part on external power, or with this charge at least.",
)
@click.option(
    "--hours",
    multiple=True,
    metavar="BEGIN-END",
    help="Take part at these hours, such as 22:00-06:00; may be repeated.",
)
@click.option(
    "--avoid-interface",
    multiple=True,
    metavar="NAME",
    help="Take no part while the network is reached by this interface, such as 'wwan*'; may be "
    "repeated.",
)
@click.option(
    "--max-load",
    type=click.FloatRange(min=0, min_open=True),
    help="Take part while the machine's load is at most this a processor.",
)
@click.option(
    "--condition",
    multiple=True,
    metavar="MODULE:FUNCTION",
    help="Take part while this function returns True; may be repeated.",
)
@own_rules
@verbose
def join(
    url: str,
    app_path: str,
    state_dir: Path,
    task: str | None,
    token: str | None,
    seed: int | None,
    server_key: str | None,
    ca: Path | None,
    client_certificate: Path | None,
    client_key: Path | None,
    proxy: str | None,
    fine_tune: int,
    attribute: tuple[str, ...],
    max_upload_rate: float | None,
    max_download_rate: float | None,
    max_disk_bytes: int | None,
    max_model_bytes: int | None,
    min_battery: float | None,
    hours: tuple[str, ...],
    avoid_interface: tuple[str, ...],
    max_load: float | None,
    condition: tuple[str, ...],
    verbose: bool,
    **own: Any,
) -> None:
    """Take part in a task with your own trainer until the task ends."""
    from fedpress_client import Bandwidth, Client
    from fedpress_client.apps import load_trainer
    from fedpress_client.settings import MAX_MODEL_BYTES
    from fedpress_protocols.plan import TrainingTerms

    log(verbose)
    attributes = _attributes(attribute)
    masking, privacy = _own_rules(**own)
    conditions = _conditions(min_battery, hours, avoid_interface, max_load, condition)
    sys.path.insert(0, os.getcwd())
    sdk = Client(
        url,
        load_trainer(app_path),
        state_dir=state_dir,
        task=task,
        token=token,
        seed=seed,
        server_key=server_key,
        verify=str(ca) if ca else None,
        client_certificate=client_certificate,
        client_key=client_key,
        proxy=proxy,
        masking=masking,
        privacy=privacy,
        fine_tuning=TrainingTerms(local_epochs=fine_tune) if fine_tune else None,
        attributes=attributes,
        bandwidth=Bandwidth(upload=max_upload_rate, download=max_download_rate),
        max_disk_bytes=max_disk_bytes,
        max_model_bytes=max_model_bytes or MAX_MODEL_BYTES,
        should_participate=conditions,
        on_event=_print_changes(),
    )
    heed_stop_signals()
    try:
        ended = sdk.run()
    except KeyboardInterrupt:
        stopped()
    click.echo(
        f"task {ended.task} {ended.state}: {ended.included} uploads included, "
        f"{ended.not_included} not, {ended.pending} pending; model {ended.model}"
    )


def _print_changes() -> Callable[[Event], None]:
    """`_print_event`, but a condition that refuses again and again is printed once."""
    from fedpress_client.events import ClientWaiting, ParticipationPostponed

    refusing = ""

    def on_event(event: Event) -> None:
        nonlocal refusing
        before = refusing
        if not isinstance(event, ClientWaiting):
            refusing = event.condition if isinstance(event, ParticipationPostponed) else ""
        if not refusing or refusing != before:
            _print_event(event)

    return on_event


def _print_event(event: Event) -> None:
    """Print changes of the device's identity, the privacy that it spends, plans that its own rules
    refused, and why it takes no part, on stderr."""
    from fedpress_client import events

    match event:
        case events.DeviceEnrolled(client_id=client_id, key_id=key):
            line = f"enrolled as client {client_id}, key {key}"
        case events.ApprovalPending(key_id=key):
            line = f"this device waits for an operator's approval; its key is {key}"
        case events.DeviceApproved():
            line = "this device was approved"
        case events.KeyRotated(key_id=key):
            line = f"this device signs with key {key} from now on"
        case events.PrivacySpent():
            line = (
                f"privacy: epsilon {event.epsilon:.3g} at delta {event.delta:g} is spent in this "
                f"task, {event.total_epsilon:.3g} in all; participation {event.participations} of "
                f"{event.max_participations}; against {event.against}"
            )
        case events.ParticipationPostponed(reason=reason, seconds=seconds):
            line = f"not taking part: {reason}; asking again in {seconds:.0f} s"
        case events.AssignmentDeclined(reason=reason, rule=str()):
            line = f"declined: {reason}"
        case _:
            return
    click.echo(line, err=True)


@client.command("relay")
@argument("upper", help="The upper server's URL.")
@click.option("--region", required=True, metavar="URL", help="The URL of the region's own server.")
@admin_token
@click.option(
    "--config",
    type=PATH,
    required=True,
    help="The region's task: a TaskConfig without model and rounds, JSON.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=1,
    help="The region's rounds for one upward.",
)
@click.option(
    "--state-dir",
    type=PATH,
    default="fedpress-relay",
    help="Identity, outbox and residual towards the upper server.",
)
@click.option("--task", help="The upper task; needed if several run.")
@secret_option("token", "The upper server's enrolment token.", is_needed=False)
@click.option("--ca", type=PATH, help="PEM file of the authority that signed the upper server.")
@client_certificate
@client_key
@own_rules
@verbose
def relay(
    upper: str,
    region: str,
    admin_token: str,
    config: Path,
    rounds: int,
    state_dir: Path,
    task: str | None,
    token: str | None,
    ca: Path | None,
    client_certificate: Path | None,
    client_key: Path | None,
    verbose: bool,
    **own: Any,
) -> None:
    """Take part in an upper server's task as a whole region, with the region's devices."""
    from fedpress.relay import RegionalTrainer
    from fedpress_client import Client

    log(verbose)
    masking, privacy = _own_rules(**own)
    try:
        template = dict(json.loads(read(config)))
    except (ValueError, TypeError) as exc:
        raise ConfigurationError(f"{config} is not a JSON object: {exc}") from exc
    heed_stop_signals()
    with operator(region, admin_token) as server:
        trainer = RegionalTrainer(server, template, rounds, state_dir)
        sdk = Client(
            upper,
            trainer,
            state_dir=state_dir,
            task=task,
            token=token,
            verify=str(ca) if ca else None,
            client_certificate=client_certificate,
            client_key=client_key,
            masking=masking,
            privacy=privacy,
            on_event=_print_event,
        )
        try:
            ended = sdk.run()
        except KeyboardInterrupt:
            stopped()
        trainer.finish()
    click.echo(f"task {ended.task} {ended.state}: {ended.included} updates of the region included")


def _conditions(
    min_battery: float | None,
    hours: tuple[str, ...],
    avoid_interface: tuple[str, ...],
    max_load: float | None,
    names: tuple[str, ...],
) -> list[Condition]:
    """The conditions of the options, the cheapest first."""
    from fedpress_client.apps import load_condition
    from fedpress_client.participation import Battery, Hours, Interface, Load

    conditions: list[Condition] = []
    if hours:
        conditions.append(Hours(*hours))
    if min_battery is not None:
        conditions.append(Battery(min_battery))
    if avoid_interface:
        conditions.append(Interface(avoid_interface))
    if max_load is not None:
        conditions.append(Load(max_load))
    return conditions + [load_condition(name) for name in names]


def _own_rules(
    *,
    require_privacy: bool,
    max_epsilon: float | None,
    privacy_delta: float,
    privacy_lane: tuple[PrivacyLane, ...],
    **masking: Any,
) -> tuple[MaskingRules | None, PrivacyRules | None]:
    """The rules of the options of `own_rules`; None where no option is set."""
    from fedpress_client import PrivacyRules

    rules = _masking_rules(**masking)
    if not require_privacy and max_epsilon is None and not privacy_lane:
        return rules, None
    privacy = PrivacyRules(max_epsilon, privacy_delta)
    if privacy_lane:
        privacy = replace(privacy, lanes=frozenset(privacy_lane))
    return rules, privacy


def _masking_rules(
    *,
    require_masking: bool,
    authority: str | None,
    certificate: Path | None,
    least_cohort: int | None,
    semi_honest: bool,
    max_weight: int | None,
    allow_compressor: tuple[str, ...],
    min_support: int | None,
    max_rounds: int | None,
) -> MaskingRules | None:
    """The rules of the options on masks; None if no option is set."""
    from fedpress_client import MaskingRules
    from fedpress_protocols.signatures import from_base64url

    if authority is not None:
        from_base64url(authority, 32)  # refused here, before the token is used up
    adversary: Adversary | None = "semi-honest" if semi_honest else None
    rules = {
        "required": require_masking or None,
        "authority": authority,
        "certificate": certificate,
        "minimum": least_cohort,
        "adversary": adversary,
        "max_weight": max_weight,
        "compressors": allow_compressor or None,
        "min_support": min_support,
        "max_rounds": max_rounds,
    }
    set_by_user: dict[str, Any] = {
        name: value for name, value in rules.items() if value is not None
    }
    return MaskingRules(**set_by_user) if set_by_user else None


def _attributes(texts: Sequence[str]) -> dict[str, float | str]:
    """`KEY=VALUE` each; a value that reads as a finite number is one."""
    attributes: dict[str, float | str] = {}
    for text in texts:
        name, has_value, value = text.partition("=")
        if not has_value or name in attributes:
            raise ConfigurationError(
                f"--attribute {text!r}", hint="give KEY=VALUE, and each key once"
            )
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        attributes[name] = number if math.isfinite(number) else value
    return attributes
