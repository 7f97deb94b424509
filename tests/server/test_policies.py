"""Policies on a server: what each client is given, what each round has, across restarts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from fedpress_protocols.defaults import BITS
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.messages import Assignment, CheckInResponse, RoundStatus
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import Content
from fedpress_server.coordination.adaptive import bodies_of, link_of
from fedpress_strategies.policies.bandwidth_aware import Link, Transfer
from tests.devices import ADMIN, Device, Operator
from tests.server.in_process import Clock, Enrolled, Server, Start, history

ALONE = {"size": 1, "minimum": 1}
LADDER = [
    {"name": "whole", "compressor": {"id": "none"}},
    {"name": "half", "compressor": {"id": "topk", "fraction": 0.5}},
    {"name": "one", "compressor": {"id": "topk", "count": 1}},
]
AWARE = [{"id": "bandwidth_aware"}]


def check_in(device: Device, mbits: float | None = None) -> CheckInResponse | None:
    """The device asks for work, and says what its uplink is."""
    attributes = {} if mbits is None else {"uplink_mbps": mbits}
    body = json.dumps({"attributes": attributes})
    answer = device.json("POST", "/v1/tasks/digits/check-in", body)
    if answer.status_code == 204:
        return None
    return CheckInResponse.model_validate_json(answer.content)


def given(device: Device, mbits: float | None = None) -> Assignment:
    answer = check_in(device, mbits)
    assert answer is not None
    assert answer.assignment is not None
    return answer.assignment


def send(device: Device, assignment: Assignment, value: float = 1.0) -> None:
    update = np.full(device.model(assignment.plan.model).spec.size, value, np.float32)
    device.upload(assignment.assignment, device.body_for(assignment, update))


def report(device: Device, model: str, value: float, metric: str = "loss") -> None:
    body = {"model": model, "num_examples": 9, "metrics": {metric: value}}
    device.json("POST", "/v1/tasks/digits/evaluations", json.dumps(body))


def committed(device: Device, assignment: Assignment) -> None:
    answer = device.check_in("digits", assignment.assignment, wait=30)
    assert answer is not None
    assert answer.receipts[0].receipt.outcome == "included"


def status(operator: Operator, number: int) -> RoundStatus:
    return RoundStatus.model_validate(operator.get(f"/v1/tasks/digits/rounds/{number}"))


# BandwidthAware


def test_each_device_is_given_what_its_link_carries_and_keeps_it(
    start: Start, clock: Clock, model: Model
) -> None:
    """Bodies of 12 values: by what devices say of their uplinks, in rounds of 60 s."""
    with start() as http:
        operator = Operator(http)
        operator.begin(
            model, profiles=LADDER, policies=AWARE, cohort={"size": 4, "minimum": 4}, rounds=2
        )
        devices = []
        for _ in range(4):
            device = Device(http, clock)
            device.enrol(operator.token())
            devices.append(device)
        said = [50.0, 6e-6, 1e-7, None]
        first = [given(device, each) for device, each in zip(devices, said, strict=True)]
        assert [each.profile for each in first] == ["whole", "half", "one", "half"]
        assert [each.name for each in first[0].plan.profiles] == ["whole", "half", "one"]
    with start() as http:
        for device, each in zip(devices, first, strict=True):
            device.http = http
            assert given(device) == each, "a restart does not decide anew"
            send(device, each)
        operator = Operator(http)
        committed(devices[0], first[0])
        course = status(operator, 1).course
        assert course is not None
        assert (course.gentlest, course.hardest, course.probe) == (0, 2, False)
        assert status(operator, 1).included == 4


def test_what_the_server_sees_of_a_device_counts(
    http: Server, operator: Operator, enrolled: Enrolled, clock: Clock, model: Model
) -> None:
    """Small bodies arrive at once; what is slow is the training, and it is seen."""
    operator.begin(model, profiles=LADDER, policies=AWARE, cohort=ALONE, rounds=9)
    device, profiles = enrolled(), []
    for seconds in (5.0, 5.0, 59.0, 59.0, 59.0):
        assignment = given(device)
        profiles.append(assignment.profile)
        clock.advance(seconds)
        send(device, assignment)
        committed(device, assignment)
    profiles.append(given(device).profile)
    assert profiles == ["half", "whole", "whole", "whole", "whole", "one"]

    database, name = http.app.services.database, device.client_id
    link = http.call(database.read, lambda c: link_of(c, "digits", name))
    assert [each.before for each in link.transfers] == [59.0, 59.0, 59.0, 5.0, 5.0]
    assert {each.seconds for each in link.transfers} == {0.0}
    bodies = http.call(database.read, lambda c: bodies_of(c, "digits"))
    assert set(bodies.sizes) == {"whole", "half"}
    assert bodies.sizes["whole"] > 48
    assert bodies.before == 59.0


class Slowly(httpx.AsyncByteStream):
    """A body in pieces, each so many seconds after the one before."""

    def __init__(self, body: bytes, clock: Clock, seconds: float) -> None:
        self.body, self.clock, self.seconds = body, clock, seconds

    async def __aiter__(self) -> AsyncIterator[bytes]:
        half = len(self.body) // 2
        for piece in (self.body[:half], self.body[half:]):
            self.clock.advance(self.seconds / 2)
            yield piece


def test_a_slow_link_is_seen_by_a_body_that_is_long_enough(
    http: Server, operator: Operator, enrolled: Enrolled, clock: Clock
) -> None:
    """32 kB in 50 s of a round of 60 s: the whole is not for this link."""
    model = Model.from_tensors({"weight": np.zeros((64, 128), np.float32)})
    operator.begin(model, profiles=LADDER, policies=AWARE, cohort=ALONE, rounds=9)
    device = enrolled()
    assignment = given(device, 50.0)
    assert assignment.profile == "whole"
    body = device.body_for(assignment, np.ones(model.spec.size, np.float32))
    path = f"/v1/assignments/{assignment.assignment}/update"
    known = {"Host": http.base_url.host, "Content-Length": str(len(body))}
    headers = {**device.sign("PUT", path, Content.of(body)), **known}
    stream = Slowly(body, clock, 50.0)
    sent = httpx.Request("PUT", http.base_url.join(path), headers=headers, stream=stream)
    answer = http.call(httpx.ASGITransport(http.app).handle_async_request, sent)
    assert answer.status_code == 201
    committed(device, assignment)
    read = http.app.services.database.read
    link: Link = http.call(read, lambda c: link_of(c, "digits", device.client_id))
    assert link.transfers == (Transfer(len(body), 50.0, 0.0),)
    assert given(device, 50.0).profile == "half", "what is seen goes before what is said"


def test_a_missed_deadline_is_seen_and_an_upload_clears_it(
    http: Server, operator: Operator, enrolled: Enrolled, clock: Clock, model: Model
) -> None:
    operator.begin(model, profiles=LADDER, policies=AWARE, cohort=ALONE, rounds=9)
    device, found = enrolled(), []

    def link() -> Link:
        read = http.app.services.database.read
        found: Link = http.call(read, lambda c: link_of(c, "digits", device.client_id))
        return found

    for is_late in (True, True, False):
        assignment = given(device)
        found.append((assignment.profile, link().missed))
        if is_late:
            clock.advance(61)
            http.tick()
        else:
            clock.advance(1)
            send(device, assignment)
            committed(device, assignment)
    assert found == [("half", 0), ("one", 1), ("one", 2)]
    assert link() == Link((Transfer(link().transfers[0].num_bytes, 0.0, 1.0),), 0)
    assert given(device).profile == "whole"


def test_selection_and_links_go_together(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(
        model,
        profiles=LADDER,
        policies=AWARE,
        selection={"policy": "uniform", "candidates": 2},
        cohort={"size": 2, "minimum": 2},
    )
    fast, slow = enrolled(), enrolled()
    assert check_in(fast, 50.0) is None
    assert given(slow, 1e-7).profile == "one"
    assert given(fast, 50.0).profile == "whole"


def test_a_profile_is_kept_by_an_assignment_that_outlives_its_round(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    """In an asynchronous task, where the next attempt takes it over."""
    operator.begin(
        model,
        profiles=LADDER,
        policies=AWARE,
        cohort=ALONE,
        asynchronous={"concurrency": 2},
        strategy={"id": "fedbuff"},
        rounds=3,
    )
    slow, fast = enrolled(), enrolled()
    kept = given(slow, 1e-7)
    quick = given(fast, 50.0)
    assert (kept.profile, quick.profile) == ("one", "whole")
    send(fast, quick)
    committed(fast, quick)
    held = given(slow, 50.0)
    assert (held.assignment, held.profile) == (kept.assignment, "one")
    send(slow, held)
    committed(slow, held)


# AccuracyDriven


@pytest.mark.parametrize("metric", ["loss", "mse"])
def test_the_rate_follows_the_losses_that_devices_report_across_a_restart(
    start: Start, clock: Clock, model: Model, metric: str
) -> None:
    """Or the task's own metric, where that is to be low and there is no loss."""
    policies = [{"id": "accuracy_driven", "window": 3, "settle": 0}]
    losses = [2.0 / (number + 1) for number in range(13)]
    rungs = []
    with start() as http:
        operator = Operator(http)
        operator.begin(
            model,
            profiles=LADDER,
            policies=policies,
            cohort=ALONE,
            rounds=30,
            evaluation={"metric": metric, "goal": "lowest"},
        )
        device = Device(http, clock)
        device.enrol(operator.token())

    def rounds(count: int) -> None:
        for _ in range(count):
            assignment = given(device)
            number = assignment.plan.round
            rungs.append(assignment.profile)
            value = losses[number] if number < 13 else 9.0
            report(device, assignment.plan.model, value, metric)
            send(device, assignment)
            committed(device, assignment)

    with start() as http:
        device.http = http
        rounds(8)
        before = [each.course for each in history(Operator(http))]
    with start() as http:
        device.http = http
        assert [each.course for each in history(Operator(http))] == before
        rounds(14)
        after = [each.course for each in history(Operator(http))]
    assert after[: len(before)] == before
    assert rungs[0] == "whole"
    assert "one" in rungs, "the loss fell as it did"
    assert rungs[-1] != "one", "and then it rose"
    whys = [each.why for each in after if each is not None and each.why]
    assert any("on track" in why for why in whys)
    assert any("where" in why for why in whys)


# Auto


def test_a_task_without_a_compressor_runs_auto_and_goes_on_after_a_restart(
    start: Start, clock: Clock, model: Model
) -> None:
    """Four devices, which send a sketch besides in a probe; each decision says why."""
    profiles, cells = [], []
    with start() as http:
        operator = Operator(http)
        operator.begin(model, profiles=None, cohort={"size": 4, "minimum": 4}, rounds=225)
        devices = [Device(http, clock) for _ in range(4)]
        for device in devices:
            device.enrol(operator.token())

    def rounds(count: int) -> None:
        for _ in range(count):
            assignments = [given(device) for device in devices]
            profiles.append([each.profile for each in assignments])
            cells.append({each.plan.sketch for each in assignments})
            for device, assignment in zip(devices, assignments, strict=True):
                send(device, assignment, 0.01)
            for device, assignment in zip(devices, assignments, strict=True):
                committed(device, assignment)

    def resumed(count: int) -> list[RoundStatus]:
        with start() as http:
            for device in devices:
                device.http = http
            rounds(count)
            return history(Operator(http))

    before = resumed(7)
    after = resumed(5)
    assert [each.course for each in after[:7]] == [each.course for each in before[:7]]
    assert profiles == [["0.1-bit"] * 4] * 12
    assert cells == [{64} if number == 4 else {0} for number in range(1, 13)]
    courses = [each.course for each in after if each.course is not None]
    assert courses[3].comparison is not None
    assert courses[10].pace is not None
    assert (courses[10].pace.rung, courses[10].pace.probes) == (BITS.index(0.1), 1)
    whys = {each.round: each.why for each in courses if each.why}
    assert whys == {
        1: "begin at the most compressed profile",
        3: "less momentum until the loss falls",  # the same four come again
        5: "more momentum: no loss speaks against it",
    }
    assert set(after[0].published) == {"average"}


# DivergenceGuard


GUARD = {"id": "divergence_guard", "first": 3, "settle": 2}


def test_a_rate_that_is_too_high_is_told_of_and_lowered(
    http: Server, operator: Operator, enrolled: Enrolled, clock: Clock, model: Model
) -> None:
    """One value of twelve that are all the same is a twelfth of the way."""
    operator.begin(
        model, profiles=LADDER, policies=[GUARD], cohort={"size": 4, "minimum": 4}, rounds=9
    )
    devices, profiles = [enrolled() for _ in range(4)], []
    for _ in range(4):
        assignments = [given(device) for device in devices]
        profiles.append([each.profile for each in assignments])
        for device, assignment in zip(devices, assignments, strict=True):
            send(device, assignment)
        committed(devices[0], assignments[0])
    assert profiles[:3] == [["one"] * 4, ["one"] * 4, ["half"] * 4]
    found = [each.course for each in history(operator)]
    assert found[0] is not None
    assert found[0].comparison is not None
    assert found[0].comparison.progress == pytest.approx(1 / 12, rel=0.3)
    assert found[0].comparison.error == pytest.approx(0, abs=0.05), "all clients say the same"
    assert found[0].comparison.energy == pytest.approx(1 / 12, rel=0.3)
    assert found[0].comparison.clients == 4
    warnings = [len(each.warnings) for each in found if each is not None]
    assert warnings[:3] == [0, 1, 1]
    assert [each.hardest for each in found if each is not None][:3] == [2, 2, 1]
    text = http.get("/metrics", headers=ADMIN).text
    assert 'fedpress_policy_warnings_total{task="digits"} 2.0' in text
    assert 'fedpress_policy_rung{end="hardest",task="digits"} 1.0' in text
    assert 'fedpress_probe_progress{task="digits"}' in text


def test_an_attempt_made_again_has_the_same_profiles_and_is_no_probe(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(
        model, profiles=LADDER, policies=[GUARD], cohort={"size": 4, "minimum": 4}, rounds=9
    )
    devices = [enrolled() for _ in range(4)]
    before = [given(device) for device in devices]
    assert [(each.profile, each.plan.sketch) for each in before] == [("one", 64)] * 4
    operator.post("/v1/admin/tasks/digits/abort-round")
    again = [given(device) for device in devices]
    assert [(each.profile, each.plan.sketch) for each in again] == [("one", 0)] * 4
    assert again[0].plan.attempt == 2
    first, second = (each.course for each in history(operator))
    assert first is not None
    assert first.probe
    assert second == first.model_copy(update={"probe": False})


def test_policies_begin_after_the_schedule(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    warm_up = {"profiles": [{"name": "only", "compressor": {"id": "none"}}], "rounds": 2}
    policies = [{"id": "accuracy_driven"}]
    operator.begin(
        model, profiles=LADDER, policies=policies, schedule=[warm_up], cohort=ALONE, rounds=9
    )
    device, profiles = enrolled(), []
    for _ in range(3):
        assignment = given(device)
        profiles.append(assignment.profile)
        send(device, assignment)
        committed(device, assignment)
    assert profiles == ["only", "only", "whole"]
    courses = [each.course for each in history(operator)]
    assert [each is None for each in courses] == [True, True, False, False]


def test_a_ladder_that_cannot_be_side_by_side_is_refused_and_may_be_probed(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    """A probe has all of its clients keep the round's profile, so that it asks nothing of it."""
    follows = [
        {
            "name": f"p{share}",
            "compressor": {"id": "ef21", "inner": {"id": "topk", "fraction": share}},
        }
        for share in (0.5, 0.1)
    ]
    four: dict[str, Any] = {"cohort": {"size": 4, "minimum": 4}, "rounds": 9}
    with pytest.raises(IncompatiblePlan, match="follows the mean of all clients' estimates"):
        operator.begin(model, profiles=follows, policies=AWARE, **four)
    operator.begin(model, profiles=follows, policies=[GUARD], **four)
    devices = [enrolled() for _ in range(4)]
    assignments = [given(device) for device in devices]
    for device, assignment in zip(devices, assignments, strict=True):
        send(device, assignment)
    committed(devices[0], assignments[0])
    probed = status(operator, 1).course
    assert probed is not None
    assert probed.comparison is not None


def test_links_and_a_guard_go_together(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    """In a probe each client is given what its link carries, and all of them are compared."""
    operator.begin(
        model,
        profiles=LADDER,
        policies=[*AWARE, GUARD],
        cohort={"size": 4, "minimum": 4},
        rounds=9,
    )
    devices, said = [enrolled() for _ in range(4)], [50.0, 50.0, 1e-7, 1e-7]
    assignments = [given(device, each) for device, each in zip(devices, said, strict=True)]
    assert [each.profile for each in assignments] == ["whole", "whole", "one", "one"]
    assert [each.name for each in assignments[0].plan.profiles] == ["whole", "half", "one"]
    assert {each.plan.sketch for each in assignments} == {64}
    for device, assignment in zip(devices, assignments, strict=True):
        send(device, assignment)
    committed(devices[0], assignments[0])
    probed = status(operator, 1).course
    assert probed is not None
    assert probed.comparison is not None
    assert probed.comparison.clients == 4
    assert probed.comparison.inner / probed.comparison.norm == pytest.approx(13 / 24, rel=0.3)


def test_a_ladder_that_begins_with_the_hardest_is_refused(operator: Operator) -> None:
    large = Model.from_tensors({"weight": np.zeros((40, 50), np.float32)})
    upside_down = [
        {"name": f"p{share}", "compressor": {"id": "topk", "fraction": share}}
        for share in (0.01, 0.1)
    ]
    with pytest.raises(ConfigurationError, match=r"'p0\.01' comes before 'p0\.1'"):
        operator.begin(large, profiles=upside_down, policies=AWARE, cohort=ALONE)
    operator.begin(large, profiles=upside_down, cohort=ALONE)


def test_a_task_without_policies_gives_profiles_in_turn_as_ever(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, profiles=LADDER[:2])
    profiles = [given(enrolled()).profile for _ in range(2)]
    assert profiles == ["whole", "half"]
    assert status(operator, 1).course is None
