"""Compression with error feedback for any Flower ClientApp: one mod, no change to its training.

    app = ClientApp(mods=[compression_mod()])

The first mod is the outermost: what stands after this one, clipping or noise, sees whole models.
The mod works where the server runs `fedpress_flower.server.FedpressStrategy`; any other message
passes as it is. The residual lives in a file, the account of `ledger`; `context.state` only says
where. It follows the receipt that the next message to this client carries: what the server took in
is committed, and what it did not, or never answered for, goes back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedpress_client.ledger import Ledger
from fedpress_client.ledger_records import KEEP_ALL, Discard, ResidualRules
from fedpress_client.privacy_budget import NO_RULES, PrivacyRules
from fedpress_compression.tensors import Vector
from fedpress_compression.values import flatness
from fedpress_flower import envelope
from fedpress_flower.client.account import (
    KEEP_DAYS,
    SEED,
    Account,
    begun,
    collect,
    device_name,
    state_folder,
)
from fedpress_flower.client.budget import (
    budget_of,
    check_budget,
    check_measured,
    private_reply,
    spend,
)
from fedpress_flower.client.models import LacksBase, Models, holding, model_in_message, with_arrays
from fedpress_flower.client.terms import (
    Terms,
    examples_of,
    model_in,
    own_seed,
    report_of,
    update_of,
    without_ours,
)
from fedpress_protocols.errors import (
    ConfigurationError,
    IncompatiblePlan,
    InvalidUpdate,
    PlanDeclined,
)
from fedpress_protocols.messages import Receipt
from fedpress_protocols.plan import RoundPlan

_log = logging.getLogger(__name__)
CallNext = Callable[[Message, Context], Message]


def warn(discard: Discard) -> None:
    """Log the discard; as a warning unless the plan's compressor leaves it out by design, or it was
    for a model that is trained no further."""
    is_usual = discard.reason in ("not-sent", "other-model")
    level = logging.INFO if is_usual else logging.WARNING
    text = "an update of norm %.3g is lost to the model: %s"
    _log.log(level, text, discard.norm, discard.reason)


def compression_mod(
    *,
    state_dir: str | Path | None = None,
    seed: int | None = None,
    rules: ResidualRules = KEEP_ALL,
    privacy: PrivacyRules = NO_RULES,
    durable: bool = True,
    on_discard: Callable[[Discard], None] = warn,
    keep_days: float = KEEP_DAYS,
    clock: Callable[[], float] = time.time,
) -> CompressionMod:
    """The mod. Accounts lie in `state_dir`, a folder for each run, a file for each client; in a
    simulation on several machines it must be one folder to all of them. None stands for what the
    node's or the run's configuration has under STATE_DIR, and then for ~/.fedpress/flower.

    `seed`, or the run's SEED, makes compression repeat exactly. Without `durable` a power cut, not
    a crash, may lose what the last rounds left over. `rules` and `on_discard` are `Client`'s.

    An account is named by DEVICE_ID in the node's configuration, or by its partition-id, so that a
    SuperNode finds it again after a restart; by the node's id where neither is there. Accounts of
    other runs that nothing was written to for `keep_days` are removed when a run begins.

    What a task with privacy terms spends is counted in the state folder, over all runs, and never
    removed; `privacy` is what this client insists on, and MAX_EPSILON in the node's configuration
    bounds it further. Nothing but the noised upload leaves then: no metrics, no evaluations.
    """
    if seed is not None and seed < 0:
        raise ConfigurationError(f"seed must be 0 or more, not {seed}")
    folder = None if state_dir is None else str(state_dir)
    return CompressionMod(folder, seed, rules, privacy, durable, on_discard, keep_days, clock)


@dataclass(frozen=True)
class CompressionMod:
    """See `compression_mod`."""

    state_dir: str | None
    seed: int | None
    rules: ResidualRules
    privacy: PrivacyRules
    durable: bool
    on_discard: Callable[[Discard], None]
    keep_days: float
    clock: Callable[[], float]

    def __call__(self, message: Message, context: Context, call_next: CallNext) -> Message:
        """Train by `call_next`; the reply carries the upload in the place of the model.

        Raises InvalidUpdate for a model of other tensors than it began at, NaN or infinity among
        its values, or no number of examples; Flower then reports this client as failed.
        """
        check_measured(message, context, self.privacy)
        if not message.has_content() or envelope.RECORD not in message.content:
            return call_next(message, context)
        ours = message.content[envelope.RECORD]
        if envelope.OFFER in ours or envelope.STEP in ours:
            raise IncompatiblePlan(
                "the server asks for a masked update, and this app has compression_mod",
                hint="give the app masking_mod in its place, or run FedpressStrategy at the server",
            )
        digest = str(ours.get(envelope.DIGEST, ""))
        if digest:
            models = Models.of(self._account(context, ours))
            try:
                model = model_in_message(message, models)
            except LacksBase as exc:
                _log.warning("the model %.12s is not here any more; asking for the whole", exc)
                return Message(RecordDict({envelope.RECORD: holding("")}), reply_to=message)
            message.content = with_arrays(message, model)
        if envelope.PLAN in ours:
            reply = self._trained(message, context, call_next)
        else:
            message.content = without_ours(message.content)
            reply = call_next(message, context)
        if digest and not reply.has_error():
            said = reply.content.get(envelope.RECORD, {})
            reply.content[envelope.RECORD] = ConfigRecord({**said, **holding(digest)})
        return reply

    def _account(self, context: Context, ours: ConfigRecord) -> Account:
        task, client_id = str(ours[envelope.TASK]), str(ours[envelope.CLIENT])
        folder, name = state_folder(context, self.state_dir), device_name(context)
        account = Account.of(context, folder, task, client_id, durable=self.durable, name=name)
        if not account.path.parent.exists():
            collect(folder, context.run_id, self.clock() - self.keep_days * 24 * 3600)
        return account

    def _trained(self, message: Message, context: Context, call_next: CallNext) -> Message:
        terms = Terms.of(message)
        task, client_id = terms.assignment.plan.task, terms.assignment.client_id
        names = ConfigRecord({envelope.TASK: task, envelope.CLIENT: client_id})
        account = self._account(context, names)
        if account.session() is not None:
            raise PlanDeclined(
                f"the plan of round {terms.assignment.plan.round} of task {task!r} is of the clear "
                "lane, and this client joined the task when it was masked",
                hint="run masking_mod with MaskedStrategy, or give the run another state folder",
                rule="pinned lane",
            )
        if device_name(context) is None:
            account.warn_of_others()
        budget = budget_of(context, state_folder(context, self.state_dir), self.privacy)
        check_budget(context, budget, terms.assignment.plan)
        _settled(account.load(task, client_id, adopt=True), terms)
        message.content = without_ours(message.content)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        name, arrays = model_in(reply, terms)
        update, examples = update_of(arrays, terms), examples_of(reply, terms)
        report = report_of(reply, terms)
        with account.alone():  # another node may go by the same name
            before = ledger = _settled(account.load(task, client_id, adopt=True), terms)
            try:
                ledger, body = ledger.prepare(
                    terms.assignment,
                    update,
                    examples,
                    terms.spec,
                    self._rng(context, terms.assignment.plan),
                    self.rules,
                    knowledge=terms.knowledge,
                    report=report,
                )
            except InvalidUpdate:
                account.save(self._told(ledger.refuse(terms.assignment.assignment, update)))
                raise
            except Exception:  # no memory for it, for instance
                refused = ledger.refuse(terms.assignment.assignment, update, "not-sent")
                account.save(self._told(refused))
                raise
            key = terms.assignment.assignment
            if body is not None and key not in before.pending:
                try:
                    spend(budget, terms.assignment.plan)
                except PlanDeclined:  # another run of this device has spent what was left
                    account.save(self._told(before.refuse(key, update, "not-sent")))
                    raise
            account.save(self._told(ledger))
        if body is None:
            most = terms.assignment.plan.fixed_point.max_abs
            raise InvalidUpdate(
                f"compressed, the update goes beyond the plan's {most:g}",
                hint="raise the plan's max_abs, or choose a compressor that scales less",
            )
        upload = ArrayRecord({envelope.BODY: Array("uint8", (len(body),), envelope.STYPE, body)})
        context.state[envelope.RECORD] = ConfigRecord({"account": str(account.path)})
        if terms.assignment.plan.privacy is not None:
            return private_reply(message, context, terms, name, upload)
        reply.content[name] = upload
        error, flat = _error(ledger, key, update), flatness(update)
        ours = ConfigRecord(
            {envelope.ASSIGNMENT: key, envelope.ERROR: error, envelope.FLATNESS: flat}
        )
        if asked := [other for other in ledger.pending if other != key][: envelope.MOST_ASKS]:
            ours[envelope.ASKS] = asked
        reply.content[envelope.RECORD] = ours
        return reply

    def _rng(self, context: Context, plan: RoundPlan) -> np.random.Generator:
        seed = context.run_config.get(SEED) if self.seed is None else self.seed
        if seed is None:
            return np.random.default_rng()
        own = own_seed(context, int(seed))
        return np.random.default_rng([own, plan.round, plan.attempt])

    def _told(self, ledger: Ledger) -> Ledger:
        for discard in ledger.discards:
            self.on_discard(discard)
        return ledger.told()


def _settled(ledger: Ledger, terms: Terms) -> Ledger:
    """The account once everything pending has its fate: that of the receipt, or, where the server
    has none to tell of, not included. What the device sent when it was another node waits for the
    server's answer. Raises Conflict for a message that later ones overtook."""
    key = terms.assignment.assignment
    ledger = begun(ledger, key, terms.assignment.plan.round, terms.since)
    for receipt in terms.receipts:
        ledger = ledger.settle(receipt)
    for unanswered, pending in list(ledger.pending.items()):
        if unanswered == key or not unanswered.endswith(f"-{ledger.client_id}"):
            continue
        lost = Receipt(
            assignment=unanswered,
            client_id=ledger.client_id,
            task=ledger.task,
            round=pending.round,
            attempt=pending.attempt,
            outcome="not-included",
            reason="missed-deadline",
            upload=None,
            model=None,
            issued_at=0,
        )
        ledger = ledger.settle(lost)
    return ledger


def _error(ledger: Ledger, key: str, update: Vector) -> float:
    """The squared norm of what the upload left out, relative to that of what was to be sent."""
    pending = ledger.pending[key]
    left = ledger.residual if pending.feedback and ledger.residual is not None else update.copy()
    whole = left.copy()
    if pending.feedback:
        pending.update.add_to(whole)
    else:
        pending.update.add_to(left, sign=-1.0)
    total = float(np.square(whole, dtype=np.float64).sum())
    return float(np.square(left, dtype=np.float64).sum()) / total if total else 0.0
