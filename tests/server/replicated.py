"""Servers that share a database and a store, each with its own door and its own memory.

Devices' updates are one-hot, each at a coordinate of its own, so that one counted twice or lost
shows in the model itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from fedpress_compression.contexts import contexts_of
from fedpress_protocols.errors import (
    FedpressError,
)
from fedpress_protocols.messages import Assignment, CheckInRequest, Receipt, TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey, key_id_of
from fedpress_protocols.upload import Upload
from fedpress_server import Settings
from fedpress_server.coordination import job_runner
from fedpress_server.coordination.resources import Resources
from fedpress_server.identity.membership import Authority
from fedpress_server.identity.signing import SigningKeys
from fedpress_server.metrics import Metrics
from fedpress_server.services import assembled
from fedpress_server.storage import records
from fedpress_server.storage.database import Database
from fedpress_server.storage.files import model_name
from fedpress_server.storage.payloads import LocalPayloads
from fedpress_server.storage.records import Device, EnrolmentToken
from fedpress_server.storage.tables import round_events, uploads
from tests import databases
from tests.postgres import Cluster
from tests.server.in_process import Clock

SIZE = 512
FIRST = Model.from_tensors({"weight": np.zeros(SIZE, np.float32)})
KEY = DeviceKey.generate()
AUTHORITY = DeviceKey.generate()
LEASE = 60.0
Operation = tuple[str, int, int]
"""Its name, which server, which device."""


async def _spent() -> None:
    """These check-ins are not signed: there is no nonce to be stored."""


class Databases:
    """Fresh databases of one kind: files, or of a cluster that takes them back."""

    def __init__(self, cluster: Cluster | None) -> None:
        self._cluster = cluster

    def new(self, folder: Path) -> str:
        """The URL of one, in this folder if it is a file."""
        if self._cluster is None:
            databases.lay(folder / "test.db")
            return f"sqlite:///{folder / 'test.db'}"
        return self._cluster.new()

    def give_back(self, url: str) -> None:
        if self._cluster is not None:
            self._cluster.give_back(url)


class Replica:
    """One server's memory, without its services: what they do, the test does."""

    def __init__(
        self, url: str, payloads: LocalPayloads, clock: Clock, folder: Path, name: str = "0"
    ) -> None:
        """`name` stands for its version."""
        options = Settings(data_dir=folder, lease_seconds=LEASE)
        self.database = Database(url)
        self.metrics = Metrics()
        authority = Authority.here("fedpress", AUTHORITY)
        keys = SigningKeys.of(KEY)
        resources = Resources(
            options, self.metrics, clock, self.database, payloads, keys, authority
        )
        self.services = assembled(resources, name, is_shared=True)
        self.intake = self.services.intake

    @property
    def work(self) -> job_runner.JobRunner:
        return self.services.job_runner

    async def close(self) -> None:
        await self.services.scheduler.stop()
        await asyncio.to_thread(self.intake.stop)
        await asyncio.to_thread(self.database.close)


class Replicas:
    """Some servers on one database, and devices that ask any of them."""

    def __init__(self, url: str, folder: Path, number: int) -> None:
        self.clock = Clock()
        self.url = url
        self.payloads = LocalPayloads(folder / "store")
        self.payloads.put(model_name(FIRST.digest), FIRST.to_bytes())
        self.all = [
            Replica(url, self.payloads, self.clock, folder / f"server-{index}", str(index))
            for index in range(number)
        ]
        self.given: dict[int, Assignment] = {}
        self.places: dict[str, int] = {}
        self.acknowledged: dict[str, int] = {}
        """By assignment: whose upload it is."""
        self.receipts: dict[str, Receipt] = {}

    async def begin(self, devices: int, **config: Any) -> None:
        def write(connection: sa.Connection) -> None:
            records.add_model(
                connection,
                records.ModelRecord(FIRST.digest, FIRST.spec.digest, 4 * SIZE, self.clock()),
            )
            token = EnrolmentToken("t", "t", devices, 0, 0.0, 1e12, "")
            records.add_token(connection, token)
            for index in range(devices):
                public = hashlib.sha256(str(index).encode()).digest()
                device = Device(f"d{index}", key_id_of(public), public, "", "t", 0.0, None)
                records.add_device(connection, device)

        await self.all[0].database.write(write)
        defaults: dict[str, Any] = {
            "task": "digits",
            "model": FIRST.digest,
            "rounds": 2,
            "profiles": [{"name": "whole", "compressor": {"id": "none"}}],
            "cohort": {"size": 2, "minimum": 1},
            "round_seconds": 60.0,
            "seed": 7,
            "max_attempts": 100,
        }
        await self.all[0].services.lifecycle.create(TaskConfig.model_validate(defaults | config))

    async def check_in(
        self, replica: int, device: int, wait: float = 0.0, **attributes: float
    ) -> None:
        open_ = self.acknowledged.keys() - self.receipts.keys()
        pending = tuple(name for name in open_ if self.acknowledged[name] == device)
        request = CheckInRequest(
            wire_versions=(1,), pending=pending, wait=wait, attributes=attributes
        )
        check_ins = self.all[replica].services.check_ins
        answer = await check_ins.check_in(f"d{device}", "digits", request, _spent)
        if answer is None:
            return
        for signed in answer.receipts:
            name = signed.receipt.assignment
            assert self.receipts.setdefault(name, signed.receipt) == signed.receipt
        if answer.assignment is not None:
            self.given[device] = answer.assignment
            self.places.setdefault(answer.assignment.assignment, len(self.places))

    def body(self, assignment: Assignment) -> bytes:
        update = np.zeros(SIZE, np.float32)
        update[self.places[assignment.assignment]] = 1.0
        plan, profile = assignment.plan, assignment.profile
        compressor, public = plan.compressor(profile), plan.public(FIRST.spec)
        state, rng = compressor.init(FIRST.spec), np.random.default_rng(0)
        symbols, _ = compressor.compress(update, state, public, rng)
        layout = compressor.layout(FIRST.spec)
        made = Upload(plan.profile_index(profile), 1, symbols)
        return made.to_bytes(layout, contexts_of(layout, public))

    async def upload(self, replica: int, device: int) -> None:
        """What the device was last given, however long ago."""
        assignment = self.given.get(device)
        if assignment is None:
            return
        name, body = assignment.assignment, self.body(assignment)
        digest = hashlib.sha256(body).hexdigest()
        intake = self.all[replica].intake
        with suppress(FedpressError):
            slot = await intake.slot(f"d{device}", name)
            await intake.admit(slot, digest)
            await intake.stage(slot, body, digest, len(body))
            self.acknowledged[name] = device

    async def decline(self, replica: int, device: int) -> None:
        assignment = self.given.get(device)
        if assignment is not None:
            with suppress(FedpressError):
                check_ins = self.all[replica].services.check_ins
                await check_ins.decline(f"d{device}", assignment.assignment)

    async def tick(self, replica: int, device: int = 0) -> None:
        await self.all[replica].services.scheduler.tick()

    async def aggregate(self, replica: int, device: int = 0) -> None:
        await self.all[replica].work.once()

    async def later(self, replica: int, device: int) -> None:
        self.clock.advance(7.0 * device)

    async def at_once(self, pair: Sequence[Operation]) -> None:
        """Both operations; on two servers neither writes before both have come to their writes."""
        arrived, done = set[int](), set[int]()
        changed = asyncio.Condition()
        is_split = len({replica for _, replica, _ in pair}) == 2

        async def meet(place: int) -> None:
            async with changed:
                arrived.add(place)
                changed.notify_all()
                await changed.wait_for(lambda: len(arrived | done) == len(pair))

        async def go(place: int, operation: Operation) -> None:
            name, replica, device = operation
            database = self.all[replica].database
            write = database.write

            async def late(*args: Any, **options: Any) -> Any:
                await meet(place)
                return await write(*args, **options)

            if is_split:
                database.write = late  # type: ignore[method-assign]
            try:
                await getattr(self, name)(replica, device)
            finally:
                database.write = write  # type: ignore[method-assign]
                async with changed:
                    done.add(place)
                    changed.notify_all()

        await asyncio.gather(*(go(*each) for each in enumerate(pair)))

    async def finish(self, devices: int) -> None:
        """On and on, until the task is over and every device has its receipts."""
        for turn in range(400):
            for device in range(devices):
                await self.check_in((turn + device) % len(self.all), device)
                await self.upload((turn + device + 1) % len(self.all), device)
            await self.aggregate(turn % len(self.all))
            self.clock.advance(5.0)
            await self.tick((turn + 1) % len(self.all))
            state = (await self.all[0].services.queries.task("digits")).state
            if state != "running" and self.acknowledged.keys() <= self.receipts.keys():
                return
        raise AssertionError("the task does not end")

    async def check(self) -> None:
        """Nothing doubled, nothing lost, one model, and every server knows the same."""
        summaries = [await each.services.queries.task("digits") for each in self.all]
        assert all(summary == summaries[0] for summary in summaries)
        history = await self.all[0].services.queries.history("digits")

        def read(connection: sa.Connection) -> tuple[list[Any], list[str]]:
            row = round_events.c
            numbers = sa.select(row.round, row.attempt, row.seq)
            events = connection.execute(numbers.order_by(row.round, row.attempt, row.seq)).all()
            return list(events), list(connection.scalars(sa.select(uploads.c.assignment)))

        events, staged = await self.all[0].database.read(read)
        by_attempt: dict[tuple[int, int], list[int]] = {}
        for number, attempt, seq in events:
            by_attempt.setdefault((number, attempt), []).append(seq)
        assert all(seqs == list(range(1, len(seqs) + 1)) for seqs in by_attempt.values())
        assert set(staged) == set(self.acknowledged)
        included = {n: r for n, r in self.receipts.items() if r.outcome == "included"}
        expected = np.zeros(SIZE)
        for status in history:
            here = (status.round, status.attempt)
            mine = [n for n, r in included.items() if (r.round, r.attempt) == here]
            assert status.included == len(mine)
            for name in mine:
                expected[self.places[name]] += 1 / len(mine)
        model = Model.from_bytes(self.payloads.get(model_name(summaries[0].model)))
        np.testing.assert_allclose(model.parameters, expected, atol=1e-6)

    async def close(self) -> None:
        for each in self.all:
            await each.close()


@asynccontextmanager
async def replicas(databases: Databases, number: int = 2) -> AsyncIterator[Replicas]:
    with tempfile.TemporaryDirectory() as folder:
        url = databases.new(Path(folder))
        servers = Replicas(url, Path(folder), number)
        try:
            yield servers
        finally:
            await servers.close()
            await asyncio.to_thread(databases.give_back, url)


async def fill(servers: Replicas, number: int) -> None:
    """That many uploads, by turns to one server and to the other."""
    for device in range(number):
        await servers.check_in(device % 2, device)
        await servers.upload(device % 2, device)
