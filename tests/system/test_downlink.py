"""Whole tasks over HTTP whose models go down coded: devices that skip rounds, that lose what they
held or get forged bytes, all come to the models that the server has; and the bytes are as promised.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from fedpress_client import Client, Event
from fedpress_client.state import StateDirectory
from fedpress_client.trainer import Evaluation, Trained, TrainingRequest
from fedpress_client.transport import HttpTransport
from fedpress_compression.tensors import ModelSpec
from fedpress_protocols.downlink import decode_difference, decode_model
from fedpress_protocols.errors import ConfigurationError, FedpressError, NotFound
from fedpress_protocols.messages import DownlinkTerms, RoundStatus, TaskSummary
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms
from fedpress_server import Settings, create_app
from fedpress_server.storage.files import model_name, optimizer_name
from tests import databases
from tests.devices import ADMIN_TOKEN, Device, Operator, checked
from tests.masked import Participant, Unread, drive, masked_task
from tests.server.in_process import Server, history, running
from tests.system.test_crash import CLIENTS, FEDAVGM, ONE_EPOCH, PROFILE, federate

TOPK = {"id": "error_feedback", "inner": {"id": "topk", "fraction": 0.05, "magnitude_bits": 2}}
ONE = {"size": 1, "minimum": 1}


def first_model() -> Model:
    rng = np.random.default_rng(4)
    return Model.from_tensors(
        {
            "w": rng.normal(scale=0.05, size=(96, 60)).astype(np.float32),
            "b": np.zeros(96, np.float32),
            "steps": np.array(7, np.int64),
        }
    )


class Wanderer:
    """Moves some coordinates a lot and most a little, and remembers at which models it began."""

    honours = frozenset({"steps", "proximal", "control"})  # in name; what it does is noise anyway

    def __init__(self, number: int) -> None:
        self.number = number
        self.began: list[str] = []

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        self.began.append(model.digest)
        where = np.random.default_rng(5)
        rng = np.random.default_rng([self.number, work.round, work.attempt])
        scale = where.gamma(0.3, 0.02, model.spec.size)
        step = (scale * rng.standard_normal(model.spec.size)).astype(np.float32)
        return Trained(model.parameters + step, 5 + self.number, report={"steps": 3.0})

    def evaluate(self, model: Model) -> Evaluation | None:
        return None


class Altered(httpx.BaseTransport):
    """Answers to GETs of coded models pass through `alter`."""

    def __init__(self, server: Server, alter: Callable[[str, bytes], bytes]) -> None:
        self._transport = Unread(server)
        self._alter = alter

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._transport.handle_request(request)
        path = request.url.path
        if answer.status_code != 200 or not (path.endswith("/coded") or "/from/" in path):
            return answer
        data = self._alter(path, answer.read())
        headers = {"content-length": str(len(data))}
        return httpx.Response(200, headers=headers, stream=httpx.ByteStream(data))


class Fleet:
    """A server in this process and real devices, driven one step at a time."""

    def __init__(
        self,
        server: Server,
        folder: Path,
        num_devices: int,
        task: str = "digits",
        *,
        model: Model | None = None,
        trainers: Sequence[Wanderer] = (),
        **config: Any,
    ) -> None:
        self.server, self.operator, self.folder = server, Operator(server), folder
        self.task = task
        self.brought = first_model() if model is None else model
        token = self.operator.token(uses=num_devices)
        self.operator.begin(
            self.brought,
            task,
            **{
                "profiles": [{"name": "one", "compressor": TOPK}],
                "cohort": ONE,
                "downlink": {},
                "max_abs": 1e3,
                **config,
            },
        )
        self.trainers = list(trainers) or [Wanderer(number) for number in range(num_devices)]
        self.events: list[list[Event]] = [[] for _ in self.trainers]
        self.token = token
        self.clients = [self.client(number) for number in range(num_devices)]

    def client(self, number: int, http: httpx.BaseTransport | None = None, **how: Any) -> Client:
        folder = self.folder / f"device-{number}"
        key = StateDirectory.open(folder).key()
        return Client(
            "http://fedpress.test",
            self.trainers[number],
            state_dir=folder,
            task=self.task,
            token=self.token,
            seed=number,
            wait=0.0,
            on_event=self.events[number].append,
            transport=HttpTransport("http://fedpress.test", key, http=http or Unread(self.server)),
            **how,
        )

    @property
    def summary(self) -> TaskSummary:
        return TaskSummary.model_validate(self.operator.get(f"/v1/tasks/{self.task}"))

    def round(self, *who: int) -> None:
        """These devices take part in the next round, and wait until it is committed."""
        before = self.summary.round
        due = {number: self.uploads(number) + 1 for number in who}
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            for number in who:
                if self.uploads(number) < due[number]:
                    self.clients[number].step()
            if self.summary.round > before:
                return
            time.sleep(0.005)
        raise AssertionError(f"round {before + 1} did not end")

    def uploads(self, number: int) -> int:
        """How often the device has sent a body."""
        return sum(event.kind == "uploaded" for event in self.events[number])

    def models(self) -> list[str]:
        """Of all rounds, from the first model on."""
        done = [
            status for status in history(self.operator, self.task) if status.state == "committed"
        ]
        assert all(status.model for status in done)
        return [done[0].base_model, *(status.model or "" for status in done)]

    def file(self, digest: str) -> bytes:
        payloads = self.server.app.services.payloads
        return bytes(payloads.get(model_name(digest)))


@pytest.fixture
def server(tmp_path: Path) -> Any:
    settings = Settings(
        data_dir=tmp_path / "server", admin_token=ADMIN_TOKEN, tick_seconds=3600, poll_seconds=0.01
    )
    databases.lay(settings.data_dir / "fedpress.db")
    with running(create_app(settings)) as http:
        yield http


def forms_of(status: RoundStatus) -> tuple[int, int, int]:
    plain = status.download_bytes
    plain -= status.coded_download_bytes + status.difference_download_bytes
    return plain, status.coded_download_bytes, status.difference_download_bytes


def test_devices_that_skip_rounds_come_to_the_same_models_for_a_tenth(
    server: Server, tmp_path: Path
) -> None:
    fleet = Fleet(server, tmp_path, 2, rounds=12, downlink={"keep": 3})
    for number in range(11):
        # The second device is there in rounds 3 and 5, then away for longer than is kept.
        fleet.round(1 if number in (2, 4, 10) else 0)
    models = fleet.models()
    began = [*fleet.trainers[0].began, *fleet.trainers[1].began]
    assert sorted(began) == sorted(models[:-1])
    whole = len(fleet.brought.to_bytes())
    rounds = history(fleet.operator)
    for number, status in enumerate(rounds[:11]):
        plain, coded, difference = forms_of(status)
        assert plain == 0
        if number in (0, 2, 10):  # the devices' first rounds, and the one after a long absence
            assert 0 < coded <= whole / 2
            assert difference == 0
        else:
            assert coded == 0
            assert 0 < difference <= whole / 10
    traffic = [client.summary().traffic for client in fleet.clients]
    assert all(each.coded_down and each.difference_down for each in traffic)


STEPS = {"local_steps": 2, "learning_rate": 0.5}
FEEDBACK = {"id": "error_feedback", "inner": {"id": "topk", "fraction": 0.1, "magnitude_bits": 4}}


def one(compressor: dict[str, Any]) -> dict[str, Any]:
    return {"profiles": [{"name": "one", "compressor": compressor}]}


def with_contexts(known: str) -> dict[str, Any]:
    inner = {"id": "topk", "fraction": 0.05, "magnitude_bits": 1}
    return one({"id": "coded", "inner": inner, "coder": "auto", "contexts": known})


WORKS: dict[str, dict[str, Any]] = {
    "fedavgm": {"strategy": {"id": "fedavgm", "momentum": 0.5}},
    "fedadam": {"strategy": {"id": "fedadam"}},
    "feddyn": {
        "strategy": {"id": "feddyn", "clients": 2},
        "training": STEPS,
        **one({"id": "quantize", "bits": 4}),
    },
    "fednova": {"strategy": {"id": "fednova"}},
    "median": {
        "strategy": {"id": "median"},
        "cohort": {"size": 2, "minimum": 2},
        **one({"id": "quantize", "bits": 4}),
    },
    "average": {"strategy": {"id": "ema", "decay": 0.5}},
    "personal": {"strategy": {"id": "fedper", "personal": ["b"]}},
    "uncompressed": one({"id": "none"}),
    "previous": with_contexts("previous"),
    "drift": with_contexts("drift"),
    "activity": with_contexts("activity"),
    "cafe": one({"id": "cafe", "inner": {"id": "topk", "fraction": 0.05}, "guard": None}),
    "shared support": one({"id": "error_feedback", "inner": {"id": "shared_support"}}),
    "range coder": {"downlink": {"coder": "auto"}},
    "fine": {"downlink": {"bits": 14, "rate": 3.2}},
    "coarse": {"downlink": {"bits": 6, "rate": 0.05}},
    "fedbuff": {
        "strategy": {"id": "fedbuff"},
        "cohort": {"size": 2, "minimum": 2},
        "asynchronous": {"concurrency": 2},
    },
    "fedasync": {"strategy": {"id": "fedasync"}, "asynchronous": {"concurrency": 2}},
}


KINDS = {"cafe", "fedbuff"}
"""Side information that follows from the models, and no rounds."""


@pytest.mark.parametrize(
    "name",
    [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in WORKS],
)
def test_it_goes_with(name: str, server: Server, tmp_path: Path) -> None:
    fleet = Fleet(server, tmp_path, 2, **{"rounds": 4, **WORKS[name]})
    together = WORKS[name].get("cohort", ONE)["size"] == 2
    for number in range(4):
        fleet.round(*((0, 1) if together else (number % 2,)))
    models = fleet.models()
    assert len(set(models)) == 5
    for began in (trainer.began for trainer in fleet.trainers):
        assert began
        if name != "personal":  # which begins at values of its own
            assert set(began) <= set(models)
    for status in history(fleet.operator):
        plain, coded, difference = forms_of(status)
        if name != "activity":  # whose maps go down as they are
            assert plain == 0
        assert coded or difference or status.assigned == 0
    assert fleet.summary.state == "finished"


def test_it_goes_with_differences_to_own_uploads(server: Server, tmp_path: Path) -> None:
    enrolled = Fleet(server, tmp_path, 2)
    members = [client.ledger.client_id for client in enrolled.clients]
    for client in enrolled.clients:
        client.close()
    delta = one({"id": "delta", "inner": {"id": "quantize", "bits": 4}})
    fleet = Fleet(server, tmp_path, 2, task="own", rounds=4, members=members, **delta)
    for number in range(4):
        fleet.round(number % 2)
    assert len(set(fleet.models())) == 5
    assert sorted([*fleet.trainers[0].began, *fleet.trainers[1].began]) == sorted(
        fleet.models()[:-1]
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "scaffold": (
        {
            "strategy": {"id": "scaffold", "clients": 2},
            "training": STEPS,
            **one({"id": "none"}),
        },
        "vector of the model's size",
    ),
    "ef21": (one({"id": "ef21", "inner": {"id": "topk", "fraction": 0.1}}), "very mean"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with(name: str, server: Server, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    with pytest.raises(ConfigurationError, match=reason):
        Fleet(server, tmp_path, 1, **config)


class Creeper(Wanderer):
    """Moves every coordinate by a sixteenth of what float16 can tell from one."""

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        self.began.append(model.digest)
        return Trained(model.parameters + np.float32(2.0**-14), 1)


def test_steps_too_small_for_half_precision_add_up(server: Server, tmp_path: Path) -> None:
    model = Model.from_tensors({"w": np.ones((40, 30), np.float16)})
    terms = {"rate": 3.2, "bits": 14}
    how: dict[str, Any] = {"downlink": terms, "rounds": 12, **one({"id": "none"})}
    fleet = Fleet(server, tmp_path, 1, model=model, trainers=[Creeper(0)], **how)
    for _ in range(12):
        fleet.round(0)
    models = fleet.models()
    moved_in = [before != after for before, after in itertools.pairwise(models)]
    assert sum(moved_in) == 1  # the eighth step comes to half of one in the last place
    last = Model.from_bytes(fleet.file(models[-1]))
    assert last.spec == model.spec
    assert set(last.parameters) == {1 + 2.0**-10}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_models_of_half_precision_go_down_coded(dtype: str, server: Server, tmp_path: Path) -> None:
    full = first_model()
    spec = ModelSpec(
        tuple(replace(t, dtype=dtype) if t.is_trained else t for t in full.spec.tensors)
    )
    half = Model(spec, full.parameters, full.buffers)
    fleet = Fleet(server, tmp_path, 2, model=half, rounds=6)
    for number in range(6):
        fleet.round(number % 2)
    models = fleet.models()
    assert sorted([*fleet.trainers[0].began, *fleet.trainers[1].began]) == sorted(models[:-1])
    assert {Model.from_bytes(fleet.file(digest)).spec for digest in models} == {spec}
    assert len(set(models)) == 7
    for number, status in enumerate(history(fleet.operator)):
        plain, coded, difference = forms_of(status)
        assert plain == 0
        assert bool(coded) == (number < 2)
        assert bool(difference) == (number >= 2)
        assert coded + difference <= len(half.to_bytes()) / (1 if number < 2 else 5)


def test_a_bfloat16_module_learns_in_16_bits_both_ways(server: Server, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", exc_type=ImportError)
    from fedpress_client.torch_trainer import TorchTrainer

    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(120, 32, generator=draw)
    labels = (inputs @ torch.randn(32, 4, generator=draw)).argmax(dim=1)

    def device(number: int) -> Any:
        mine = torch.utils.data.TensorDataset(inputs[number::2].bfloat16(), labels[number::2])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
            module = torch.nn.Sequential(*layers).to(torch.bfloat16)
        return TorchTrainer(
            module,
            torch.nn.CrossEntropyLoss(),
            lambda parameters: torch.optim.SGD(parameters, lr=0.2),
            mine,
            evaluation_data=mine,
            batch_size=10,
            autocast="bfloat16",
        )

    trainers = [device(0), device(1)]
    first = trainers[0].initial_model()
    how = one({"id": "error_feedback", "inner": {"id": "half"}})
    cohort = {"size": 2, "minimum": 2}
    fleet = Fleet(
        server, tmp_path, 2, model=first, trainers=trainers, rounds=5, cohort=cohort, **how
    )
    for _ in range(5):
        fleet.round(0, 1)
    last = Model.from_bytes(fleet.file(fleet.models()[-1]))
    assert {tensor.dtype for tensor in last.spec.tensors} == {"bfloat16"}
    losses = [trainers[0].evaluate(model).metrics["loss"] for model in (first, last)]
    assert losses[1] < 0.7 * losses[0]
    for status in history(fleet.operator):
        assert 0 < status.upload_bytes < 2 * 2 * first.spec.size
        assert forms_of(status)[0] == 0


def test_it_goes_with_the_masked_lane(server: Server, tmp_path: Path) -> None:
    operator, first = Operator(server), first_model()
    masked_task(operator, first, 3, rounds=3, downlink={})
    token = operator.token(uses=3)
    people = [
        Participant(tmp_path, number, token, lambda: Unread(server), time.time)
        for number in range(3)
    ]
    drive(people, lambda: time.sleep(0.01), turns=2000)
    rounds = history(operator)
    assert [status.state for status in rounds] == ["committed"] * 3
    whole = len(first.to_bytes())
    assert [forms_of(status)[0] for status in rounds] == [0, 0, 0]
    assert 0 < rounds[0].coded_download_bytes <= 3 * whole / 2
    assert all(0 < each.difference_download_bytes <= 3 * whole / 10 for each in rounds[1:])


def flipped(path: str, data: bytes) -> bytes:
    return data[:-1] + bytes((data[-1] ^ 1,))


def shorter(path: str, data: bytes) -> bytes:
    return data[: len(data) // 2]


def longer(path: str, data: bytes) -> bytes:
    return data + b"\x00"


def another(path: str, data: bytes) -> bytes:
    """A whole model for a difference and the other way round."""
    return bytes((data[0] ^ 3,)) + data[1:]


@pytest.mark.parametrize(
    "alter",
    [flipped, *(pytest.param(each, marks=pytest.mark.slow) for each in (shorter, longer, another))],
)
def test_a_device_that_gets_other_bytes_fetches_the_file_itself(
    alter: Callable[[str, bytes], bytes], server: Server, tmp_path: Path
) -> None:
    fleet = Fleet(server, tmp_path, 1, rounds=3)
    fleet.clients[0] = fleet.client(0, Altered(server, alter))
    for _ in range(3):
        fleet.round(0)
    assert fleet.trainers[0].began == fleet.models()[:-1]
    for status in history(fleet.operator):
        assert forms_of(status)[0] == len(fleet.brought.to_bytes())


def test_a_whole_model_beyond_what_a_device_admits_is_not_made(
    server: Server, tmp_path: Path
) -> None:
    """The coded form is small enough to come; the model in it is not."""
    fleet = Fleet(server, tmp_path, 1)
    fleet.clients[0] = fleet.client(0, max_model_bytes=len(fleet.brought.to_bytes()) - 1000)
    fleet.clients[0].step()
    (declined,) = [event for event in fleet.events[0] if event.kind == "declined"]
    assert "bytes of this device's max_model_bytes" in declined.details["reason"]
    assert not fleet.trainers[0].began


def test_a_device_whose_models_are_gone_or_damaged_asks_for_what_it_needs(
    server: Server, tmp_path: Path
) -> None:
    fleet = Fleet(server, tmp_path, 1, rounds=4)
    fleet.round(0)
    kept = tmp_path / "device-0" / "tasks" / "digits" / "models"
    for path in kept.iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    fleet.round(0)
    for path in kept.iterdir():
        path.unlink()
    fleet.round(0)
    fleet.clients[0].close()
    fleet.clients[0] = fleet.client(0)  # another process, which finds the model on the disk
    fleet.round(0)
    forms = [forms_of(status) for status in history(fleet.operator)]
    assert [bool(coded) for _, coded, _ in forms] == [True, True, True, False]
    assert [bool(difference) for *_, difference in forms] == [False, False, False, True]
    assert fleet.trainers[0].began == fleet.models()[:-1]


def test_a_step_leaves_nothing_out_for_good(server: Server, tmp_path: Path) -> None:
    """What the strategy has come to is what was brought and every included update; what is
    published and what is not, together, are that."""
    fleet = Fleet(server, tmp_path, 1, rounds=6, downlink={"rate": 0.2}, **one({"id": "none"}))
    target = fleet.brought.parameters.astype(np.float64)
    for number in range(6):
        before = Model.from_bytes(fleet.file(fleet.summary.model)).parameters
        fleet.round(0)
        trained = Wanderer(0).train(
            fleet.brought.with_parameters(before),
            TrainingRequest("digits", number + 1, 1, TrainingTerms(), 0),
        )
        target = (target + (trained.parameters - before)).astype(np.float32)
        published = Model.from_bytes(fleet.file(fleet.summary.model)).parameters
        kept = parameters_kept(fleet)
        np.testing.assert_allclose(kept, target, rtol=0, atol=1e-6)
        gap = np.abs(kept - published).max()
        assert gap <= np.abs(kept - before).max()
        target = kept


def parameters_kept(fleet: Fleet) -> np.ndarray:
    """The strategy's own, as they lie on the server's disk."""
    record = fleet.server.app.services.store.tasks[fleet.task].record
    assert record.optimizer_state is not None
    data = fleet.server.app.services.payloads.get(optimizer_name(record.optimizer_state))
    return np.asarray(safetensors.numpy.load(data)["parameters"])


def test_a_task_goes_on_from_its_own_last_model_with_what_it_kept(
    server: Server, tmp_path: Path
) -> None:
    fleet = Fleet(server, tmp_path, 1, rounds=2, at_end="paused")
    fleet.round(0)
    fleet.round(0)
    last, kept = fleet.summary.model, parameters_kept(fleet)
    more = {"after_round": 2, "rounds": 2, "model": last}
    fleet.operator.post("/v1/admin/tasks/digits/continue", more)
    fleet.operator.post("/v1/admin/tasks/digits/continue", more)
    assert fleet.summary.model == last
    assert parameters_kept(fleet).tobytes() == kept.tobytes()
    fleet.round(0)
    fleet.round(0)
    assert forms_of(history(fleet.operator)[2])[:2] == (0, 0)
    assert fleet.trainers[0].began == fleet.models()[:-1]
    rng = np.random.default_rng(9)
    other = fleet.brought.with_parameters(
        rng.standard_normal(fleet.brought.spec.size).astype(np.float32)
    )
    more = {"after_round": 4, "rounds": 1, "model": fleet.operator.bring(other)}
    for _ in range(2):  # the second changes nothing
        fleet.operator.post("/v1/admin/tasks/digits/continue", more)
    assert fleet.summary.model not in (last, other.digest)
    assert parameters_kept(fleet).tobytes() == other.parameters.tobytes()
    fleet.round(0)
    assert forms_of(history(fleet.operator)[-1])[0] == 0


def test_the_api_serves_coded_models_for_good(server: Server, tmp_path: Path) -> None:
    fleet = Fleet(server, tmp_path, 1, rounds=6, downlink={"keep": 2})
    for _ in range(5):
        fleet.round(0)
    models = fleet.models()
    device = Device(server)
    device.enrol(fleet.operator.token())
    newest = Model.from_bytes(fleet.file(models[-1]))
    path = f"/v1/models/{models[-1]}/coded?task=digits"
    answer = checked(device.request("GET", path))
    assert decode_model(answer.content, 10**6).to_bytes() == newest.to_bytes()
    assert "immutable" in answer.headers["cache-control"]
    tag = answer.headers["etag"]
    assert device.request("GET", path, headers={"If-None-Match": tag}).status_code == 304
    part = device.request("GET", path, headers={"Range": "bytes=10-19", "If-Range": tag})
    assert part.content == answer.content[10:20]
    for back in (1, 2):
        base = Model.from_bytes(fleet.file(models[-1 - back]))
        path = f"/v1/models/{models[-1]}/from/{models[-1 - back]}?task=digits"
        found = checked(device.request("GET", path))
        assert found.headers["etag"] != tag
        assert decode_difference(found.content, base).to_bytes() == newest.to_bytes()
    first = checked(device.request("GET", f"/v1/models/{models[0]}/coded?task=digits"))
    assert decode_model(first.content, 10**6).to_bytes() == fleet.file(models[0])
    for gone in (
        f"/v1/models/{models[-1]}/from/{models[-4]}?task=digits",
        f"/v1/models/{models[-1]}/from/{'0' * 64}?task=digits",
        f"/v1/models/{'0' * 64}/coded?task=digits",
        f"/v1/models/{fleet.brought.digest}/coded?task=digits",
    ):
        with pytest.raises(NotFound):
            checked(device.request("GET", gone))
    with pytest.raises(FedpressError):
        checked(device.request("GET", f"/v1/models/{models[-1]}/coded"))
    fleet.operator.begin(fleet.brought, "plain", cohort=ONE)
    with pytest.raises(NotFound, match="no downlink"):
        checked(device.request("GET", f"/v1/models/{fleet.brought.digest}/coded?task=plain"))


def test_a_coded_file_that_is_there_is_found_without_a_listing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing of an S3 store takes longer than the download."""
    fleet = Fleet(server, tmp_path, 1, rounds=4)
    fleet.round(0)
    device = Device(server)
    device.enrol(fleet.operator.token())
    path = f"/v1/models/{fleet.models()[-1]}/coded?task=digits"
    first = checked(device.request("GET", path)).content
    payloads, listed = server.app.services.payloads, list[str]()
    names = payloads.names

    def listing(folder: str) -> Iterator[str]:
        listed.append(folder)
        return names(folder)

    monkeypatch.setattr(payloads, "names", listing)
    assert checked(device.request("GET", path)).content == first
    assert listed == []


def test_a_coded_file_that_is_lost_is_made_again_the_same(server: Server, tmp_path: Path) -> None:
    fleet = Fleet(server, tmp_path, 1, rounds=4)
    fleet.round(0)
    fleet.round(0)
    models = fleet.models()
    device = Device(server)
    device.enrol(fleet.operator.token())
    paths = [
        f"/v1/models/{models[-1]}/coded?task=digits",
        f"/v1/models/{models[-1]}/from/{models[-2]}?task=digits",
    ]
    before = [checked(device.request("GET", path)) for path in paths]
    server.app.services.payloads.drop("coded")
    after = [checked(device.request("GET", path)) for path in paths]
    assert [each.content for each in after] == [each.content for each in before]
    assert [each.headers["etag"] for each in after] == [each.headers["etag"] for each in before]


def test_a_server_that_begins_again_makes_the_same_models(tmp_path: Path) -> None:
    """Stopped after every round, or never."""
    made = []
    for stops in (False, True):
        folder = tmp_path / str(stops)
        settings = Settings(
            data_dir=folder / "server",
            admin_token=ADMIN_TOKEN,
            tick_seconds=3600,
            poll_seconds=0.01,
        )
        fleet: Fleet | None = None
        for first in range(4) if stops else (0,):
            with running(create_app(settings)) as http:
                if fleet is None:
                    fleet = Fleet(http, folder, 1, rounds=4)
                fleet.server, fleet.operator = http, Operator(http)
                fleet.clients[0].close()
                fleet.clients[0] = fleet.client(0)
                for _ in range(1 if stops else 4):
                    fleet.round(0)
                models = fleet.models()
                assert len(models) == (first + 2 if stops else 5)
                fleet.clients[0].close()
        made.append(models)
    assert made[0] == made[1]


@pytest.mark.soak
@pytest.mark.slow
def test_a_killed_server_publishes_the_same_models(tmp_path: Path, soak: bool) -> None:
    rounds, kills = (20, 20) if soak else (5, 5)
    task = (PROFILE, FEDAVGM, ONE_EPOCH, DownlinkTerms(rate=1.0))
    calm = federate(tmp_path / "calm", rounds, 0, random.Random(0), *task)
    rough = federate(tmp_path / "rough", rounds, kills, random.Random(5), *task)
    assert rough == calm
    assert len(calm.included) == rounds * CLIENTS
