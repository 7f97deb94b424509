"""Compression with error feedback for any Flower ClientApp: one mod, no change to its training.

    app = ClientApp(mods=[compression_mod()])

The first mod is the outermost: what stands after this one, clipping or noise, sees whole models.
The mod works where the server runs `fedpress_strategies.flower.FedpressStrategy`; any other message
passes as it is. The residual lives in a file, the account of `ledger`; `context.state` only says
where. It follows the receipt that the next message to this client carries: what the server took in
is committed, and what it did not, or never answered for, goes back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message

from fedpress_client.flower.account import SEED, Account, state_folder
from fedpress_client.flower.terms import (
    Terms,
    examples_of,
    model_in,
    own_seed,
    report_of,
    update_of,
    without_ours,
)
from fedpress_client.ledger import KEEP_ALL, Discard, Ledger, ResidualRules
from fedpress_protocols import flower
from fedpress_protocols.errors import ConfigurationError, Conflict, InvalidUpdate
from fedpress_protocols.messages import Receipt
from fedpress_protocols.model import Vector
from fedpress_protocols.plan import RoundPlan

_log = logging.getLogger(__name__)
CallNext = Callable[[Message, Context], Message]


def warn(discard: Discard) -> None:
    _log.warning("an update of norm %.3g is lost to the model: %s", discard.norm, discard.reason)


def compression_mod(
    *,
    state_dir: str | Path | None = None,
    seed: int | None = None,
    rules: ResidualRules = KEEP_ALL,
    durable: bool = True,
    on_discard: Callable[[Discard], None] = warn,
) -> CompressionMod:
    """The mod. Accounts lie in `state_dir`, a folder for each run, a file for each client; in a
    simulation on several machines it must be one folder to all of them. None stands for what the
    node's or the run's configuration has under STATE_DIR, and then for ~/.fedpress/flower.

    `seed`, or the run's SEED, makes compression repeat exactly. Without `durable` a power cut, not
    a crash, may lose what the last rounds left over. `rules` and `on_discard` are `Client`'s.
    """
    if seed is not None and seed < 0:
        raise ConfigurationError(f"seed must be 0 or more, not {seed}")
    folder = None if state_dir is None else str(state_dir)
    return CompressionMod(folder, seed, rules, durable, on_discard)


@dataclass(frozen=True)
class CompressionMod:
    """See `compression_mod`."""

    state_dir: str | None
    seed: int | None
    rules: ResidualRules
    durable: bool
    on_discard: Callable[[Discard], None]

    def __call__(self, message: Message, context: Context, call_next: CallNext) -> Message:
        """Train by `call_next`; the reply carries the upload in the place of the model.

        Raises InvalidUpdate for a model of other tensors than it began at, NaN or infinity among
        its values, or no number of examples; Flower then reports this client as failed.
        """
        if not message.has_content() or flower.RECORD not in message.content:
            return call_next(message, context)
        terms = Terms.of(message)
        task, client_id = terms.assignment.plan.task, terms.assignment.client_id
        folder = state_folder(context, self.state_dir)
        account = Account.of(context, folder, task, client_id, durable=self.durable)
        ledger = _settled(account.load(task, client_id), terms)
        message.content = without_ours(message.content)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        name, arrays = model_in(reply, terms)
        update, examples = update_of(arrays, terms), examples_of(reply, terms)
        try:
            ledger, body = ledger.prepare(
                terms.assignment,
                update,
                examples,
                terms.spec,
                self._rng(context, terms.assignment.plan),
                self.rules,
                previous=terms.previous,
                drift=terms.drift,
                report=report_of(reply, terms),
            )
        except InvalidUpdate:
            account.save(self._told(ledger.refuse(terms.assignment.assignment, update)))
            raise
        account.save(self._told(ledger))
        if body is None:
            most = terms.assignment.plan.fixed_point.max_abs
            raise InvalidUpdate(
                f"compressed, the update goes beyond the plan's {most:g}",
                hint="raise the plan's max_abs, or choose a compressor that scales less",
            )
        context.state[flower.RECORD] = ConfigRecord({"account": str(account.path)})
        reply.content[name] = ArrayRecord(
            {flower.BODY: Array("uint8", (len(body),), flower.STYPE, body)}
        )
        key = terms.assignment.assignment
        error = _error(ledger, key, update)
        reply.content[flower.RECORD] = ConfigRecord({flower.ASSIGNMENT: key, flower.ERROR: error})
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
    has none to tell of, not included. Raises Conflict for a message that later ones overtook."""
    key, plan = terms.assignment.assignment, terms.assignment.plan
    if key not in ledger.pending and plan.round <= ledger.round:
        raise Conflict(f"round {plan.round} came after round {ledger.round} was answered")
    if terms.receipt is not None:
        ledger = ledger.settle(terms.receipt)
    for unanswered, held in list(ledger.pending.items()):
        if unanswered == key:
            continue
        lost = Receipt(
            assignment=unanswered,
            client_id=ledger.client_id,
            task=ledger.task,
            round=held.round,
            attempt=held.attempt,
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
    held = ledger.pending[key]
    left = ledger.residual if held.feedback and ledger.residual is not None else update.copy()
    whole = left.copy()
    if held.feedback:
        held.update.add_to(whole)
    else:
        held.update.add_to(left, sign=-1.0)
    total = float(np.square(whole, dtype=np.float64).sum())
    return float(np.square(left, dtype=np.float64).sum()) / total if total else 0.0
