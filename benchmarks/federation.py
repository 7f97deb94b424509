"""A task in memory out of the product's own parts: plans, client terms, ledgers, bodies,
aggregation.

No network, no disk, no clock; what goes wrong with an upload is the caller's to say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_client import Ledger, Trainer
from fedpress_client.client_terms import TermsAtWork
from fedpress_compression.compressor import Compressor
from fedpress_compression.compressors.none import Uncompressed
from fedpress_protocols.masking.payload import SECRET_BYTES
from fedpress_protocols.messages import Assignment, Receipt
from fedpress_protocols.model import Model
from fedpress_protocols.plan import (
    CohortRules,
    FixedPointTerms,
    MaskingTerms,
    Profile,
    RoundPlan,
    TrainingTerms,
)
from fedpress_server.aggregation.accumulate import AggregationJob, StagedUpload, Summed
from fedpress_server.aggregation.aggregate import aggregate
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.storage.files import artefact_name, model_name
from fedpress_server.storage.payloads import LocalPayloads
from fedpress_strategies import from_config
from fedpress_strategies.strategy import Tally


class InMemory(LocalPayloads):
    """Payloads that touch no disk."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._held: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        self._held[name] = data

    def get(self, name: str) -> bytes:
        return self._held[name]

    def size(self, name: str) -> int:
        return len(self._held[name])


@dataclass
class Federation:
    """The server's side, and every device's account."""

    folder: Path
    model: Model
    strategy: dict[str, Any]
    trainers: Sequence[Trainer]
    training: TrainingTerms = field(default_factory=TrainingTerms)
    compressor: Callable[[int], Compressor[Any]] = lambda number: Uncompressed()
    max_abs: float = 256.0
    masking: MaskingTerms | None = None
    """Of the masked lane. Masks are left out: they cancel exactly in the sum that is taken."""
    published: dict[str, str] = field(default_factory=dict)
    uploaded: int = 0
    attempt: int = 1
    number: int = 1

    def __post_init__(self) -> None:
        self.payloads = InMemory(self.folder)
        self.made = from_config(self.strategy, self.training)
        self.ledgers = [Ledger("task", f"client{index}") for index in range(len(self.trainers))]
        self.state: str | None = None
        self.control: str | None = None
        self.before = self.model
        self.payloads.put(model_name(self.model.digest), self.model.to_bytes())

    @property
    def plan(self) -> RoundPlan:
        profile = Profile(name="one", compressor=self.compressor(self.number))
        needs_previous = self.masking is not None or "previous" in profile.compressor.needs
        return RoundPlan(
            task="task",
            round=self.number,
            attempt=self.attempt,
            model=self.model.digest,
            spec=self.model.spec.digest,
            lane="clear" if self.masking is None else "masked",
            masking=self.masking,
            profiles=(profile,),
            previous_model=self.before.digest if needs_previous else None,
            training=self.training,
            client_terms=self.made.client_terms.with_control(self.control),
            report=self.made.report,
            cohort=CohortRules(size=max(1, len(self.trainers)), minimum=3 if self.masking else 1),
            deadline=1e9,
            fixed_point=FixedPointTerms(scale_bits=24, max_abs=self.max_abs, max_examples=1000),
            public_seed=hashlib.sha256(f"{self.number}.{self.attempt}".encode()).hexdigest(),
        )

    def run(
        self,
        who: Sequence[int],
        *,
        lost: Sequence[int] = (),
        abandoned: bool = False,
        restarts: Sequence[int] = (),
    ) -> None:
        """An attempt: `who` train; `lost` uploads never arrive, and with `abandoned` none counts.

        Those in `restarts` read their account from the disk before the receipt.
        """
        plan, bodies = self.plan, []
        terms = RoundTerms(plan, self.model.spec, self.payloads)
        for index in who:
            body = self._prepared(terms, index)
            if index in restarts:
                self.ledgers[index] = Ledger.from_bytes(self.ledgers[index].to_bytes())
            if index not in lost:
                self.payloads.put(f"uploads/{index}", body)
                digest = hashlib.sha256(body).hexdigest()
                bodies.append(StagedUpload(f"uploads/{index}", digest, "one", f"client{index}"))
                self.uploaded += len(body)
        included = not abandoned and bool(bodies)
        for index in who:
            self._settle(plan, index, included=included and index not in lost)
        if not included:
            self.attempt += 1
            return
        job = AggregationJob(terms, self.made, self.state, tuple(bodies))
        summed = None if self.masking is None else self._summed(job)
        result = aggregate(job, self.payloads, summed=summed)
        self.before = self.model
        self.model = self.stored(result.model)
        self.state, self.control = result.optimizer_state, result.control
        self.published = {name: digest for name, (digest, _) in result.published.items()}
        self.number, self.attempt = self.number + 1, 1

    def publish(self, model: Model) -> None:
        """Let devices begin the next round with `model`."""
        self.payloads.put(model_name(model.digest), model.to_bytes())
        self.model = model

    def stored(self, digest: str) -> Model:
        return Model.from_bytes(self.payloads.get(model_name(digest)))

    @property
    def server_control(self) -> npt.NDArray[np.float32]:
        assert self.control is not None
        data = self.payloads.get(artefact_name(self.control))
        return np.frombuffer(data, "<f4").astype(np.float32)

    def _summed(self, job: AggregationJob) -> Summed:
        payload = job.terms.payload
        words = np.zeros(payload.packing.num_words, np.uint64)
        for staged in job.uploads:
            words += payload.packing.from_bytes(self.payloads.get(staged.name))
        decoded = payload.decompress(payload.packing.unpack(words), len(job.uploads))
        delta = decoded.mean.dense().astype(np.float64)
        return Summed(delta, decoded.num_examples, Tally(decoded.num_clients, decoded.report))

    def _prepared(self, terms: RoundTerms, index: int) -> bytes:
        plan, ledger, trainer = terms.plan, self.ledgers[index], self.trainers[index]
        control = plan.client_terms.control
        server = None if control is None or control.server is None else self.server_control
        asked = TermsAtWork(plan, self.model, ledger, server)
        trained = trainer.train(asked.model, asked.work(1000 * plan.round + index, None))
        update = asked.update(trained.parameters - asked.model.parameters, trained)
        assignment = Assignment(
            assignment=self._name(plan), client_id=ledger.client_id, plan=plan, profile="one"
        )
        ledger, body = ledger.prepare(
            assignment,
            update,
            trained.num_examples,
            self.model.spec,
            np.random.default_rng([plan.round, index]),
            knowledge=terms.public.knowledge,
            report=asked.report(trained),
            personal=asked.personal(trained),
            secret=None
            if self.masking is None
            else np.random.default_rng([self.number, index]).bytes(SECRET_BYTES),
        )
        assert body is not None
        if self.masking is not None:
            ledger = ledger.masked(assignment.assignment, "0" * 64, body)
        self.ledgers[index] = ledger.told()
        return body

    def _settle(self, plan: RoundPlan, index: int, *, included: bool) -> None:
        ledger, name = self.ledgers[index], self._name(plan)
        receipt = Receipt(
            assignment=name,
            client_id=ledger.client_id,
            task="task",
            round=plan.round,
            attempt=plan.attempt,
            outcome="included" if included else "not-included",
            reason="included" if included else "round-abandoned",
            upload=ledger.pending[name].digest,
            model=None,
            issued_at=0,
        )
        self.ledgers[index] = ledger.settle(receipt).told()

    @staticmethod
    def _name(plan: RoundPlan) -> str:
        return f"a{plan.round}-{plan.attempt}"
