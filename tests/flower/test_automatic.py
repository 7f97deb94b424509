"""No compressor named: the default of fedpress's server, under Flower and in simulations."""

import csv
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

import httpx
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import strategy as flowers
from threadpoolctl import threadpool_limits

from fedpress.simulate.apps import TrainerApp
from fedpress.simulate.partition import Partition
from fedpress.simulate.run import TASK, Settings, simulate
from fedpress.simulate.tasks import Task
from fedpress_client import Client
from fedpress_client.state import StateDirectory
from fedpress_client.transport import HttpTransport
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_flower import envelope
from fedpress_flower.client import compression_mod
from fedpress_flower.envelope import client_seed
from fedpress_flower.server import FedpressStrategy, MaskedStrategy, Plan
from fedpress_flower.server.automatic import Rates, default_strategy
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.model import Model
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.policies import Auto
from fedpress_server import Settings as ServerSettings
from fedpress_server import create_app
from fedpress_strategies import from_config
from tests.devices import ADMIN_TOKEN, Operator
from tests.flower.fleet import Fleet, StreamingFleet, reply
from tests.flower.masked_fleet import MaskedFleet
from tests.flower.test_mod_and_strategy import app_of, flat, run
from tests.server.in_process import Server, history, running

logging.getLogger("flwr").setLevel(logging.ERROR)

QUICK: dict[str, Any] = {"clients": 3, "fraction": 1.0, "local_steps": 3, "seed": 5}


class Whole(httpx.BaseTransport):
    """To a server in this process, whose answers come as a stream, as over a socket."""

    def __init__(self, server: Server) -> None:
        self._transport = server._transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._transport.handle_request(request)
        stream = httpx.ByteStream(answer.read())
        return httpx.Response(answer.status_code, headers=answer.headers, stream=stream)


def models_over_http(folder: Path, settings: Settings) -> list[str | None]:
    """The models of a server's task that names no compressor, with the same devices."""
    partition = Partition.parse(settings.partition)
    task = Task.parse(settings.data, settings.clients, partition, settings.seed, "cpu")
    server_settings = ServerSettings(
        data_dir=folder / "server", admin_token=ADMIN_TOKEN, tick_seconds=3600
    )
    model = Model.from_bytes(task.initial_model().to_bytes())
    with running(create_app(server_settings)) as server, threadpool_limits(1):
        operator = Operator(server)
        operator.begin(
            model,
            TASK,
            rounds=settings.num_rounds,
            profiles=None,
            cohort={"size": settings.clients, "minimum": settings.clients},
            training=settings.terms.model_dump(),
            seed=settings.seed,
        )
        clients = []
        for index in range(settings.clients):
            state = folder / f"device-{index}"
            clients.append(
                Client(
                    "http://fedpress.test",
                    task.trainer(index),
                    state_dir=state,
                    task=TASK,
                    token=operator.token(),
                    seed=client_seed(settings.seed, index),
                    wait=0.0,
                    sleep=lambda seconds: None,
                    transport=HttpTransport(
                        "http://fedpress.test", StateDirectory.open(state).key(), http=Whole(server)
                    ),
                )
            )
        going = list(clients)
        for _ in range(400):
            going = [client for client in going if client.step() is not None]
            if not going:
                break
        for client in clients:
            client.close()
        statuses = sorted(history(operator, TASK), key=lambda status: status.round)
    return [status.model for status in statuses]


def test_a_simulation_that_names_nothing_makes_the_models_of_a_servers_task(tmp_path: Path) -> None:
    """Of three clients, too few for a probe, since who is first at a server hangs on time."""
    settings = Settings(**QUICK, rounds=7, engine="local")
    simulated = simulate(settings, tmp_path / "simulated")
    assert [row.model for row in simulated.rows] == models_over_http(tmp_path, settings)
    assert [row.profile for row in simulated.rows] == ["1.6-bit"] * 7


def test_the_histories_of_a_default_run_have_decisions_and_their_reasons(tmp_path: Path) -> None:
    short = {**QUICK, "clients": 6}
    # A gap that is said gives a short run all rates.
    settings = Settings(**short, rounds=6, engine="local", compressor="auto:gap=0.5")
    history = simulate(settings, tmp_path)
    first, *_ = history.rows
    why = "begin at the most compressed profile"
    assert (first.profile, first.policies) == ("0.1-bit", why)
    probed, sketches = history.rows[3], 6 * (4 + 2048 // 4)
    assert (probed.upload_bytes or 0) > sketches
    assert all((row.download_bytes or 0) < 6 * 4 * 50_826 / 2 for row in history.rows)
    assert {"accuracy", "loss", "newest-accuracy", "newest-loss"} <= set(history.rows[-1].test)
    assert history.rows[-1].test["loss"] != history.rows[-1].test["newest-loss"]
    with (tmp_path / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["policies"] == why
    assert {row["profile"] for row in rows} == {"0.1-bit"}


def test_one_seed_gives_one_default_run_on_a_pool_and_after_a_stop(tmp_path: Path) -> None:
    settings = {**QUICK, "clients": 6, "rounds": 5}
    whole = simulate(Settings(**settings, engine="local"), tmp_path / "local")
    pool = simulate(Settings(**settings, engine="processes", workers=2), tmp_path / "pool")
    assert [row.model for row in pool.rows] == [row.model for row in whole.rows]

    class Stopping:
        left = 31  # in the round of the probe, with replies in

        def update(self, history: Any, rounds: int, exchange: Any) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(Settings(**settings, engine="local"), tmp_path / "s", screen=Stopping())  # type: ignore[arg-type]
    again = simulate(Settings(**settings, engine="local"), tmp_path / "s")
    assert [row.model for row in again.rows] == [row.model for row in whole.rows]
    assert [row.policies for row in again.rows] == [row.policies for row in whole.rows]


def test_a_named_compressor_or_strategy_still_is_what_runs(tmp_path: Path) -> None:
    named = simulate(
        Settings(**QUICK, rounds=1, engine="local", compressor="topk:fraction=0.02"), tmp_path / "1"
    )
    assert (named.rows[0].profile, named.rows[0].policies) == ("flower", None)
    assert "newest-loss" not in named.rows[0].test
    own = simulate(
        Settings(**QUICK, rounds=1, engine="local", strategy="fedavg", downlink=False),
        tmp_path / "2",
    )
    assert own.rows[0].profile == "1.6-bit"
    assert "newest-loss" not in own.rows[0].test
    assert own.rows[0].download_bytes is not None
    assert own.rows[0].download_bytes > 3 * 2 * 4 * 50_826  # float32, and the model before


def test_terms_of_auto_are_an_option(tmp_path: Path) -> None:
    settings = Settings(**QUICK, rounds=1, engine="local", compressor="auto:gap=0.125")
    assert simulate(settings, tmp_path).rows[0].profile == "0.57-bit"
    for wrong in ("auto:gap=0", "auto:rate=1"):
        with pytest.raises(ConfigurationError):
            simulate(Settings(**QUICK, engine="local", compressor=wrong), tmp_path / "wrong")
    with pytest.raises(IncompatiblePlan, match="terms of auto"):
        Plan(TopK(0.1), auto=Auto(gap=2))


# Under Flower


BEFORE = {"w": np.zeros((40, 50), np.float32), "b": np.zeros(10, np.float32)}


def arrays_in(message: Message) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in message.content["arrays"].items()}


def training(message: Message, context: Context) -> Message:
    """Nearly the same step on every client, of few large values."""
    number = int(message.content["config"]["server-round"])
    model = arrays_in(message)
    rng = np.random.default_rng([number, context.node_id])
    common = np.random.default_rng(7)
    after = {
        name: each + common.normal(0, 0.3, each.shape).astype(np.float32) ** 3
        for name, each in model.items()
    }
    after = {
        name: each + rng.normal(0, 0.02, each.shape).astype(np.float32)
        for name, each in after.items()
    }
    return reply(message, after, train_loss=1 / number)


def fleet_of(folder: Path, count: int) -> Fleet:
    mod = compression_mod(state_dir=folder, seed=1, durable=False)
    return StreamingFleet(app_of(mod, train=training), count)


def test_a_flower_user_who_names_nothing_has_the_default(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 4)
    strategy = FedpressStrategy(plan=Plan(seed=1), fraction_evaluate=0.0)
    seen: list[np.ndarray] = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(flat(arrays))
        return MetricRecord({"accuracy": 0.5})

    result = run(strategy, fleet, 6, BEFORE, evaluate_fn=evaluate)
    reports = strategy.reports
    assert [report.profile for report in reports[:4]] == ["1.6-bit"] * 4
    probe = reports[3].course
    assert probe is not None
    assert probe.probe
    assert probe.comparison is not None
    assert probe.comparison.clients == 4
    assert probe.comparison.progress is not None
    assert all(report.coded_download_bytes == report.download_bytes for report in reports)
    # The average is served; clients go on from the newest model.
    assert strategy.newest is not None
    assert strategy.average is not None
    np.testing.assert_array_equal(flat(result.arrays), flat(strategy.average))
    np.testing.assert_array_equal(seen[-1], flat(strategy.average))
    assert np.linalg.norm(flat(strategy.newest)) > 1.2 * np.linalg.norm(seen[-1])


def test_the_default_s_strategy_has_momentum_and_an_average() -> None:
    assert default_strategy(6).properties.server_state == "velocity [d], norms [2], average [d]"


def test_a_probe_has_all_clients_keep_the_round_s_profile_and_send_a_sketch(
    tmp_path: Path,
) -> None:
    fleet = fleet_of(tmp_path, 4)
    strategy = FedpressStrategy(plan=Plan(seed=1), fraction_evaluate=0.0)
    run(strategy, fleet, 34, BEFORE)
    plans: dict[int, list[RoundPlan]] = {}
    for message in fleet.sent:
        plan = RoundPlan.from_json(str(message.content[envelope.RECORD][envelope.PLAN]))
        plans.setdefault(plan.round, []).append(plan)
    for number, sent in plans.items():
        assert len(sent) == 4
        assert [plan.profiles for plan in sent] == [sent[0].profiles] * 4
        assert len(sent[0].profiles) == 1
        assert {plan.sketch for plan in sent} == ({64} if number in (4, 34) else {0})
    asked = {report.round for report in strategy.reports if report.course and report.course.probe}
    assert asked == {4, 34}


def test_a_strategy_of_flowers_probes_by_sketches_too(tmp_path: Path) -> None:
    strategy = FedpressStrategy(flowers.FedAvg(fraction_evaluate=0.0), Plan(seed=1))
    run(strategy, fleet_of(tmp_path, 4), 4, BEFORE)
    probe = strategy.reports[3].course
    assert probe is not None
    assert probe.comparison is not None
    assert probe.comparison.clients == 4


def of_values(num: int, name: str = "weight") -> ModelSpec:
    return ModelSpec((TensorSpec(name, (num,)),))


def test_rates_say_how_many_cells_a_probe_s_sketches_have() -> None:
    for size, values, cells in ((4, 2010, 64), (4, 50_826, 2048), (3, 50_826, 0)):
        rates = Rates(Auto())
        rates.begin(30)
        found = list[int]()
        for number in range(1, 6):
            found.append(rates.opened(number, of_values(values), size)[1])
            rates.closed(None, 1000)
        assert found == [0, 0, 0, cells, 0], size


def test_the_default_s_momentum_waits_until_the_loss_falls(tmp_path: Path) -> None:
    """In ten rounds nodes tell the losses 1, 1/2 and 1/3 before the fourth, in six a fifth of the
    rounds is over before. A strategy that is named has all of its momentum."""
    momenta, models = list[list[float | None]](), list[np.ndarray]()
    for rounds, inner in ((6, None), (6, default_strategy(6, 10)), (20, None)):
        strategy = FedpressStrategy(inner, Plan(seed=1), fraction_evaluate=0.0)
        run(strategy, fleet_of(tmp_path / str(len(models)), 10), rounds, BEFORE)
        courses = [report.course for report in strategy.reports]
        momenta.append([course.momentum for course in courses if course is not None])
        assert strategy.newest is not None
        models.append(flat(strategy.newest))
    assert momenta == [[0.5] * 2 + [None] * 4, [None] * 6, [0.5] * 3 + [None] * 17]
    assert not np.array_equal(models[0], models[1])


def signs(message: Message, context: Context) -> Message:
    """A fixed step for each value, as of signSGD."""
    model = arrays_in(message)
    rng = np.random.default_rng(7)
    steps = {name: rng.choice([-0.01, 0.01], each.shape) for name, each in model.items()}
    return reply(message, {n: (model[n] + steps[n]).astype(np.float32) for n in model})


def test_flat_updates_have_more_bits_and_less_momentum(tmp_path: Path) -> None:
    mod = compression_mod(state_dir=tmp_path, seed=1, durable=False)
    strategy = FedpressStrategy(None, Plan(seed=1), fraction_evaluate=0.0)
    run(strategy, StreamingFleet(app_of(mod, train=signs), 10), 30, BEFORE)
    courses = [report.course for report in strategy.reports if report.course is not None]
    assert {report.profile for report in strategy.reports[1:]} == {"0.57-bit"}
    assert {course.momentum for course in courses} == {0.5}
    assert courses[1].why.startswith("gentler: updates are flat")


def test_a_strategy_of_flowers_keeps_what_it_is_and_gains_rates_and_a_downlink(
    tmp_path: Path,
) -> None:
    strategy = FedpressStrategy(flowers.FedAvg(fraction_evaluate=0.0), Plan(seed=1))
    result = run(strategy, fleet_of(tmp_path, 2), 2, BEFORE)
    assert [report.profile for report in strategy.reports] == ["1.6-bit"] * 2
    assert strategy.average is None
    assert strategy.reports[-1].difference_download_bytes > 0
    np.testing.assert_array_equal(flat(result.arrays), flat(strategy.newest))


def test_an_average_that_is_asked_for_is_served_too(tmp_path: Path) -> None:
    strategy = FedpressStrategy(
        from_config({"id": "ema", "decay": 0.5}), Plan(TopK(0.5)), fraction_evaluate=0.0
    )
    result = run(strategy, fleet_of(tmp_path, 2), 3, BEFORE)
    np.testing.assert_array_equal(flat(result.arrays), flat(strategy.average))
    assert not np.array_equal(flat(result.arrays), flat(strategy.newest))


def test_the_loss_that_clients_measure_takes_the_rate_back() -> None:
    rates = Rates(Auto(sketch=0))
    rates.begin(60)
    names = []
    for number in range(1, 31):
        names.append(rates.opened(number, of_values(1000), 10, 10)[0].name)
        rates.trained(number, MetricRecord({"train_loss": 1.0 if number < 18 else 3.0}))
        rates.evaluated(number, None)
        rates.closed(None, 1000)
    assert names[17] == "0.1-bit"
    assert names[-1] != "0.1-bit"


def test_evaluations_count_before_what_training_says() -> None:
    rates = Rates(Auto(sketch=0))
    rates.begin(60)
    names = []
    for number in range(1, 31):
        names.append(rates.opened(number, of_values(1000), 10, 10)[0].name)
        rates.trained(number, MetricRecord({"train_loss": 1.0 if number < 18 else 3.0}))
        rates.evaluated(number, MetricRecord({"accuracy": 0.1, "eval_loss": 1 / number}))
        rates.closed(None, 1000)
    assert names[-1] == "0.1-bit"


def test_a_model_with_running_statistics_has_more_bits() -> None:
    rates = Rates(Auto())
    rates.begin(300)
    assert rates.opened(1, of_values(1000, "norm.running_var"), 20, 40)[0].name == "0.4-bit"


def test_a_short_run_with_few_clients_sends_more_at_once() -> None:
    for auto, name in ((Auto(), "0.2-bit"), (Auto(gap=0.5), "0.1-bit")):
        rates = Rates(auto)
        rates.begin(30)
        assert rates.opened(1, of_values(1000), 4, 4)[0].name == name


def test_a_budget_of_bytes_raises_the_compression() -> None:
    rates = Rates(Auto(upload_bytes=10_000))
    rates.begin(100)
    assert rates.opened(1, of_values(1000), 3)[0].name == "0.28-bit"
    rates.closed(None, 1000)
    assert rates.opened(2, of_values(1000), 3)[0].name == "0.2-bit"
    course = rates.closed(None, 1000)
    assert course is not None
    assert "upload_bytes" in course.why


# Under masks


def test_a_masked_simulation_trains_on_the_support_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supports: list[int] = []
    made = TrainerApp.trainer

    def watched(self: TrainerApp, index: int) -> Any:
        trainer = made(self, index)
        train = trainer.train

        def noting(model: Any, request: Any) -> Any:
            supports.append(-1 if request.support is None else request.support.size)
            return train(model, request)

        monkeypatch.setattr(trainer, "train", noting)
        return trainer

    monkeypatch.setattr(TrainerApp, "trainer", watched)
    settings = Settings(**{**QUICK, "clients": 4}, rounds=2, engine="local", secure=True)
    history = simulate(settings, tmp_path)
    assert [row.included for row in history.rows] == [4, 4]
    assert len(supports) == 8
    assert all(0.04 * 50_826 < size < 0.08 * 50_826 for size in supports)
    bits = 8 * (history.rows[0].upload_bytes or 0) / 4 / 50_826
    assert bits < 0.5
    assert "newest-loss" in history.rows[-1].test


@pytest.mark.parametrize("honours", [(), ("restricted",)])
def test_restricted_training_is_asked_of_apps_that_know_it(
    honours: tuple[str, ...], tmp_path: Path
) -> None:
    told: list[int] = []

    def restricted(message: Message, context: Context) -> Message:
        record = message.content.config_records.get(envelope.SUPPORT)
        told.append(0 if record is None else len(bytes(record[envelope.INDICES])) // 8)
        return training(message, context)

    fleet = MaskedFleet(tmp_path, 4, restricted, honours=honours)
    plan = Plan(minimum=3, seed=1, restricted=True)
    strategy = MaskedStrategy(plan=plan, fraction_evaluate=0.0)
    run(strategy, fleet, 1, BEFORE)
    if honours:
        assert strategy.reports[0].included == (1, 2, 3, 4)
        assert told == [0.05 * 2000 + 10] * 4
    else:
        assert strategy.reports[0].included == ()
        assert "may not know how to" in strategy.reports[0].dropped[1]


def test_all_values_are_sent_where_training_is_not_restricted(tmp_path: Path) -> None:
    fleet = MaskedFleet(tmp_path, 4, training)
    strategy = MaskedStrategy(plan=Plan(minimum=3, seed=1), fraction_evaluate=0.0)
    result = run(strategy, fleet, 2, BEFORE)
    assert strategy.masking.levels == 2
    assert strategy.reports[-1].included == (1, 2, 3, 4)
    assert np.count_nonzero(flat(strategy.newest)) > 0.9 * 2010
    np.testing.assert_array_equal(flat(result.arrays), flat(strategy.average))


def test_terms_that_a_lane_cannot_have_are_refused() -> None:
    with pytest.raises(IncompatiblePlan, match="for masked rounds"):
        FedpressStrategy(plan=Plan(restricted=True))
    with pytest.raises(IncompatiblePlan, match="terms of auto under masks"):
        MaskedStrategy(plan=Plan(auto=Auto(gap=1), minimum=3))
