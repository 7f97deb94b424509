"""The privacy budget of a Flower client: the device's own account, over all runs.

    budgets/<device>/privacy.json    in the state folder; <device> as the node's configuration says

A node without a name of its own shares one account with the others of its folder: it then counts
more than was spent, never less.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedpress_client.privacy_budget import PrivacyBudget, PrivacyRules
from fedpress_client.state import StateDirectory
from fedpress_flower import envelope
from fedpress_flower.client.account import device_name
from fedpress_flower.client.terms import Terms
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, PlanDeclined
from fedpress_protocols.plan import RoundPlan

MAX_EPSILON = "fedpress-max-epsilon"
"""In the node's configuration, which is its owner's: the most that all tasks spend together."""
_PRIVATE = "private"
_log = logging.getLogger(__name__)


def budget_of(context: Context, folder: Path, rules: PrivacyRules) -> PrivacyBudget:
    """The durable account of this device; raises ConfigurationError for a MAX_EPSILON that is no
    positive number."""
    most = context.node_config.get(MAX_EPSILON)
    if most is not None:
        try:
            limit = float(most)
        except ValueError as exc:
            raise ConfigurationError(
                f"{MAX_EPSILON} is {most!r}, where a positive number is due"
            ) from exc
        rules = replace(rules, max_epsilon=min(limit, rules.max_epsilon or limit))
    path = folder / "budgets" / (device_name(context) or "device")
    return PrivacyBudget(StateDirectory.open(path), rules)


def check_budget(context: Context, budget: PrivacyBudget, plan: RoundPlan) -> None:
    """Raise PlanDeclined for a plan that the device refuses, before it trains."""
    if plan.privacy is None and _is_private(context):
        raise PlanDeclined(
            f"the plan of round {plan.round} of task {plan.task!r} sends updates without noise, "
            "and this client has joined the run when it had privacy terms",
            hint="restore the Plan's privacy terms, or begin another run",
            rule="privacy terms",
        )
    try:
        budget.check(plan)
    except PlanDeclined as exc:
        if exc.members.get("rule") not in ("participations", "separation", "privacy terms"):
            raise
        hint = f"{exc.hint}; the server's Plan(task=...) names the task, over all of its runs"
        raise PlanDeclined(exc.detail, hint=hint, **exc.members) from exc


def spend(budget: PrivacyBudget, plan: RoundPlan) -> None:
    """Count a participation, durably, before what it pays for can leave; raises as `check_budget`,
    and StateWriteError."""
    debit = budget.debit(plan)
    if debit is not None:
        _log.info(
            "participation %d of %d in task %s: epsilon %.3g at delta %g against %s; %.3g in all",
            debit.participations,
            debit.max_participations,
            plan.task,
            debit.epsilon,
            debit.delta,
            debit.against,
            debit.total_epsilon,
        )


def _is_private(context: Context) -> bool:
    return bool(context.state.config_records.get(envelope.RECORD, {}).get(_PRIVATE, False))


def mark_private(context: Context) -> None:
    """Remember that the run has privacy terms."""
    ours = dict(context.state.config_records.get(envelope.RECORD, {}))
    context.state[envelope.RECORD] = ConfigRecord({**ours, _PRIVATE: True})


def check_measured(message: Message, context: Context, rules: PrivacyRules) -> None:
    """Raise IncompatiblePlan for what would leave without noise, where the client has joined a run
    with privacy terms or requires them: evaluations, and training by other strategies."""
    if not (rules.required or _is_private(context)):
        return
    kind = message.metadata.message_type.partition(".")[0]
    if kind == "evaluate":
        raise IncompatiblePlan(
            "what this client measures of a model has no noise, and stays with it",
            hint="set fraction_evaluate=0.0 at the server, and measure on data of the server's own",
        )
    if kind == "train" and envelope.RECORD not in message.content:
        raise IncompatiblePlan(
            "the server asks for a model without noise, and this client requires privacy",
            hint="run FedpressStrategy or MaskedStrategy there, with privacy terms in its Plan",
        )


def private_reply(
    message: Message, context: Context, terms: Terms, name: str, upload: ArrayRecord
) -> Message:
    """The reply with the upload and nothing else that hangs on the device's data: all count one."""
    mark_private(context)
    content = {
        name: upload,
        "metrics": MetricRecord({terms.weight: 1}),
        envelope.RECORD: ConfigRecord({envelope.ASSIGNMENT: terms.assignment.assignment}),
    }
    return Message(RecordDict(content), reply_to=message)
