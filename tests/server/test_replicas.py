"""Several coordinators on one database: what one writes the others know, and nothing counts twice.

Every replica here has its own door to the database and its own memory; they share nothing but the
database and the store. Devices' updates are one-hot, each at a coordinate of its own, so that one
counted twice or lost shows in the model itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedpress_protocols.compression.contexts import contexts_of
from fedpress_protocols.errors import (
    ConfigurationError,
    Conflict,
    FedpressError,
    Unavailable,
)
from fedpress_protocols.messages import Assignment, CheckInRequest, Receipt, TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey, key_id_of
from fedpress_protocols.upload import Upload
from fedpress_server import Settings, batches, create_app, records, work
from fedpress_server.coordinator import Coordinator
from fedpress_server.database import Database
from fedpress_server.files import model_name
from fedpress_server.intake import Intake
from fedpress_server.leases import LeaseLost
from fedpress_server.masked_membership import Authority
from fedpress_server.metrics import Metrics
from fedpress_server.payloads import LocalPayloads
from fedpress_server.records import Device, EnrolmentToken
from fedpress_server.tables import round_events, uploads
from tests.server.in_process import Clock

SIZE = 512
FIRST = Model.from_tensors({"weight": np.zeros(SIZE, np.float32)})
KEY = DeviceKey.generate()
AUTHORITY = DeviceKey.generate()
LEASE = 60.0
Operation = tuple[str, int, int]
"""Its name, which server, which device."""
Url = Callable[[Path], str]
"""Of a fresh database, in this folder if it is a file."""


class Replica:
    """One server's memory, without its services: what they do, the test does."""

    def __init__(self, url: str, payloads: LocalPayloads, clock: Clock, folder: Path) -> None:
        options = Settings(data_dir=folder, lease_seconds=LEASE)
        self.database = Database(url)
        self.metrics = Metrics()
        authority = Authority.here("fedpress", AUTHORITY)
        self.coordinator = Coordinator(
            options, self.database, payloads, KEY, authority, self.metrics, clock, is_shared=True
        )
        self.intake = Intake(self.coordinator, self.database, payloads, self.metrics, 1)

    @property
    def work(self) -> work.Work:
        return self.coordinator.work

    async def close(self) -> None:
        await self.coordinator.stop()
        await asyncio.to_thread(self.intake.stop)
        await asyncio.to_thread(self.database.close)


class Replicas:
    """Some servers on one database, and devices that ask any of them."""

    def __init__(self, url: str, folder: Path, number: int) -> None:
        self.clock = Clock()
        self.payloads = LocalPayloads(folder / "store")
        self.payloads.put(model_name(FIRST.digest), FIRST.to_bytes())
        self.all = [Replica(url, self.payloads, self.clock, folder) for _ in range(number)]
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
        await self.all[0].coordinator.life.create(TaskConfig.model_validate(defaults | config))

    async def check_in(self, replica: int, device: int) -> None:
        open_ = self.acknowledged.keys() - self.receipts.keys()
        pending = tuple(name for name in open_ if self.acknowledged[name] == device)
        request = CheckInRequest(wire_versions=(1,), pending=pending)
        check_ins = self.all[replica].coordinator.check_ins
        answer = await check_ins.check_in(f"d{device}", "digits", request)
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
                check_ins = self.all[replica].coordinator.check_ins
                await check_ins.decline(f"d{device}", assignment.assignment)

    async def tick(self, replica: int, device: int = 0) -> None:
        await self.all[replica].coordinator.tick()

    async def fold(self, replica: int, device: int = 0) -> None:
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
            await self.fold(turn % len(self.all))
            self.clock.advance(5.0)
            await self.tick((turn + 1) % len(self.all))
            state = (await self.all[0].coordinator.task("digits")).state
            if state != "running" and self.acknowledged.keys() <= self.receipts.keys():
                return
        raise AssertionError("the task does not end")

    async def check(self) -> None:
        """Nothing doubled, nothing lost, one model, and every server knows the same."""
        summaries = [await each.coordinator.task("digits") for each in self.all]
        assert all(summary == summaries[0] for summary in summaries)
        history = await self.all[0].coordinator.history("digits")

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
async def replicas(url: Url, number: int = 2) -> AsyncIterator[Replicas]:
    with tempfile.TemporaryDirectory() as folder:
        servers = Replicas(url(Path(folder)), Path(folder), number)
        try:
            yield servers
        finally:
            await servers.close()


@pytest.fixture
def url(request: pytest.FixtureRequest, dialect: str, tmp_path: Path) -> Url:
    def fresh(folder: Path) -> str:
        if dialect == "sqlite":
            return f"sqlite:///{folder / 'test.db'}"
        return str(request.getfixturevalue("cluster").new())

    return fresh


DEVICES = 4
ACTIONS = ("check_in", "upload", "fold", "tick", "later", "decline")
OPERATION = st.tuples(
    st.sampled_from(("check_in", "check_in", "upload", "upload", *ACTIONS)),
    st.integers(0, 1),
    st.integers(0, DEVICES - 1),
)


@pytest.mark.both_databases
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(pairs=st.lists(st.tuples(OPERATION, OPERATION), max_size=25))
def test_two_servers_on_one_database_count_every_upload_once(
    url: Url, pairs: list[tuple[Operation, Operation]]
) -> None:
    """Each pair of operations is under way at a time, and both have looked before either writes."""

    async def go() -> None:
        async with replicas(url) as servers:
            await servers.begin(DEVICES)
            for pair in pairs:
                await servers.at_once(pair)
            await servers.finish(DEVICES)
            await servers.check()

    anyio.run(go)


async def fill(servers: Replicas, number: int) -> None:
    """That many uploads, by turns to one server and to the other."""
    for device in range(number):
        await servers.check_in(device % 2, device)
        await servers.upload(device % 2, device)


@pytest.mark.both_databases
def test_a_worker_that_was_paused_past_its_lease_changes_nothing(url: Url) -> None:
    async def go() -> None:
        async with replicas(url) as servers:
            first, second = servers.all
            await servers.begin(2)
            await fill(servers, 2)
            lease = await first.work._acquire()
            assert lease is not None
            assert lease.job.kind == "fold"
            assert not await second.work.once(), "the job is leased, and nobody else has it"
            servers.clock.advance(LEASE - 1)
            assert not await second.work.once()
            servers.clock.advance(1)
            assert await second.work.once()
            made = await second.coordinator.task("digits")
            assert made.round == 1
            assert second.metrics.lease_expired._value.get() == 1
            with pytest.raises(LeaseLost):
                await first.work._do(lease)
            assert await first.coordinator.task("digits") == made
            await servers.finish(2)
            await servers.check()

    anyio.run(go)


@pytest.mark.both_databases
def test_a_fold_that_ends_after_its_lease_was_taken_writes_nothing(
    url: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker has made the model, and is about to say so, when another gets the job."""

    async def go() -> None:
        async with replicas(url) as servers:
            first, second = servers.all
            await servers.begin(2)
            await fill(servers, 2)
            made, go_on = asyncio.Event(), asyncio.Event()
            tell = first.work._tell

            async def late(*args: Any) -> None:
                made.set()
                await go_on.wait()
                await tell(*args)

            monkeypatch.setattr(first.work, "_tell", late)
            folding = asyncio.create_task(first.work.once())
            await made.wait()
            servers.clock.advance(LEASE)
            taken = await second.work._acquire()
            assert taken is not None
            go_on.set()
            await folding
            assert (await first.coordinator.task("digits")).round == 0
            await second.work._do(taken)
            assert (await first.coordinator.task("digits")).round == 1
            monkeypatch.undo()
            await servers.finish(2)
            await servers.check()

    anyio.run(go)


@pytest.mark.both_databases
@pytest.mark.parametrize("strategy", [{"id": "fedavgm", "momentum": 0.5}, {"id": "adasum"}])
def test_the_model_is_the_same_whatever_the_batches_and_the_workers(
    url: Url, strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads in batches of one or two, done by two workers in turn; or all at once."""
    models, num_jobs = [], []

    async def go(batch: int) -> None:
        monkeypatch.setattr(batches, "BATCH", batch)
        async with replicas(url) as servers:
            await servers.begin(5, strategy=strategy, rounds=1, cohort={"size": 5, "minimum": 5})
            await fill(servers, 5)
            done = 0
            while await servers.all[done % 2].work.once():
                done += 1
            num_jobs.append(done)
            models.append((await servers.all[0].coordinator.task("digits")).model)

    for batch in (64, 2, 1):
        anyio.run(go, batch)
    assert models == [models[0]] * 3
    assert models[0] != FIRST.digest
    assert num_jobs == ([1, 4, 6] if strategy["id"] == "fedavgm" else [1, 1, 1])


@pytest.mark.both_databases
def test_a_job_that_fails_ten_times_gives_the_round_up_with_the_reason(
    url: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("no room for the fold")

    async def go() -> None:
        async with replicas(url) as servers:
            await servers.begin(2)
            await fill(servers, 2)
            monkeypatch.setattr(work, "fold", fail)
            for attempt in range(11):
                assert await servers.all[attempt % 2].work.once()
            monkeypatch.undo()
            history = await servers.all[0].coordinator.history("digits")
            assert history[0].state == "abandoned"
            assert history[0].reason == "fold failed 10 times: no room for the fold"
            assert servers.all[0].metrics.jobs_abandoned._value.get() == 1
            await servers.finish(2)
            await servers.check()

    anyio.run(go)


@pytest.mark.both_databases
def test_a_store_that_is_away_is_not_the_job_s_fault(
    url: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise Unavailable("the store is away")

    async def go() -> None:
        async with replicas(url) as servers:
            await servers.begin(2)
            await fill(servers, 2)
            monkeypatch.setattr(work, "fold", fail)
            for attempt in range(30):
                assert await servers.all[attempt % 2].work.once()
            monkeypatch.undo()
            assert await servers.all[0].work.once()
            assert (await servers.all[1].coordinator.task("digits")).round == 1

    anyio.run(go)


@pytest.mark.both_databases
def test_what_an_operator_does_on_one_server_the_other_knows_at_once(url: Url) -> None:
    async def go() -> None:
        async with replicas(url) as servers:
            first, second = (each.coordinator for each in servers.all)
            await servers.begin(2)
            await fill(servers, 1)
            await second.life.abort_round("digits", "by the operator")
            assert [status.attempt for status in await first.history("digits")] == [1, 2]
            await servers.check_in(0, 0)
            assert servers.receipts
            await first.life.cancel("digits", "by the operator")
            with pytest.raises(Conflict):
                await second.life.cancel("digits", "by the operator")
            assert (await second.task("digits")).state == "cancelled"

    anyio.run(go)


@pytest.mark.both_databases
def test_a_policy_chooses_among_devices_that_other_servers_have_seen(url: Url) -> None:
    async def go() -> None:
        async with replicas(url, 3) as servers:
            for each in servers.all[:2]:
                each.coordinator.check_ins.chooses = False
            await servers.begin(4, selection={"policy": "uniform", "candidates": 4})
            for device in range(4):
                await servers.check_in(device % 2, device)
            assert not servers.given
            await servers.tick(2)
            for device in range(4):
                await servers.check_in(1 - device % 2, device)
            assert len(servers.given) == 2

    anyio.run(go)


@pytest.mark.parametrize("role", ["api", "worker", "scheduler"])
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, "SQLite is one server's own"),
        ({"database_url": "postgresql://localhost/x"}, "the data folder is one server's own"),
    ],
)
def test_a_role_of_its_own_needs_what_servers_share(
    role: str, changes: dict[str, str], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        create_app(Settings(data_dir=tmp_path, role=role, **changes))


def test_a_worker_answers_supervisors_alone(tmp_path: Path) -> None:
    shared = {"database_url": "postgresql://localhost/x", "store_url": "s3://bucket/prefix"}
    app = create_app(Settings(data_dir=tmp_path, role="worker", **shared))
    assert set(app.openapi()["paths"]) == {"/livez", "/readyz", "/metrics"}
