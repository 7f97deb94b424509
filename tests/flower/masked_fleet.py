"""Clients of a masked Flower app in this process; a test says who goes or lies, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from fedpress.simulate import flower_runtime as runtime
from fedpress_client import MaskingRules
from fedpress_client.ledger_records import Pending
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.shared_support import SharedSupport
from fedpress_flower import envelope
from fedpress_flower.client import masking_mod
from fedpress_flower.client.terms import Terms
from fedpress_flower.server import MaskedStrategy, Plan
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.plan import MaskingTerms
from fedpress_protocols.signatures import DeviceKey
from tests.flower.fleet import StreamingFleet, step_of
from tests.masked import summed

HALF = ErrorFeedback(SharedSupport(fraction=0.5))
FINE = MaskingTerms(levels=127)
STEPS = ("train", *envelope.STEPS)
Lie = Callable[[Message, Message], Message]


class MaskedFleet(StreamingFleet):
    """`gone` has by round and node the step at which a client falls silent for that round, and how:
    "unreached" or "unheard"; `lies` by round, node and step what it says in the place of its reply.
    `plain` has by round and node what was to be masked."""

    def __init__(
        self,
        folder: Path,
        count: int,
        train: Callable[[Message, Context], Message],
        *,
        gone: Mapping[tuple[int, int], tuple[str, str]] | None = None,
        lies: Mapping[tuple[int, int, str], Lie] | None = None,
        rules: MaskingRules | None = None,
        **mod: Any,
    ) -> None:
        self.folder = folder
        self.gone, self.lies = dict(gone or {}), dict(lies or {})
        self.plain: dict[tuple[int, int], Pending] = {}
        self.payloads: dict[int, Payload] = {}
        self.replies: list[Message] = []
        app = ClientApp()
        options: dict[str, Any] = {
            "state_dir": folder,
            "seed": 1,
            "durable": False,
            "masking": rules or MaskingRules(reports_evaluations=True),
        }
        masking = masking_mod(**(options | mod))
        app.train(mods=[self._noting, masking])(train)
        super().__init__(app, count)

    def _noting(self, message: Message, context: Context, call_next: Any) -> Message:
        is_ours = envelope.OFFER in message.content.get(envelope.RECORD, {})
        terms = Terms.of(message) if is_ours else None
        reply: Message = call_next(message, context)
        if terms is not None:
            plan = terms.assignment.plan
            public = plan.public(terms.spec, terms.knowledge)
            self.payloads[plan.round] = Payload(plan, public)
            held = self.ledger(context.node_id).pending[terms.assignment.assignment]
            self.plain[plan.round, context.node_id] = held
        return reply

    def fate_of(self, message: Message) -> str:
        at, how = self.gone.get((self.calls, message.metadata.dst_node_id), ("", ""))
        step = step_of(message)
        if step not in STEPS or at not in STEPS or STEPS.index(step) < STEPS.index(at):
            return "answers"
        return how if step == at else "unreached"

    def on_way(self, message: Message, reply: Message) -> Message:
        lie = self.lies.get((self.calls, message.metadata.dst_node_id, step_of(message)))
        if lie is not None:
            reply = lie(message, reply)
        self.replies.append(reply)
        return reply

    def key(self, node: int) -> DeviceKey:
        """A client's own."""
        path = Path(str(self.contexts[node].state[envelope.RECORD]["account"]))
        return DeviceKey.from_pem(path.with_suffix(".key").read_bytes())

    def ask_again(self, message: Message) -> Message:
        """One client, once more, or something else; as over a network."""
        arrived = runtime.from_bytes(runtime.to_bytes(message))
        node = message.metadata.dst_node_id
        try:
            return self.app(runtime.copied(arrived), self.contexts[node])
        except Exception as exc:
            return Message(Error(2, f"{type(exc).__name__}: {exc}"), reply_to=arrived)

    def sent_to(self, node: int, step: str, number: int = 1) -> Message:
        """What a client was sent, the `number`th time."""
        found = [m for m in self.sent if m.metadata.dst_node_id == node and step_of(m) == step]
        return found[number - 1]

    def mean(self, number: int, nodes: Any) -> np.ndarray:
        """What the whole numbers of these clients come to, added up in clear."""
        held = [self.plain[number, node] for node in nodes]
        return summed(self.payloads[number], held)


class PolledFleet(MaskedFleet):
    """As Flower's own grids: replies are to be pulled, and what is lost is waited for."""

    stream = None  # type: ignore[assignment]


def strategy_of(inner: Any, plan: Plan | None = None, **options: Any) -> MaskedStrategy:
    plan = Plan(HALF, minimum=3, seed=3) if plan is None else plan
    return MaskedStrategy(inner, plan, **({"masking": FINE} | options))
