"""A Flower strategy whose server never sees a client's update: secure aggregation, SA1.

    plan = Plan(ErrorFeedback(SharedSupport(0.05)), minimum=10)
    strategy = MaskedStrategy(FedAvg(fraction_train=0.1), plan)
    strategy.start(grid, initial_arrays, num_rounds=20)

Clients train, and those that have trained go through a session among themselves, whose messages
this server relays; what it gets is the sum over those whose bodies came. The inner strategy is
given one reply, the mean, or is one of ours and given the mean itself.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedYogi,
    Result,
)
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fedpress_compression.linear import as_linear
from fedpress_flower import envelope
from fedpress_flower.server.arrays import model_of, moved, retyped
from fedpress_flower.server.host import Host
from fedpress_flower.server.plan import NO_ANSWER, PROFILE, Plan, RoundReport
from fedpress_flower.server.rounds import Round
from fedpress_flower.server.session import Session, said_by, step_message
from fedpress_flower.server.wrapping import SHORT, Evaluate, Wrapping, with_figures
from fedpress_protocols.defaults import masked_default
from fedpress_protocols.errors import ConfigurationError, FedpressError, IncompatiblePlan
from fedpress_protocols.masking.payload import Aggregate, Payload
from fedpress_protocols.plan import LEAST_MASKED, MaskingTerms, Profile
from fedpress_protocols.policies import Auto
from fedpress_protocols.signatures import DeviceKey, from_base64url, to_base64url
from fedpress_strategies.strategy import Strategy, Tally

_DEFAULTS = MaskingTerms()
_TAKE_THE_MEAN = {
    kind.aggregate_train for kind in (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi, FedProx)
}
_DAY = 24 * 3600.0
_log = logging.getLogger(__name__)


class MaskedStrategy(Wrapping):
    """`inner`, `plan` and `sampling` are as in FedpressStrategy; `inner` has to do with the mean of
    the updates. `plan.compressor` has to commute with the sum; a plan without one has the default
    of docs/auto.md, whose terms count where `masking` is None. `plan.minimum` is the least number
    of clients whose sum is ever unmasked. In that mean all clients count the same, or by their
    examples up to `masking.max_weight`.

    `authority` vouches for clients: the public key (base64url) of an enrolment authority elsewhere,
    whose certificates clients have; or, the default, this server itself. Then clients are protected
    from a server that looks, not from one that invents clients. `key` signs for the server; by
    default each strategy makes one.

    A client that fails, lies or falls silent in any phase is in the round's report; the round goes
    on without it, or is given up where too few are left. Raises IncompatiblePlan where the parts
    cannot work together.
    """

    is_masked = True

    def __init__(
        self,
        inner: FlowerStrategy | Strategy | None = None,
        plan: Plan | None = None,
        masking: MaskingTerms | None = None,
        *,
        authority: str | DeviceKey | None = None,
        key: DeviceKey | None = None,
        population: str = "fedpress",
        **sampling: Any,
    ) -> None:
        plan = Plan(minimum=LEAST_MASKED) if plan is None else plan
        super().__init__(inner, plan, sampling)
        if not isinstance(masking, MaskingTerms | None):
            raise ConfigurationError(
                f"masking is a {type(masking).__name__}, where MaskingTerms(...) or None is due"
            )
        if plan.auto != Auto():
            raise IncompatiblePlan(
                "terms of auto under masks, where no update is seen by itself",
                hint="leave them out: without a compressor the plan has a fixed one",
            )
        if plan.compressor is None:
            fields, usual = masked_default(is_restricted=plan.restricted)
            self._profile, terms = Profile.model_validate(fields), MaskingTerms(**usual)
        else:
            self._profile, terms = Profile(name=PROFILE, compressor=plan.compressor), _DEFAULTS
        masking = terms if masking is None else masking
        as_linear(self._profile.compressor)
        if plan.minimum < LEAST_MASKED:
            raise IncompatiblePlan(
                f"a sum of {plan.minimum} would be unmasked, which says too much of each client",
                hint=f"set the plan's minimum to {LEAST_MASKED} or, better, more",
            )
        if self._ours is not None:
            self._ours.check_masked(masking)
        elif type(self.inner).aggregate_train not in _TAKE_THE_MEAN:
            raise IncompatiblePlan(
                f"{type(inner).__name__} looks at updates one by one, and masking leaves nothing "
                "but their sum",
                hint="choose FedAvg, FedAvgM, FedProx, FedAdagrad, FedAdam or FedYogi",
            )
        issuer = authority if isinstance(authority, DeviceKey) else None
        if authority is None:
            issuer = DeviceKey.generate()
        public = from_base64url(authority, 32) if isinstance(authority, str) else b""
        self.masking = masking
        self._host = Host(
            DeviceKey.generate() if key is None else key,
            public if issuer is None else issuer.public,
            issuer,
            population,
        )
        self._clock: Callable[[], float] = time.time
        self._timeout, self._hurries = _DAY, False
        self._grid: Grid | None = None
        self._open: tuple[Round, Session, tuple[int, ...]] | None = None

    @property
    def authority(self) -> str:
        """The public key (base64url) of those who vouch for clients, for their rules."""
        return to_base64url(self._host.authority)

    @property
    def server_key(self) -> str:
        """The public key (base64url) that signs for this server, for clients' rules."""
        return to_base64url(self._host.key.public)

    def summary(self) -> None:
        _log.info("masked, compressed by %s", self._profile.compressor)
        self.inner.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = SHORT,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Flower's `Strategy.start`; `timeout` is for training, the phases have their own in the
        masking terms. A grid with a method `clock` says what time it is; one with `stream`, which
        waits for nobody, is heard to the end of each phase."""
        self._clock = getattr(grid, "clock", time.time)
        self._hurries = getattr(grid, "stream", None) is None
        self._timeout = timeout or _DAY
        return super().start(
            grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = self._asked(server_round, arrays, config, grid)
        self._open, self._grid = None, grid
        if not messages:
            return messages
        asked = tuple(sorted(message.metadata.dst_node_id for message in messages))
        if len(asked) < self.plan.minimum:
            raise IncompatiblePlan(
                f"round {server_round} asks {len(asked)} clients, and no sum of fewer than "
                f"{self.plan.minimum} is unmasked",
                hint="ask more of them, by fraction_train or min_train_nodes",
            )
        missing = self._enrolled(asked, grid)
        messages = [each for each in messages if each.metadata.dst_node_id not in missing]
        if len(messages) < self.plan.minimum:
            self._tell(self._not_begun(server_round, arrays, asked, missing))
            return []
        report = () if self._ours is None else self._ours.strategy.report
        here = Round.opened(
            self.plan,
            server_round,
            arrays,
            messages,
            self._models,
            self._profile,
            self._training,
            report=report,
            masking=self.masking,
            spending=self._spending,
        )
        here.dropped.update(missing)
        payload = Payload(here.plan, here.public)
        now, seed = self._clock(), secrets.token_hex(32)
        if self.plan.seed is not None:
            seed = f"{self.plan.seed}|{self.plan.task}|{server_round}"
        session = Session(self._host, here, payload, now=now, seconds=self._timeout, seed=seed)
        beside = self._models_beside(here)
        for message in messages:
            node = message.metadata.dst_node_id
            ends = self._training.ends.get(node, {})
            record = here.record(node, None, self._weight)
            header: dict[str, Any] = {
                envelope.OFFER: session.offer,
                envelope.SERVER_KEY: self.server_key,
                envelope.MEMBERSHIP: self._host.membership(node, now).model_dump_json(),
            }
            if ends:
                header |= {envelope.ENDED_FOR: list(ends), envelope.ENDED: list(ends.values())}
            session.down_bytes += sum(
                len(each) for each in (session.offer, header[envelope.MEMBERSHIP], *ends.values())
            )
            record.update(header)
            message.content = RecordDict({**message.content, **beside, envelope.RECORD: record})
        self._downloads.clear()
        self._count(messages)
        self._open = (here, session, asked)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        opened, self._open = self._open, None
        if opened is None:
            list(replies)
            return None, None
        here, session, asked = opened
        session.advertise(replies)
        for node in session.trained:
            self._training.ends.pop(node, None)  # its message told of them, and it answered
        if self._spending is not None:
            silent = {node for node, why in here.dropped.items() if why == NO_ANSWER}
            self._spending.count(session.trained | silent, server_round)
        aggregate = session.run(self._exchange, hurry=self._hurries)
        arrays, metrics = None, None
        if aggregate is not None:
            try:
                arrays, metrics = self._applied(server_round, here, session, aggregate)
            except FedpressError as exc:
                session.abort(exc.detail)
            else:
                if arrays is None:
                    session.abort("the strategy made no model of this round")
                else:
                    self.newest = arrays
                    session.close()
        for node in session.began:
            words = self._training.ends.setdefault(node, {})
            words[here.assignment(node)] = session.ended(node)
        report = self._report(here, session, asked, arrays, aggregate)
        self._tell(report)
        return arrays, with_figures(metrics, report)

    def _exchange(self, messages: list[Message], seconds: float) -> Iterable[Message]:
        assert self._grid is not None  # noqa: S101 - set when the round was configured
        return self._grid.send_and_receive(messages, timeout=seconds)

    def _enrolled(self, asked: Iterable[int], grid: Grid) -> dict[int, str]:
        """Ask new nodes for their keys; those that gave none, with the reason. They may take as
        long as training: who is away is not asked to train then, and nobody waits twice."""
        now, lacking = self._clock(), self._host.lacks(asked)
        missing = dict.fromkeys(lacking, f"{NO_ANSWER} to {envelope.JOIN}")
        fields = {
            envelope.STEP: envelope.JOIN,
            envelope.TASK: self.plan.task,
            envelope.SERVER_KEY: self.server_key,
        }
        messages = [step_message(n, **fields, **{envelope.CLIENT: str(n)}) for n in lacking]
        if not messages:
            return missing
        for reply in grid.send_and_receive(messages, timeout=self._timeout):
            node = reply.metadata.src_node_id
            if node not in missing:
                continue
            if reply.has_error():
                why = (reply.error.reason or "no reason given").strip()
                missing[node] = f"failed, perhaps for want of masking_mod in its app: {why}"
                continue
            try:
                self._host.enrol(node, self.plan.task, said_by(reply), now)
                del missing[node]
            except FedpressError as exc:
                missing[node] = exc.detail
        return missing

    def _applied(
        self, server_round: int, here: Round, session: Session, aggregate: Aggregate
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next model, by the mean of the updates, and what the sum says besides."""
        mean_metrics = MetricRecord({self._weight: aggregate.num_examples, **aggregate.report})
        mean = aggregate.mean.dense()
        if self._ours is not None:
            tally = Tally(aggregate.num_clients, aggregate.report)
            return self._ours.applied(here, mean.astype(np.float64), tally), mean_metrics
        with np.errstate(over="ignore", invalid="ignore"):
            parameters = here.model.parameters + mean
        content = {
            here.key: moved(here.arrays, here.model.spec, parameters),
            "metrics": mean_metrics,
        }
        asked = here.asked[session.survivors[0]]
        arrays, metrics = self.inner.aggregate_train(
            server_round, [Message(RecordDict(content), reply_to=asked)]
        )
        return (None if arrays is None else retyped(arrays, here.arrays)), metrics

    def _report(
        self,
        here: Round,
        session: Session,
        asked: tuple[int, ...],
        arrays: ArrayRecord | None,
        aggregate: Aggregate | None,
    ) -> RoundReport:
        included = [] if arrays is None else session.survivors
        for node in asked:
            if node not in included and node not in here.dropped:
                why = session.faults.pop(
                    node, f"the session was given up: {session.machine.reason}"
                )
                here.drop(node, why)
        return RoundReport(
            round=here.plan.round,
            asked=asked,
            included=tuple(included),
            dropped=dict(sorted(here.dropped.items())),
            upload_bytes=here.upload_bytes,
            nmse=math.nan,
            num_examples=aggregate.num_examples if included and aggregate is not None else 0,
            model=here.model.digest if arrays is None else model_of(arrays).digest,
            download_bytes=self._downloads["all"],
            session_up_bytes=session.up_bytes,
            session_down_bytes=session.down_bytes,
            silent=dict(session.silent),
            faults=dict(sorted(session.faults.items())),
            abandoned=session.machine.reason,
            profile=self._profile.name,
            privacy=None if self._spending is None else self._spending.status(here.plan),
        )

    def _not_begun(
        self, number: int, arrays: ArrayRecord, asked: tuple[int, ...], missing: dict[int, str]
    ) -> RoundReport:
        """Of a round in which too few gave a key to be certified."""
        reason = f"{len(asked) - len(missing)} clients could be certified: too few for a sum"
        if len(missing) == len(asked):
            reason += "; see that the app has masking_mod"
        return RoundReport(
            round=number,
            asked=asked,
            included=(),
            dropped={node: missing.get(node, reason) for node in asked},
            upload_bytes=0,
            nmse=math.nan,
            num_examples=0,
            model=model_of(arrays).digest,
            abandoned=reason,
            profile=self._profile.name,
        )
