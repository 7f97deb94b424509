"""Secure aggregation for any Flower ClientApp: one mod, no change to its training.

    app = ClientApp(mods=[masking_mod()])

The mod works where the server runs `fedpress_flower.server.MaskedStrategy`, and refuses to
train for any other: nothing leaves the client but its part in a session whose sum the server gets.
The session is the device's, `fedpress_client.masking`; its record, with its secrets, lies in a file
that `context.state` only names. A message to train brings the session's offer, and the reply says
that this client takes part; the steps after that come as messages of their own, which the app does
not see. What became of an update says the session's last word, which the next round brings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from pydantic import TypeAdapter, ValidationError

from fedpress_client.ledger import Ledger
from fedpress_client.ledger_records import KEEP_ALL, Discard, ResidualRules
from fedpress_client.masking_rules import MaskingRules
from fedpress_client.privacy_budget import NO_RULES, PrivacyRules
from fedpress_client.state import StateDirectory
from fedpress_flower import envelope
from fedpress_flower.client.account import Account, state_folder
from fedpress_flower.client.budget import (
    budget_of,
    check_budget,
    check_measured,
    mark_private,
    spend,
)
from fedpress_flower.client.compression import CallNext, warn
from fedpress_flower.client.seat import Mailbox, Seat, said_in, settled
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
    Conflict,
    IncompatiblePlan,
    InvalidUpdate,
    MalformedRequest,
    PlanDeclined,
)
from fedpress_protocols.masking.agreement import agreed
from fedpress_protocols.masking.payload import SECRET_BYTES, Payload
from fedpress_protocols.messages import Identifier
from fedpress_protocols.plan import Name, RoundPlan

AUTHORITY, CERTIFICATE = "fedpress-authority", "fedpress-certificate"
SERVER_KEY = "fedpress-server-key"
"""Names in the node's configuration, which is its owner's, for what `masking_mod` was not told."""

_STRICT = MaskingRules()
_NAMES: TypeAdapter[tuple[str, str]] = TypeAdapter(tuple[Name, Identifier])


def masking_mod(
    *,
    state_dir: str | Path | None = None,
    seed: int | None = None,
    rules: ResidualRules = KEEP_ALL,
    masking: MaskingRules = _STRICT,
    privacy: PrivacyRules = NO_RULES,
    server_key: str | None = None,
    durable: bool = True,
    on_discard: Callable[[Discard], None] = warn,
    clock: Callable[[], float] = time.time,
    honours: Collection[str] = (),
) -> MaskingMod:
    """The mod; to be the first of a list, so that messages of sessions go no further.

    `masking` and `privacy` are what this client insists on, `server_key` (base64url) is the server
    that it believes; what is left out of authority, certificate and server_key the node's
    configuration may have under AUTHORITY, CERTIFICATE and SERVER_KEY, and then the first server of
    a run is believed.
    With a certificate the key that it is for lies in the state folder, where `fedpress authority
    request` made it; without one each run has a key of its own.

    An app that `honours` "restricted" trains, where a message to train has a config record SUPPORT,
    on the coordinates in it alone: indices into all values of the model's tensors, one after the
    other, as little-endian int64 under INDICES. Every other value it returns as it was.

    A `seed` is for simulations: rounding then repeats. The other parameters are those of
    `compression_mod`.
    """
    if seed is not None and seed < 0:
        raise ConfigurationError(f"seed must be 0 or more, not {seed}")
    folder = None if state_dir is None else str(state_dir)
    return MaskingMod(
        folder,
        seed,
        rules,
        masking,
        privacy,
        server_key,
        durable,
        on_discard,
        clock,
        frozenset(honours),
    )


@dataclass(frozen=True)
class MaskingMod:
    """See `masking_mod`."""

    state_dir: str | None
    seed: int | None
    rules: ResidualRules
    masking: MaskingRules
    privacy: PrivacyRules
    server_key: str | None
    durable: bool
    on_discard: Callable[[Discard], None]
    clock: Callable[[], float]
    honours: frozenset[str] = frozenset()

    def __call__(self, message: Message, context: Context, call_next: CallNext) -> Message:
        """Train by `call_next`, or go on in a session.

        Raises IncompatiblePlan for training that is not masked, and what the device's own masked
        lane raises; Flower then reports this client as failed.
        """
        check_measured(message, context, self.privacy)
        kind = message.metadata.message_type.partition(".")[0]
        ours = message.content.get(envelope.RECORD) if message.has_content() else None
        if kind == "train" and ours is not None:
            if envelope.STEP in ours:
                return self._take_part(message, ours, context)
            return self._train(message, ours, context, call_next)
        if kind == "train":
            raise IncompatiblePlan(
                "the server asks for a model that is not masked",
                hint="run MaskedStrategy there, or take masking_mod out of this app",
            )
        if kind == "evaluate" and not self.masking.reports_evaluations:
            raise IncompatiblePlan(
                "what this client measures of a model stays with it",
                hint="set fraction_evaluate=0.0 at the server, or reports_evaluations in the "
                "mod's MaskingRules",
            )
        return call_next(message, context)

    # A round

    def _train(
        self, message: Message, ours: ConfigRecord, context: Context, call_next: CallNext
    ) -> Message:
        terms = Terms.of(message)
        assignment, plan = terms.assignment, terms.assignment.plan
        name = assignment.assignment
        if plan.lane != "masked":
            raise IncompatiblePlan("the server asks for an upload that is not masked")
        if plan.training.restricted and "restricted" not in self.honours:
            raise IncompatiblePlan(
                "training is to be restricted to what is sent, and this app may not know how to",
                hint="leave `restricted` out of the server's Plan; or, where the app keeps to the "
                "support, say masking_mod(honours=['restricted'])",
            )
        _check_model(message, terms)
        seat = self._seat(context, plan.task, assignment.client_id)
        seat.believe(ours, self.server_key or _named(context, SERVER_KEY), self.clock())
        mailbox = Mailbox(bytes(ours[envelope.OFFER]), is_offer=True)
        part = seat.part(mailbox)
        ledger = settled(seat, part, ours, name, plan)
        self.masking.check(plan, _prepared(ledger, besides=name), is_pinned=True)
        budget = budget_of(context, state_folder(context, self.state_dir), self.privacy)
        check_budget(context, budget, plan)
        public = plan.public(terms.spec, terms.knowledge)
        payload = Payload(plan, public)
        self.masking.check_payload(payload)
        policy = part.member.policy
        due = agreed(payload, population=policy.population, server_key=policy.server_key)
        policy.check(due)  # before hours of training, and not after
        support = plan.support(assignment.profile, terms.spec, public)
        message.content = without_ours(message.content)
        if support is not None:
            indices = support.astype("<i8").tobytes()
            message.content[envelope.SUPPORT] = ConfigRecord({envelope.INDICES: indices})
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        _, arrays = model_in(reply, terms)
        update, examples = update_of(arrays, terms), examples_of(reply, terms)
        before = ledger
        try:
            ledger, body = ledger.prepare(
                assignment,
                update,
                examples,
                terms.spec,
                np.random.default_rng(),  # nothing of the masked lane draws from it
                self.rules,
                knowledge=terms.knowledge,
                report=report_of(reply, terms),
                secret=self._secret(context, plan),
            )
        except InvalidUpdate:
            seat.save(self._told(ledger.refuse(name, update)))
            raise
        except Exception:  # no memory for it, for instance
            seat.save(self._told(ledger.refuse(name, update, "not-sent")))
            raise
        if body is not None and part.assignment != name:
            try:
                spend(budget, plan)
            except PlanDeclined:  # another run of this device has spent what was left
                seat.save(self._told(before.refuse(name, update, "not-sent")))
                raise
            part.enter(name, due)
        seat.save(self._told(ledger))
        if body is None:
            raise InvalidUpdate(
                f"compressed, the update goes beyond the plan's {plan.fixed_point.max_abs:g}",
                hint="raise the plan's max_abs",
            )
        context.state[envelope.RECORD] = ConfigRecord({"account": str(seat.account.path)})
        if plan.privacy is not None:
            mark_private(context)
        return said_in(part, mailbox, name, message)

    def _take_part(self, message: Message, ours: ConfigRecord, context: Context) -> Message:
        """The next step of the session under way."""
        task, client_id = str(ours[envelope.TASK]), str(ours[envelope.CLIENT])
        seat = self._seat(context, task, client_id)
        if ours[envelope.STEP] == envelope.JOIN:
            statement = envelope.joining(str(ours[envelope.SERVER_KEY]), task, client_id)
            answer = ConfigRecord({envelope.SAID: seat.key.public + seat.key.sign(statement)})
            return Message(RecordDict({envelope.RECORD: answer}), reply_to=message)
        name = str(ours[envelope.ASSIGNMENT])
        mailbox = Mailbox(bytes(ours[envelope.HEARD]))
        part = seat.part(mailbox)
        if part.assignment != name:
            raise Conflict(f"this client has no part in the session for {name}")
        return said_in(part, mailbox, name, message)

    def _seat(self, context: Context, task: str, client_id: str) -> Seat:
        try:
            _NAMES.validate_python((task, client_id))
        except ValidationError as exc:
            raise MalformedRequest(f"a task {task!r} with a client {client_id!r}") from exc
        folder = state_folder(context, self.state_dir)
        account = Account.of(context, folder, task, client_id, durable=self.durable)
        certificate = self.masking.certificate
        if certificate is None and CERTIFICATE in context.node_config:
            certificate = Path(_named(context, CERTIFICATE) or "")
        authority = self.masking.authority or _named(context, AUTHORITY)
        rules = replace(self.masking, authority=authority, certificate=certificate)
        key = account.key() if certificate is None else StateDirectory.open(folder).key()
        return Seat(account, task, client_id, key, rules, self.clock)

    def _secret(self, context: Context, plan: RoundPlan) -> bytes | None:
        """Return the randomness of rounding to integers; None: the ledger uses the system's."""
        if self.seed is None:
            return None
        own = own_seed(context, self.seed)
        return np.random.default_rng([own, plan.round, plan.attempt, 2]).bytes(SECRET_BYTES)

    def _told(self, ledger: Ledger) -> Ledger:
        for discard in ledger.discards:
            self.on_discard(discard)
        return ledger.told()


def _prepared(ledger: Ledger, *, besides: str) -> int:
    """The updates prepared for the task so far, but for one that is asked for again."""
    return ledger.included + ledger.not_included + len({*ledger.pending} - {besides})


def _check_model(message: Message, terms: Terms) -> None:
    """Raises IncompatiblePlan unless the model is the plan's: the masks are bound to that one."""
    arrays = message.content.array_records[terms.arrays]
    model = envelope.model_of({name: array.numpy() for name, array in arrays.items()})
    plan = terms.assignment.plan
    if model.digest != plan.model:
        raise IncompatiblePlan(
            f"the model {model.digest[:12]} came where the plan names {plan.model[:12]}"
        )


def _named(context: Context, name: str) -> str | None:
    value = context.node_config.get(name)
    return None if value is None else str(value)
