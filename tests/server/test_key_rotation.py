"""The key that signs receipts is changed while devices go on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fedpress_protocols.errors import ConfigurationError, Conflict, InvalidSignature, Unavailable
from fedpress_protocols.key_rollover import ServerKeys, follow_rollovers
from fedpress_protocols.messages import SignedReceipt
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey, from_base64url, key_id_of
from fedpress_server import Settings
from fedpress_server.backup import back_up, verify
from fedpress_server.identity import audit, rotation
from fedpress_server.storage.database import Database
from tests.devices import Device, Operator
from tests.masked import masked_task
from tests.server.in_process import Clock, Start


class Keys:
    """An operator at the machine where the server's key lies."""

    def __init__(self, database_url: str, place: Path, clock: Clock) -> None:
        self.url, self.place, self.clock = database_url, place, clock

    def do(self, step: str) -> Any:
        async def run() -> Any:
            database = Database(self.url, migrates=False)
            try:
                work = getattr(rotation, step)
                if step == "standing":
                    return await work(database, self.place)
                return await work(database, self.place, self.clock)
            finally:
                await asyncio.to_thread(database.close)

        return asyncio.run(run())

    def changed(self) -> str:
        self.do("rotate")
        return str(self.do("switch").current)


@pytest.fixture
def shared(database_url: Any, tmp_path: Path) -> dict[str, Any]:
    return {"database_url": database_url(tmp_path) or f"sqlite:///{tmp_path / 'shared.db'}"}


@pytest.fixture
def keys(shared: dict[str, Any], tmp_path: Path, clock: Clock) -> Keys:
    return Keys(shared["database_url"], tmp_path / "data/server-key.pem", clock)


def follow(device: Device) -> ServerKeys:
    return ServerKeys.model_validate_json(device.json("GET", "/v1/server-keys").content)


def settled(http: Any, device: Device) -> SignedReceipt:
    assignment = device.assignment("digits").assignment
    device.json("DELETE", f"/v1/assignments/{assignment}")
    answer = device.json("GET", f"/v1/assignments/{assignment}/receipt")
    return SignedReceipt.model_validate_json(answer.content)


@pytest.mark.both_databases
def test_a_device_follows_every_change_from_the_key_that_it_pinned(
    start: Start, keys: Keys, clock: Clock, shared: dict[str, Any], model: Model
) -> None:
    with start(**shared) as http:
        device = Device(http, clock)
        device.enrol(Operator(http).token(9))
        Operator(http).begin(model)
        before = settled(http, device)
        assert before.key_id == key_id_of(device.server_key)
        assert follow(device).successions == ()
    newest = [keys.changed(), keys.changed()][-1]
    with start(**shared) as http:
        device.http = http
        told = follow(device)
        assert key_id_of(from_base64url(told.server_key, 32)) == newest
        passed = follow_rollovers(device.server_key, newest, told.successions)
        assert len(passed) == 2
        # The receipt of before says what it said, in the name of the key that signs by now.
        answer = device.json("GET", f"/v1/assignments/{before.receipt.assignment}/receipt")
        again = SignedReceipt.model_validate_json(answer.content)
        assert again.receipt == before.receipt
        assert again.key_id == newest
        device.server_key = passed[-1]
        device.verify(again)
        late = Device(http, clock)
        assert late.enrol(Operator(http).token()).server_key == told.server_key
        late.verify(settled(http, late))
        with pytest.raises(InvalidSignature, match="no chain"):
            follow_rollovers(DeviceKey.generate().public, newest, told.successions)


# The steps


@pytest.fixture
def started(start: Start, shared: dict[str, Any]) -> None:
    with start(**shared):
        pass


def mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


@pytest.mark.usefixtures("started")
def test_each_step_may_be_repeated_and_leaves_private_files(keys: Keys) -> None:
    first = keys.do("standing")
    assert (first.next, first.former, first.here) == (None, (), (first.current,))
    made = keys.do("rotate")
    assert made == keys.do("rotate")
    assert made.current == first.current
    assert made.next in made.here
    switched = keys.do("switch")
    assert switched == keys.do("switch")
    assert (switched.current, switched.next, switched.former) == (made.next, None, (first.current,))
    place = keys.place
    for file in (place, rotation.former_file(place), rotation.chain_file(place)):
        assert mode(file) == 0o600
    assert not rotation.next_file(place).exists()
    assert DeviceKey.from_pem(place.read_bytes()).key_id == switched.current
    assert keys.do("retire").erased == first.current
    assert keys.do("retire").erased is None
    assert keys.do("standing").here == (switched.current,)


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("step", ["rotate", "switch"])
def test_a_step_that_was_killed_is_only_to_be_repeated(
    keys: Keys, step: str, start: Start, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if step == "switch":
        keys.do("rotate")
    what = {"rotate": "_write", "switch": "_settle"}[step]
    with monkeypatch.context() as patched:
        patched.setattr(rotation, what, killed)
        with pytest.raises(Killed):
            keys.do(step)
    with start(**shared) as http:
        assert http.get("/readyz").status_code == 200
    after = keys.do(step)
    assert keys.do("switch").current == (after.next or after.current)
    with start(**shared) as http:
        assert http.get("/readyz").status_code == 200


class Killed(Exception):
    pass


def killed(*_: Any, **__: Any) -> None:
    raise Killed


@pytest.mark.usefixtures("started")
def test_a_next_key_that_is_elsewhere_is_named(keys: Keys, tmp_path: Path) -> None:
    made = keys.do("rotate")
    file = rotation.next_file(keys.place)
    kept = file.rename(tmp_path / "kept")
    for step in ("rotate", "switch"):
        with pytest.raises(ConfigurationError, match=str(made.next)):
            keys.do(step)
    kept.rename(file)
    assert keys.do("switch").current == made.next


def test_only_a_machine_with_the_key_can_name_the_next(
    start: Start, keys: Keys, shared: dict[str, Any], tmp_path: Path
) -> None:
    Database(keys.url).close()
    with pytest.raises(ConfigurationError, match="no signing key yet"):
        keys.do("rotate")
    with start(**shared):
        pass
    keys.place.rename(tmp_path / "kept")
    with pytest.raises(ConfigurationError, match="the current key must sign the next"):
        keys.do("rotate")


@pytest.mark.usefixtures("started")
def test_files_that_are_none_are_refused(keys: Keys) -> None:
    rotation.next_file(keys.place).write_bytes(b"nothing")
    with pytest.raises(ConfigurationError, match="not an Ed25519 private key"):
        keys.do("standing")
    rotation.next_file(keys.place).unlink()
    keys.changed()
    chain = rotation.chain_file(keys.place)
    text = chain.read_text()
    for damaged in (text[:-9], text.replace('"made_at": ', '"made_at": 1')):
        chain.write_text(damaged)
        with pytest.raises(ConfigurationError, match="not a chain of server keys"):
            rotation.chain(keys.place)


# Several servers, and one that comes back


@pytest.mark.both_databases
def test_a_server_without_the_new_key_goes_on_with_the_old_one_and_says_so(
    start: Start, keys: Keys, clock: Clock, shared: dict[str, Any], model: Model, tmp_path: Path
) -> None:
    with start(**shared) as http:
        device = Device(http, clock)
        device.enrol(Operator(http).token())
        Operator(http).begin(model)
        held = http.app.services.server_keys
        old = held.current.key_id
        made = keys.do("rotate")
        rotation.next_file(keys.place).rename(tmp_path / "elsewhere")
        other = tmp_path / "other/server-key.pem"
        other.parent.mkdir(mode=0o700)
        rotation.next_file(other).write_bytes((tmp_path / "elsewhere").read_bytes())
        assert Keys(keys.url, other, clock).do("switch").current == made.next
        http.call(http.app.services.database.read, held.read)
        assert (held.current.key_id, held.missing) == (old, made.next)
        http.app.services.readiness.fresh_until = 0.0
        answer = http.get("/readyz")
        assert answer.status_code == 503
        assert made.next in answer.json()["detail"]
        receipt = settled(http, device)
        device.verify(receipt)
        # Whoever meets a server that has it follows; what is told is the database's own word.
        assert key_id_of(from_base64url(follow(device).server_key, 32)) == made.next
        (tmp_path / "elsewhere").rename(rotation.next_file(keys.place))
        http.call(http.app.services.database.read, held.read)
        assert (held.current.key_id, held.missing) == (made.next, None)
        assert http.get("/readyz").status_code == 200
    rotation.next_file(keys.place).unlink()
    with (
        pytest.raises(ConfigurationError, match=r"but the database's is.*the same"),
        start(**shared),
    ):
        pass


def test_a_database_that_comes_back_from_before_takes_the_change_from_the_chain(
    start: Start, keys: Keys, clock: Clock, shared: dict[str, Any], tmp_path: Path
) -> None:
    with start(**shared):
        pass
    file = Path(keys.url.removeprefix("sqlite:///"))
    before = file.read_bytes()
    newest = [keys.changed(), keys.changed()][-1]
    for each in file.parent.glob(file.name + "*"):
        each.unlink()
    file.write_bytes(before)
    with start(**shared) as http:
        assert http.app.services.server_keys.current.key_id == newest
        device = Device(http, clock)
        device.enrol(Operator(http).token())
        assert len(follow(device).successions) == 2
    assert keys.do("standing").current == newest
    file.write_bytes(before)
    for each in file.parent.glob(file.name + "-*"):
        each.unlink()
    chain = rotation.chain_file(keys.place)
    kept = chain.rename(tmp_path / "chain")
    with pytest.raises(ConfigurationError, match=r"server key"), start(**shared):
        pass
    kept.rename(chain)
    stranger = DeviceKey.generate()
    rotation.chain_file(keys.place).write_text("[]")
    keys.place.write_bytes(stranger.to_pem())
    with pytest.raises(ConfigurationError, match=r"server"), start(**shared):
        pass


@pytest.mark.both_databases
def test_a_backup_of_several_keys_is_whole(
    start: Start, keys: Keys, clock: Clock, shared: dict[str, Any], model: Model, tmp_path: Path
) -> None:
    with start(**shared) as http:
        device = Device(http, clock)
        device.enrol(Operator(http).token())
        Operator(http).begin(model)
        first = settled(http, device).key_id
    newest = keys.changed()
    settings = Settings(data_dir=tmp_path / "data", **shared)
    place = tmp_path / "backup"
    asyncio.run(back_up(settings, place, with_keys=True, clock=clock))
    for key_id in ("", first, newest):
        report = verify(place, key_id=key_id)
        assert (report.faults, report.key_id, report.num_receipts) == ((), newest, 1)
    assert "server's key" in verify(place, key_id="A" * 22).faults[0]
    assert DeviceKey.from_pem((place / "keys/server-key.pem").read_bytes()).key_id == newest


def test_a_key_is_not_erased_while_a_masked_round_is_signed_with_it(
    start: Start, keys: Keys, clock: Clock, shared: dict[str, Any], model: Model
) -> None:
    with start(**shared) as http:
        operator = Operator(http)
        masked_task(operator, model, 4)
        clock.advance(5)
        keys.changed()
        with pytest.raises(Conflict, match="masked round"):
            keys.do("retire")
    former = rotation.former_file(keys.place)
    kept = former.rename(former.with_suffix(".kept"))
    with pytest.raises(ConfigurationError, match="put its file back"), start(**shared):
        pass
    kept.rename(former)
    with start(**shared) as http:
        Operator(http).post("/v1/admin/tasks/digits/cancel")
        assert keys.do("retire").erased is not None


def test_a_key_that_leaked_is_replaced_by_one_that_nothing_leads_to(
    start: Start, keys: Keys, clock: Clock, shared: dict[str, Any], model: Model
) -> None:
    with start(**shared) as http:
        device = Device(http, clock)
        device.enrol(Operator(http).token())
        Operator(http).begin(model)
        keys.changed()
        leaked = keys.do("standing").current
        after = keys.do("replace")
        assert (after.former, after.next, after.here) == ((), None, (after.current,))
        assert not rotation.chain_file(keys.place).exists()
        assert not rotation.former_file(keys.place).exists()
        held = http.app.services.server_keys
        http.call(http.app.services.database.read, held.read)
        assert held.current.key_id == after.current != leaked
        receipt = settled(http, device)
        assert receipt.key_id == after.current
        with pytest.raises(InvalidSignature, match="no chain"):
            follow_rollovers(device.server_key, after.current, follow(device).successions)
        device.server_key = from_base64url(after.public, 32)
        device.verify(receipt)
    with start(**shared) as http:
        assert http.get("/readyz").status_code == 200


def collected(device: Device, receipt: SignedReceipt) -> SignedReceipt:
    """The same receipt, asked for again."""
    name = receipt.receipt.assignment
    answer = device.json("GET", f"/v1/assignments/{name}/receipt")
    return SignedReceipt.model_validate_json(answer.content)


@pytest.mark.parametrize("rotates", [False, True])
def test_receipts_of_before_a_leak_go_out_signed_by_the_new_key(
    start: Start,
    keys: Keys,
    clock: Clock,
    shared: dict[str, Any],
    model: Model,
    tmp_path: Path,
    rotates: bool,
) -> None:
    with start(**shared) as http:
        device = Device(http, clock)
        device.enrol(Operator(http).token())
        Operator(http).begin(model)
        before = settled(http, device)
        if rotates:
            keys.changed()
        after = keys.do("replace")
        held = http.app.services.server_keys
        http.call(http.app.services.database.read, held.read)
        device.server_key = from_base64url(after.public, 32)
        again = collected(device, before)
        assert (again.receipt, again.key_id) == (before.receipt, after.current)
        device.verify(again)
        told = device.check_in("digits", before.receipt.assignment)
        assert told is not None
        assert [each.receipt for each in told.receipts] == [before.receipt]
        device.verify(told.receipts[0])
    settings = Settings(data_dir=tmp_path / "data", **shared)
    asyncio.run(back_up(settings, tmp_path / "backup", with_keys=True, clock=clock))
    report = verify(tmp_path / "backup")
    assert (report.faults, report.key_id, report.num_receipts) == ((), after.current, 1)
    assert "server's key" in verify(tmp_path / "backup", key_id=before.key_id).faults[0]


def test_a_server_with_none_of_the_keys_says_so_until_it_has_one(
    start: Start, keys: Keys, clock: Clock, shared: dict[str, Any], model: Model, tmp_path: Path
) -> None:
    with start(**shared) as http:
        device = Device(http, clock)
        device.enrol(Operator(http).token())
        Operator(http).begin(model)
        before = settled(http, device)
        elsewhere = tmp_path / "other/server-key.pem"
        elsewhere.parent.mkdir(mode=0o700)
        after = Keys(keys.url, elsewhere, clock).do("replace")
        held = http.app.services.server_keys
        http.call(http.app.services.database.read, held.read)
        assert held.missing == after.current
        with pytest.raises(Unavailable, match=f"{after.current}.*copy the new key's file"):
            _ = held.current
        with pytest.raises(Unavailable, match=after.current):
            collected(device, before)
        answer = http.get("/readyz")
        assert answer.status_code == 503
        assert after.current in answer.json()["detail"]
        keys.place.write_bytes(elsewhere.read_bytes())
        http.call(http.app.services.database.read, held.read)
        assert (held.current.key_id, held.missing) == (after.current, None)
        device.server_key = from_base64url(after.public, 32)
        device.verify(collected(device, before))
        late = Device(http, clock)
        late.enrol(Operator(http).token())
        late.verify(settled(http, late))


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("is_settled", [False, True])
def test_a_replacement_that_was_killed_is_only_to_be_repeated(
    keys: Keys,
    is_written: bool,
    is_settled: bool,
    start: Start,
    shared: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys.changed()
    keys.do("rotate")
    if not is_settled:  # FILE.next is then the only copy of the key that signs
        with monkeypatch.context() as patched:
            patched.setattr(rotation, "_settle", killed)
            with pytest.raises(Killed):
                keys.do("switch")
    else:
        keys.do("switch")
    before = keys.do("standing").current

    write = Database.write

    async def killed_after(self: Database, work: Any) -> None:
        await write(self, work)
        raise Killed

    with monkeypatch.context() as patched:
        if is_written:
            patched.setattr(Database, "write", killed_after)
        else:
            patched.setattr(audit, "add", killed)
        with pytest.raises(Killed):
            keys.do("replace")
    now = keys.do("standing").current
    assert (now != before) == is_written
    with start(**shared) as http:
        assert http.get("/readyz").status_code == 200
        assert http.app.services.server_keys.current.key_id == now
    assert keys.do("switch").current == now
    assert DeviceKey.from_pem(keys.place.read_bytes()).key_id == now
    assert len(rotation.chain(keys.place)) == (0 if is_written else 2)
    after = keys.do("replace")
    assert after.current != now
    assert (after.former, after.next, after.here) == ((), None, (after.current,))
    assert [file.name for file in rotation.key_files(keys.place) if file.exists()] == [
        keys.place.name
    ]


@pytest.mark.usefixtures("started")
def test_a_key_is_erased_only_once_the_log_has_it(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = keys.do("standing").current
    keys.changed()
    with monkeypatch.context() as patched:
        patched.setattr(audit, "add", killed)
        with pytest.raises(Killed):
            keys.do("retire")
    assert rotation.former_file(keys.place).exists()
    assert keys.do("retire").erased == before
    assert not rotation.former_file(keys.place).exists()
