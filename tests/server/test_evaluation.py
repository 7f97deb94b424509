"""What devices measure: means by examples, by group and by class; the best model; when to stop."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from hypothesis import given
from hypothesis import strategies as st

from fedpress_protocols.errors import Conflict, FedpressError, Forbidden
from fedpress_protocols.messages import (
    EvaluationTerms,
    RoundStatus,
    TaskSummary,
)
from fedpress_protocols.model import Model
from fedpress_server.rounds import (
    Aggregated,
    ClientCheckedIn,
    EndTask,
    OpenRound,
    Round,
    SynchronousRound,
    UploadStaged,
)
from fedpress_server.storage.database import Database
from fedpress_server.storage.evaluation import MAX_GROUPS, Score, best, reason_to_stop
from tests.devices import Device, Operator
from tests.server import rounds
from tests.server.in_process import Clock, Enrolled, Start, include_one

pytestmark = pytest.mark.both_databases

ALONE = {"size": 1, "minimum": 1}
ALL_OF_4 = {"size": 4, "minimum": 4}


def report(device: Device, model: str, num_examples: int, **fields: Any) -> None:
    """Send one; `fields` that the report has no name for are metrics."""
    own: dict[str, Any] = {
        name: fields.pop(name) for name in ("classes", "attributes") if name in fields
    }
    body = {"model": model, "num_examples": num_examples, "metrics": fields, **own}
    device.json("POST", "/v1/tasks/digits/evaluations", json.dumps(body))


def counts(**classes: tuple[int, int]) -> dict[str, dict[str, int]]:
    return {
        name.removeprefix("of_"): {"num_examples": examples, "correct": correct}
        for name, (examples, correct) in classes.items()
    }


def status(operator: Operator, number: int = 1) -> RoundStatus:
    return RoundStatus.model_validate(operator.get(f"/v1/tasks/digits/rounds/{number}"))


def summary(operator: Operator) -> TaskSummary:
    return TaskSummary.model_validate(operator.get("/v1/tasks/digits"))


def one_more(device: Device, model: Model, value: float = 1.0) -> TaskSummary:
    """A round by this device alone, and the task after it."""
    answer = device.check_in("digits", include_one(device, model, value=value), wait=30)
    assert answer is not None
    return answer.task


def together(devices: Sequence[Device], model: Model, value: float = 1.0) -> TaskSummary:
    """A round of all these devices, and the task after it."""
    pending = [include_one(device, model, value=value) for device in devices]
    answer = devices[0].check_in("digits", pending[0], wait=30)
    assert answer is not None
    return answer.task


# Aggregates


def test_groups_and_classes_are_means_by_examples_of_the_last_reports(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort=ALL_OF_4, evaluation={"group_by": "region"})
    devices = [enrolled() for _ in range(4)]
    made = together(devices, model).model
    north, south = {"attributes": {"region": "north"}}, {"attributes": {"region": "south"}}
    report(devices[0], made, 9, accuracy=0.1, classes=counts(of_7=(9, 0)), **south)
    report(devices[0], made, 4, accuracy=0.5, classes=counts(of_2=(2, 2), of_10=(2, 0)), **north)
    report(devices[1], made, 12, accuracy=0.75, loss=2.0, classes=counts(of_2=(6, 3)), **north)
    report(devices[2], made, 4, accuracy=1.0, **south)
    report(devices[3], made, 10, accuracy=0.9)
    found = status(operator)
    assert found.metrics == pytest.approx({"accuracy": 24 / 30, "loss": 2.0})
    assert found.measured is not None
    assert found.measured.metrics == found.metrics
    assert (found.measured.num_clients, found.measured.num_examples) == (4, 30)
    assert list(found.groups) == ["north", "south"]
    assert found.groups["north"].metrics == pytest.approx({"accuracy": 11 / 16, "loss": 2.0})
    assert (found.groups["north"].num_clients, found.groups["north"].num_examples) == (2, 16)
    assert found.groups["south"].metrics == {"accuracy": 1.0}
    assert list(found.classes) == ["2", "10"]
    assert found.classes["2"].model_dump() == {
        "num_clients": 2,
        "num_examples": 8,
        "metrics": {"accuracy": 5 / 8},
    }
    assert found.classes["10"].metrics == {"accuracy": 0.0}
    listed = operator.get("/v1/tasks/digits/rounds")
    assert listed[0]["metrics"] == found.metrics
    assert listed[0]["groups"] == listed[0]["classes"] == {}
    assert listed[0]["measured"] is None


def test_what_too_few_report_is_not_shown_by_group_or_class(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    cohort = {"size": 3, "minimum": 3}
    operator.begin(model, cohort=cohort, evaluation={"group_by": "age", "least_clients": 2})
    devices = [enrolled() for _ in range(3)]
    made = together(devices, model).model
    for device, age in zip(devices, (2, 2.0, 3), strict=True):
        classes = counts(common=(1, 1)) | (counts(rare=(1, 0)) if age == 3 else {})
        report(device, made, 2, accuracy=0.5, attributes={"age": age}, classes=classes)
    found = status(operator)
    assert list(found.groups) == ["2"]
    assert list(found.classes) == ["common"]
    assert found.classes["common"].num_clients == 3


def test_of_more_groups_than_can_be_shown_the_largest_are(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    num = MAX_GROUPS + 1
    cohort = {"size": num, "minimum": num}
    operator.begin(model, cohort=cohort, evaluation={"group_by": "serial"})
    devices = [enrolled() for _ in range(num)]
    made = together(devices, model).model
    for number, device in enumerate(devices, 1):
        report(device, made, number, attributes={"serial": f"s{number}"})
    groups = status(operator).groups
    assert len(groups) == MAX_GROUPS
    assert "s1" not in groups
    assert groups["s2"].metrics == {}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"classes": counts(a=(2, 3))}, r"at most num_examples \(2\), not 3"),
        ({"classes": counts(a=(6, 3), b=(5, 1))}, r"11 examples, more than num_examples \(10\)"),
        ({"classes": {f"c{i}": {"num_examples": 1, "correct": 1} for i in range(1001)}}, "1000"),
        ({"classes": {"a b": {"num_examples": 1, "correct": 1}}}, "classes"),
        ({"attributes": {"a": "x" * 65}}, "attributes"),
    ],
)
def test_counts_that_cannot_be_are_refused(
    operator: Operator, enrolled: Enrolled, model: Model, fields: dict[str, Any], says: str
) -> None:
    operator.begin(model)
    device = enrolled()
    device.assignment("digits")
    with pytest.raises(FedpressError, match=says):
        report(device, model.digest, 10, **fields)


# The best, and the end


def test_the_best_model_is_the_first_with_the_best_mean() -> None:
    terms = EvaluationTerms(metric="accuracy", goal="highest")
    scores = [Score(0, "a", 0.1), Score(1, "b", None), Score(2, "c", 0.7), Score(3, "d", 0.7)]
    assert best(scores, terms) == "c"
    assert best(scores, EvaluationTerms()) == "a"
    assert best(scores[1:2], terms) is None
    assert best([], terms) is None


def test_patience_counts_models_that_are_no_better_by_enough() -> None:
    terms = EvaluationTerms(patience=2, min_delta=0.1)

    def reason(*values: float | None) -> str:
        scores = [Score(number, str(number), value) for number, value in enumerate(values)]
        return reason_to_stop(scores, terms)

    assert reason() == ""
    assert reason(1.0, 0.95) == ""
    assert reason(1.0, 0.95, 0.85) == ""
    stopped = reason(1.0, 0.95, None, 0.91)
    assert stopped == "loss was 1 after round 0, and no better by more than 0.1 in 2 models since"
    assert reason(1.0, None, None, None) == ""
    assert reason(1.0, 0.5, 0.45, 0.3, 0.3) == ""
    assert reason_to_stop([Score(i, "m", 1.0) for i in range(99)], EvaluationTerms()) == ""


@given(
    values=st.lists(st.none() | st.floats(-10, 10), max_size=20),
    patience=st.integers(1, 4),
    goal=st.sampled_from(["lowest", "highest"]),
)
def test_a_task_that_keeps_getting_better_is_never_stopped_and_one_that_does_not_is(
    values: list[float | None], patience: int, goal: str
) -> None:
    terms = EvaluationTerms.model_validate({"patience": patience, "goal": goal})
    sign = -1 if goal == "lowest" else 1
    rising = [Score(i, str(i), sign * float(i)) for i in range(20)]
    assert reason_to_stop(rising, terms) == ""
    scores = [Score(i, str(i), value) for i, value in enumerate(values)]
    known = [score for score in scores if score.value is not None]
    stopped = reason_to_stop(scores, terms)
    top = best(scores, terms)
    waited = len(known) - 1 - [s.model for s in known].index(top) if top is not None else 0
    assert bool(stopped) == (waited >= patience)


def test_a_fold_with_a_reason_to_stop_ends_the_task_with_it() -> None:
    round_: Round = rounds.opened(SynchronousRound, last_round=9, size=1, places=1)
    for event in (ClientCheckedIn("c", "a"), UploadStaged("a", "x")):
        round_, _ = round_.on(event, 1.0)
    assert isinstance(round_.on(Aggregated("m"), 2.0)[1][-1], OpenRound)
    ended, effects = round_.on(Aggregated("m", "enough", "b"), 2.0)
    assert effects[-1] == EndTask("finished")
    assert (ended.phase, ended.reason) == ("committed", "enough")


def test_a_task_ends_when_its_models_get_no_better_and_names_the_best(
    start: Start, clock: Clock, model: Model
) -> None:
    with start() as http:
        operator, device = Operator(http), Device(http, clock)
        device.enrol(operator.token())
        operator.begin(model, rounds=9, cohort=ALONE, evaluation={"patience": 2})
        device.assignment("digits")
        report(device, model.digest, 10, loss=1.0)
        made = {0: model.digest}
        for number, loss in enumerate((0.5, 0.7, 0.6), 1):
            task = one_more(device, model, value=float(number))
            assert (task.state, task.reason, task.round) == ("running", "", number)
            made[number] = task.model
            report(device, task.model, 10, loss=loss)
        assert summary(operator).best == made[1]
    with start() as http:  # what was measured is on the disk
        device.http, operator = http, Operator(http)
        task = one_more(device, model)
        why = "loss was 0.5 after round 1, and no better by more than 0 in 2 models since"
        assert (task.state, task.reason, task.round) == ("finished", why, 4)
        assert task.best == made[1]
        assert status(operator, 4).reason == why
        report(device, task.model, 10, loss=0.4)  # the last model is measured after the end
        assert summary(operator).best == task.model
        report(device, task.model, 10, loss=0.6)
        assert summary(operator).best == made[1]
    with start() as http:
        operator = Operator(http)
        device.http = http
        assert summary(operator).best == made[1]
        more = {"after_round": 4, "rounds": 5, "model": made[1]}
        operator.post("/v1/admin/tasks/digits/continue", more)
        task = one_more(device, model)
        assert (task.state, task.reason, task.round) == ("running", "", 5)


def test_a_model_that_too_few_measured_is_not_the_best(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    terms = {"metric": "accuracy", "goal": "highest", "least_clients": 2}
    operator.begin(model, cohort={"size": 2, "minimum": 2}, rounds=3, evaluation=terms)
    both = device, other = enrolled(), enrolled()
    for each in both:
        each.assignment("digits")
        report(each, model.digest, 5, accuracy=0.3)
    first = together(both, model)
    assert first.best == model.digest
    report(device, first.model, 5, accuracy=0.9)
    assert together(both, model, value=2.0).best == model.digest
    report(other, first.model, 5, accuracy=0.8)
    assert together(both, model, value=3.0).best == first.model


def test_a_task_without_reports_has_no_best_model(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort=ALONE, evaluation={"patience": 1})
    device = enrolled()
    one_more(device, model)
    assert one_more(device, model).state == "finished"
    assert summary(operator).best is None
    assert summary(operator).reason == ""


# The schema


def test_reports_of_an_earlier_release_are_kept(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'test.db'}")

    def migrate(how: Callable[..., None], revision: str) -> None:
        config = Config()
        config.set_main_option("script_location", "fedpress_server:migrations")
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            how(config, revision)

    def run(statement: str) -> Any:
        with engine.begin() as connection:
            found = connection.execute(sa.text(statement))
            return found.all() if found.returns_rows else None

    migrate(command.upgrade, "0006")
    metrics = '{"loss": 0.5, "accuracy": 0.75}'
    run(
        "INSERT INTO evaluations (task, model, client_id, num_examples, metrics, reported_at) "
        f"VALUES ('t', 'm', 'c', 8, '{metrics.replace(':', chr(92) + ':')}', 1.0)"
    )
    Database(f"sqlite:///{tmp_path / 'test.db'}").close()
    rows = run("SELECT task, model, client_id, metric, value FROM measures ORDER BY metric")
    assert rows == [("t", "m", "c", "accuracy", 0.75), ("t", "m", "c", "loss", 0.5)]
    assert run("SELECT num_examples, group_name FROM evaluations") == [(8, None)]
    migrate(command.downgrade, "0006")
    ((kept,),) = run("SELECT metrics FROM evaluations")
    assert json.loads(kept) == json.loads(metrics)
    engine.dispose()


def test_patience_begins_anew_in_a_continued_task(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    """Also after a task that had all its rounds."""
    operator.begin(model, rounds=3, cohort=ALONE, at_end="paused", evaluation={"patience": 2})
    device = enrolled()
    device.assignment("digits")
    report(device, model.digest, 10, loss=0.1)
    for number in range(3):
        pending = include_one(device, model, value=number + 1.0)
        answer = device.check_in("digits", pending, wait=30)
        assert answer is not None
        if number:
            report(device, answer.task.model, 10, loss=0.5 + number)
    more = {"after_round": 3, "rounds": 5, "model": model.digest}
    operator.post("/v1/admin/tasks/digits/continue", more)
    device.check_in("digits", include_one(device, model, value=9.0), wait=30)
    assert operator.get("/v1/tasks/digits")["state"] == "running"


def test_only_members_measure_a_task_of_members(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    member, stranger = enrolled(), enrolled()
    operator.begin(model, members=[member.client_id], cohort=ALONE)
    with pytest.raises(Forbidden, match="for its members alone"):
        report(stranger, model.digest, 10, loss=0.0)
    member.assignment("digits")
    report(member, model.digest, 10, loss=0.0)


def test_a_device_that_takes_no_part_measures_nothing(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort=ALONE)
    device, other = enrolled(), enrolled()
    device.assignment("digits")
    with pytest.raises(Conflict, match="has assigned no round to this device"):
        report(other, model.digest, 10, loss=0.0)
    report(device, model.digest, 10, loss=0.0)


def test_a_report_weighs_no_more_than_an_upload(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort=ALL_OF_4, max_examples=30)
    devices = [enrolled() for _ in range(4)]
    made = together(devices, model).model
    claimed = counts(a=(2**31, 2**30), b=(7, 7))
    report(devices[0], made, 2**32 - 1, accuracy=1.0, classes=claimed)
    report(devices[1], made, 10, accuracy=0.2, classes=counts(a=(10, 0)))
    found = status(operator)
    assert found.measured is not None
    assert found.measured.num_examples == 40
    assert found.metrics == pytest.approx({"accuracy": 32 / 40})
    assert found.classes["a"].num_examples == 25
    assert found.classes["a"].metrics == pytest.approx({"accuracy": 7 / 25})
    assert "b" not in found.classes
