"""Auto on signals made up for it, and what a task that names nothing gets."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedpress.task_file import checked, summary
from fedpress_compression.compressor import Public
from fedpress_compression.randomness import PublicRandomness
from fedpress_protocols.defaults import BITS, USUAL, completed
from fedpress_protocols.errors import IncompatiblePlan
from fedpress_protocols.messages import TaskConfig, UploadFigures
from fedpress_protocols.model import Model
from fedpress_protocols.policies import Auto, Comparison, Course, automatic
from fedpress_server.storage import records
from fedpress_strategies import from_config
from fedpress_strategies.policies.auto import _arriving as arriving
from fedpress_strategies.policies.auto import floor_of
from fedpress_strategies.policies.decisions import (
    every_choice,
    next_course,
    profiles_of,
    with_comparison,
)
from fedpress_strategies.policies.facts import (
    Facts,
    estimated_population,
    least_population,
    mostly_flat,
)
from tests.devices import Operator
from tests.server.in_process import Enrolled, Server, history, include_one, ones

ROUNDS, LADDER = 100, 5


def probe(progress: float | None) -> Comparison:
    norm = 0.0 if progress is None else 1.0
    return Comparison(
        progress=progress,
        error=None if progress is None else 0.05,
        cosine=None,
        nmse=None,
        energy=1.0,
        inner=progress or 0.0,
        norm=norm,
        clients=10,
    )


def courses(
    auto: Auto,
    *,
    progress: Sequence[float | None] = (None,),
    losses: Sequence[float | None] = (),
    uploaded: int = 0,
    size: int = 10,
    rounds: int = ROUNDS,
    population: float | None = None,
    flat: range = range(0),
    has_statistics: bool = False,
) -> list[Course]:
    """The course of every round; the last of `progress` goes on, and so does `uploaded` bytes at
    the rung 0, two thirds of it at each harder one. Updates are flat in the rounds `flat`."""
    made: list[Course] = []
    spent: list[int] = []
    for number in range(1, rounds + 1):
        facts = Facts(
            number,
            rounds,
            losses[:number],
            uploaded=tuple(spent),
            size=size,
            population=population,
            are_flat=number in flat,
            has_statistics=has_statistics,
        )
        course = next_course((auto,), LADDER, made[-1] if made else None, facts)
        if course.probe:
            value = progress[min(sum(each.probe for each in made), len(progress) - 1)]
            course = with_comparison(course, probe(value))
        spent.append(round(uploaded * (2 / 3) ** course.hardest))
        made.append(course)
    return made


def rungs(made: Sequence[Course]) -> list[int]:
    assert all(each.gentlest == each.hardest for each in made)
    return [each.hardest for each in made]


def reasons(made: Sequence[Course]) -> dict[int, str]:
    return {each.round: each.why for each in made if each.why}


def test_auto_begins_at_what_its_gap_asks_for_and_stays_there_while_probes_are_good() -> None:
    made = courses(Auto(), progress=[0.8])
    assert rungs(made) == [4] * 100
    assert reasons(made) == {1: "begin at the most compressed profile"}
    assert [each.round for each in made if each.probe] == [4, 34, 64, 94]


def test_auto_goes_no_harder_where_that_would_lead_below_the_floor() -> None:
    made = courses(Auto(), progress=[0.5, 0.5, 0.6])
    assert rungs(made) == [4] * 8 + [3] * 92
    assert [each.round for each in made if each.probe] == [4, 8, 12, 16, 20, 50, 80]


def test_auto_goes_harder_again_once_probes_are_good() -> None:
    made = courses(Auto(), progress=[0.5, 0.5, 0.8])
    assert rungs(made) == [4] * 8 + [3] * 16 + [4] * 76
    assert reasons(made)[25] == "harder: compressed updates go 0.80 of the way"


def test_a_task_whose_progress_was_far_short_must_promise_more_than_the_floor() -> None:
    made = courses(Auto(), progress=[0.4, 0.4, 0.8])
    assert rungs(made) == [4] * 8 + [0] * 92
    assert made[-1].pace is not None
    assert made[-1].pace.far_short
    assert Course.model_validate_json(made[-1].model_dump_json()) == made[-1]
    calm = courses(Auto(), progress=[0.4, 0.4, 0.9])
    assert rungs(calm)[-1] == 2
    assert calm[0].pace is not None
    assert "far_short" not in calm[0].pace.model_dump()


def test_a_probe_speaks_for_one_step_only_unless_others_follow() -> None:
    """A harder profile keeps .85 of the progress at most, and no probe has measured it."""
    made = courses(Auto(), progress=[0.3, 0.3, 0.9, None])
    assert rungs(made) == [4] * 8 + [0] * 16 + [1] * 76
    assert rungs(courses(Auto(), progress=[0.3, 0.3, 0.9]))[-1] == 2


def test_a_step_down_is_not_undone_before_two_probes_speak_against_it() -> None:
    made = courses(Auto(), progress=[0.3, 0.3, 0.9, 0.9, 0.9, 0.1, 0.1, None])
    assert [each.round for each in made if each.probe][:7] == [4, 8, 12, 16, 20, 28, 32]
    assert rungs(made)[23:33] == [0] + [1] * 8 + [0]


def test_the_less_progress_the_more_profiles_auto_goes_back_at_once() -> None:
    for progress, rung in ((0.54, 3), (0.46, 2), (0.4, 0), (0.1, 0)):
        made = courses(Auto(), progress=[progress, progress, 0.6])
        assert rungs(made)[7:9] == [4, rung], progress


def test_the_more_often_clients_upload_the_less_progress_is_enough() -> None:
    """A residual goes with the next upload, so that it waits for a smaller part of the task."""
    for population, rung in ((None, 2), (100, 2), (90, 2), (81, 3), (72, 4), (10, 4)):
        made = courses(Auto(), progress=[0.42, 0.42, None], population=population, rounds=90)
        assert rungs(made)[8] == rung, population
    made = courses(Auto(), progress=[0.29, 0.29, None], population=10)
    assert made[8].why.endswith("go 0.29 of the way, less than 0.3")


def test_rounds_beyond_ninety_do_not_make_less_progress_enough() -> None:
    """What a residual keeps is as old in a long task as in a short one."""
    for population in (100, 81, 60, 10):
        floors = [
            floor_of(Auto(), Facts(9, rounds, size=10, population=population))
            for rounds in (90, 91, 900)
        ]
        assert floors == pytest.approx([floors[0]] * 3), population


def test_the_less_often_clients_upload_the_more_progress_is_asked_for() -> None:
    """What a client keeps back is sent with its next upload, or never."""
    for population, floor, rung in (
        *((112, 0.55, 4), (200, 0.69, 4), (400, 0.81, 1)),
        *((1000, 0.91, 0), (math.inf, 0.91, 0)),
    ):
        made = courses(Auto(), progress=[0.72, 0.72, None], population=population)
        assert rungs(made)[8] == rung, population
        found = floor_of(Auto(), Facts(9, ROUNDS, size=10, population=population))
        assert found == pytest.approx(floor, abs=0.006), population
        if population < 1000:  # as much arrives in all: simulated, upload by upload
            uploads = int(ROUNDS * 10 / population)
            assert arrived(found, uploads) >= arrived(0.55, 9) - 0.03, population


def arrived(progress: float, uploads: int) -> float:
    """The share of `uploads` updates of a client of which each sends `progress` of what waits."""
    waits, sent = 0.0, 0.0
    for _ in range(uploads):
        waits += 1
        sent += progress * waits
        waits *= 1 - progress
    return sent / uploads


@given(st.floats(0.05, 1), st.integers(1, 50))
def test_the_share_that_arrives_is_that_of_uploads_one_by_one(
    progress: float, uploads: int
) -> None:
    assert arriving(progress, uploads) == pytest.approx(arrived(progress, uploads))


@pytest.mark.parametrize(
    ("clients", "size", "rounds"), [(100, 10, 90), (1000, 10, 900), (5000, 500, 90), (40, 10, 36)]
)
def test_the_floor_is_not_raised_by_chance_where_clients_upload_nine_times(
    clients: int, size: int, rounds: int
) -> None:
    floors = [found_floor(clients, size, rounds, seed) for seed in range(30)]
    assert max(floors) <= 0.551, floors


def test_the_floor_is_raised_once_it_is_sure_that_clients_upload_seldom() -> None:
    for clients, size, rounds, due in ((269, 8, 60, 0.86), (10**6, 100, 300, 0.91)):
        floors = [found_floor(clients, size, rounds, seed) for seed in range(10)]
        assert np.mean(floors) == pytest.approx(due, abs=0.04), clients


def found_floor(clients: int, size: int, rounds: int, seed: int) -> float:
    """When round 9 opens, by the clients that came."""
    draw = np.random.default_rng(seed)
    drawn = np.stack([draw.choice(clients, size, replace=False) for _ in range(8)])
    came = drawn.size, len(np.unique(drawn))
    population = estimated_population(*came), least_population(*came, size)
    return floor_of(Auto(), Facts(9, rounds, (), {}, (), size, *population))


@given(st.integers(1, 500), st.integers(0, 10**6), st.integers(1, 400))
def test_the_population_is_told_from_who_was_drawn(size: int, seed: int, uploads: int) -> None:
    drawn = np.random.default_rng(seed).integers(0, size, uploads)
    different = np.unique(drawn).size
    estimate = estimated_population(uploads, different)
    assert estimate is not None
    if different == uploads:
        assert estimate == math.inf
        return
    assert estimate >= different
    least = least_population(uploads, different, 1)
    assert least is not None
    assert least < estimate
    expected = estimate * (1 - (1 - 1 / estimate) ** uploads)
    assert expected == pytest.approx(different, rel=1e-6)


def test_a_population_that_was_drawn_often_is_known_closely() -> None:
    drawn = np.random.default_rng(0).integers(0, 60, 300)
    assert estimated_population(300, np.unique(drawn).size) == pytest.approx(60, rel=0.05)
    assert estimated_population(0, 0) is None


def test_the_server_counts_who_was_drawn(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort={"size": 1, "minimum": 1}, rounds=9)
    first, second = enrolled(), enrolled()
    for device in (first, second, first):
        answer = device.check_in("digits", wait=30)
        assert answer is not None
        assert answer.assignment is not None
        body = device.body_for(answer.assignment, ones(model))
        device.upload(answer.assignment.assignment, body)
    read = http.app.services.database.read
    for since, expected in ((0, (3, 2)), (3, (1, 1)), (9, (0, 0))):
        assert http.call(read, partial(records.drawn, task="digits", since=since)) == expected


def test_auto_stays_at_what_it_went_back_to_where_nothing_is_measured_any_more() -> None:
    made = courses(Auto(), progress=[0.5, 0.5, None])
    assert rungs(made) == [4] * 8 + [3] * 92


def test_auto_begins_gentle_and_descends_where_no_cohort_can_be_compared() -> None:
    made = courses(Auto(), size=3)
    assert rungs(made) == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 88
    assert reasons(made)[1] == "begin gentle"
    assert not any(each.probe for each in made)
    assert reasons(made)[5] == "harder: nothing measured speaks against it"


def test_poor_probes_have_auto_back_off_and_stay_there_for_four_windows() -> None:
    made = courses(Auto(every=5), progress=[0.8, 0.3, 0.8])
    sequence = rungs(made)
    lowered = next(i for i in range(1, ROUNDS) if sequence[i] < sequence[i - 1])
    assert made[lowered].why.startswith("gentler: compressed updates go ")
    assert made[lowered].why.endswith("of the way, less than 0.55")
    assert sequence[lowered : lowered + 16] == [sequence[lowered]] * 16
    assert sequence[-1] == 4


def test_one_poor_probe_among_good_ones_is_no_reason_to_back_off() -> None:
    made = courses(Auto(every=5), progress=[0.8, 0.8, 0.8, 0.8, 0.3, 0.8])
    assert sorted(rungs(made)) == rungs(made)


def test_where_updates_go_nowhere_auto_ends_at_the_gentlest_and_says_so() -> None:
    made = courses(Auto(), progress=[0.1])
    assert rungs(made) == [4] * 8 + [0] * 92
    assert "at the gentlest profile" in made[16].why


def test_what_drowns_in_the_differences_between_clients_counts_for_nothing() -> None:
    made = courses(Auto(), progress=[None])
    assert rungs(made) == [4] * 100


def test_a_loss_that_rises_has_auto_back_off() -> None:
    falls = [2.0 * 0.97**model for model in range(40)]
    made = courses(Auto(), losses=[*falls, *[1.2] * 60])
    gentler = {number: why for number, why in reasons(made).items() if "gentler" in why}
    assert min(gentler) in range(41, 48)
    assert "the loss of the last 5 models is" in gentler[min(gentler)]


@pytest.mark.parametrize(("times", "back"), [(1.35, 1), (1.7, 2), (2.2, 3), (20.0, 3)])
def test_the_more_a_loss_rises_the_further_auto_backs_off(times: float, back: int) -> None:
    """One profile for each 30 %, and three at most; the five models that are taken together are the
    first ones after a rise at once."""
    good = [0.9] * 40
    made = courses(Auto(), progress=[0.9], losses=[*good, *[0.9 * times] * 60])
    first = next(each for each in made if "gentler: the loss" in each.why)
    rose = float(first.why.split()[-3].rstrip(",")) / 0.9
    assert rungs(made)[first.round - 1] == 4 - min(max(1, round(np.log(rose) / np.log(1.3))), 3)
    assert any(4 - rung >= back for rung in rungs(made))


def test_a_loss_that_falls_or_was_not_measured_leaves_auto_alone() -> None:
    falls = [2.0 * 0.97**model for model in range(ROUNDS)]
    assert rungs(courses(Auto(), losses=falls))[-1] == 4
    assert rungs(courses(Auto(), losses=[None] * ROUNDS))[-1] == 4


def test_auto_keeps_to_a_budget_of_bytes() -> None:
    def cost(made: Sequence[Course]) -> int:
        return sum(round(1000 * (2 / 3) ** rung) for rung in rungs(made))

    assert cost(courses(Auto(floor=0.9), progress=[0.1], uploaded=1000)) > 24_000
    made = courses(Auto(upload_bytes=24_000, floor=0.9), progress=[0.1], uploaded=1000)
    assert cost(made) <= 24_000
    assert any("upload_bytes leave no room" in why for why in reasons(made).values())
    hopeless = courses(Auto(upload_bytes=10), uploaded=1000, size=3)
    assert rungs(hopeless)[:5] == [1, 2, 3, 4, 4]
    assert "at the hardest profile" in hopeless[-1].why


def test_probes_are_seldom_and_never_of_a_cohort_that_is_too_small() -> None:
    for size in (4, 10, 100):
        made = courses(Auto(), progress=[0.8], size=size)
        assert [each.round for each in made if each.probe] == [4, 34, 64, 94]
    for auto, size in ((Auto(), 1), (Auto(), 3), (Auto(sketch=0), 100)):
        made = courses(auto, progress=[0.8], size=size)
        assert not any(each.probe for each in made)
        assert reasons(made)[1] == "begin gentle"


def test_the_course_says_where_auto_is_and_is_read_back() -> None:
    course = courses(Auto(), progress=[0.5], rounds=12)[-1]
    assert course.pace is not None
    assert (course.pace.rung, course.pace.since) == (3, 9)
    assert Course.model_validate_json(course.model_dump_json()) == course
    without = course.model_copy(update={"pace": None})
    assert "pace" not in without.model_dump(mode="json")


# Momentum

CAREFUL = Auto(careful_momentum=0.5, floor=0.0)


def careful_rounds(
    losses: Sequence[float | None], rounds: int = ROUNDS, population: float | None = None
) -> list[int]:
    lasting = [losses[-1]] * (rounds - len(losses))
    made = courses(CAREFUL, losses=[*losses, *lasting], rounds=rounds, population=population)
    assert {each.momentum for each in made} <= {None, 0.5}
    with_reason = {number for number, why in reasons(made).items() if "momentum" in why}
    momenta = [None, *(each.momentum for each in made)]
    assert with_reason == {n for n in range(1, rounds + 1) if momenta[n] != momenta[n - 1]}
    return [each.round for each in made if each.momentum is not None]


def test_momentum_waits_until_three_models_lie_a_tenth_below_the_first() -> None:
    falling = [2.0, 1.9, 1.85, 1.8, 1.6, *[1.5] * 95]
    assert careful_rounds(falling) == [1, 2, 3, 4]
    assert careful_rounds([None, *falling[:-1]]) == [1, 2, 3, 4, 5]
    below_zero = [value - 10 for value in falling]
    assert careful_rounds(below_zero) == list(range(1, 22))
    assert careful_rounds([-1.0, -1.0, -1.0, -1.1, -1.4]) == [1, 2, 3, 4]


def test_momentum_waits_for_no_more_than_a_fifth_of_the_rounds() -> None:
    assert careful_rounds([2.0]) == list(range(1, 22))
    assert careful_rounds([2.0], rounds=1000) == list(range(1, 202))


def test_momentum_does_not_wait_for_losses_that_nobody_measures() -> None:
    assert careful_rounds([None]) == [1, 2, 3, 4]
    assert careful_rounds([None] * 30 + [2.0]) == [1, 2, 3, 4]
    assert careful_rounds([None] * 9 + [2.0]) == [1, 2, 3, 4, *range(10, 22)]


def test_momentum_is_less_while_the_loss_is_above_the_least_so_far() -> None:
    start = [2.0, 1.0, 1.0, 1.0, *[1.0] * 26]
    assert careful_rounds([*start, *[1.19] * 20, *[1.0] * 50]) == [1, 2]
    up = careful_rounds([*start, *[1.31] * 20, *[1.0] * 50])
    assert up == [1, 2, *range(32, 52)]
    assert careful_rounds([*start, 1.5, *[1.0] * 69]) == [1, 2]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.24], []),
        ([1.26], range(31, 41)),
        ([None, 1.26], range(32, 42)),
        ([1.26, *[1.0] * 4, 1.26], range(31, 46)),
    ],
)
def test_momentum_is_less_for_ten_models_after_the_same_clients_loss_has_jumped(
    losses: list[float | None], expected: Sequence[int]
) -> None:
    whole = [2.0, *[1.0] * 29, *losses, 1.0]
    assert careful_rounds(whole, population=15) == [1, 2, *expected]
    for population in (None, 15.5):
        assert careful_rounds(whole, population=population) == [1, 2]


def test_a_jump_that_is_small_beside_the_descent_does_not_count() -> None:
    start = [2.0, *[0.1] * 29]
    assert careful_rounds([*start, 0.28, 0.1], population=10) == [1, 2]
    assert careful_rounds([*start, 0.3, 0.1], population=10) == [1, 2, *range(31, 41)]


@pytest.mark.parametrize(
    ("size", "population", "expected"),
    [
        (9, 13.5, range(3, 22)),
        (9, 14, ()),
        (9, None, ()),
        (10, 15.5, range(1, 22)),
        (10, None, range(1, 22)),
    ],
)
def test_few_clients_that_change_have_all_momentum(
    size: int, population: float | None, expected: Sequence[int]
) -> None:
    auto = Auto(careful_momentum=0.0)
    made = courses(auto, losses=[2.0] * 100, size=size, population=population)
    assert [each.round for each in made if each.momentum == 0] == list(expected)


def test_without_a_careful_momentum_nobody_touches_it() -> None:
    made = courses(Auto(), losses=[2.0] * 50 + [9.0] * 50)
    assert not any(each.momentum is not None or "momentum" in each.why for each in made)
    assert "momentum" not in made[0].model_dump(mode="json")
    course = courses(CAREFUL, rounds=1)[0]
    assert course.momentum == 0.5
    assert Course.model_validate_json(course.model_dump_json()) == course


def test_the_server_s_step_has_the_momentum_that_auto_allows(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    """Nobody measures a loss: from the time that a client came again .5 up to round 4, then the
    strategy's own."""
    operator.begin(
        model,
        rounds=30,
        cohort={"size": 1, "minimum": 1},
        profiles=[{"name": n, "compressor": {"id": "none"}} for n in ("p", "q")],
        policies=[{"id": "auto", "careful_momentum": 0.5}],
        strategy={"id": "fedavgm", "momentum": 0.75},
    )
    device, models = enrolled(), [model.parameters]
    for _ in range(6):
        device.check_in("digits", include_one(device, model), wait=30)
        newest = [each.model for each in history(operator) if each.model][-1]
        models.append(device.model(newest, "digits").parameters)
    steps = [float(np.mean(b - a)) for a, b in pairwise(models)]
    velocity, expected = 0.0, list[float]()
    for momentum in (0.0, 0.75, 0.5, 0.5, 0.75, 0.75):
        velocity = momentum * velocity + 1
        expected.append(velocity)
    np.testing.assert_allclose(steps, expected, rtol=1e-5)


# Running statistics


def test_models_with_running_statistics_have_more_bits_and_less_momentum() -> None:
    auto = Auto(statistics_reserve=2, careful_momentum=0.3)
    losses = [2.0, *[1.0] * 99]
    made = courses(auto, progress=[0.8], losses=losses, population=100, has_statistics=True)
    assert rungs(made) == [2] * 100
    assert [each.momentum for each in made] == [0.3, 0.3, *[0.5] * 98]
    begun = "begin 2 profiles above the most compressed: the model has BatchNorm"
    assert reasons(made)[1].startswith(begun)
    assert reasons(made)[3] == "momentum 0.5: the model has BatchNorm"


def test_a_server_knows_that_a_model_has_running_statistics(
    http: Server, operator: Operator, enrolled: Enrolled
) -> None:
    statistics = {"bn.running_mean": np.zeros(8), "bn.running_var": np.ones(8)}
    tensors = {"weight": np.zeros(400), **statistics}
    made = Model.from_tensors({name: each.astype(np.float32) for name, each in tensors.items()})
    cohort = {"size": 20, "minimum": 1}
    operator.begin(made, rounds=600, cohort=cohort, profiles=None, strategy=None, downlink=None)
    device = enrolled()
    assert device.assignment("digits").profile == "0.4-bit"
    (first,) = operator.get("/v1/tasks/digits/rounds")
    assert first["course"]["hardest"] == BITS.index(0.4) == first["course"]["gentlest"]


def test_clients_that_upload_seldom_count_besides() -> None:
    auto = Auto(statistics_reserve=2, reserve=3)
    made = courses(auto, rounds=20, population=200, has_statistics=True)
    assert rungs(made) == [1] * 20
    assert "clients upload seldom" in reasons(made)[1]
    assert rungs(courses(auto, population=10, has_statistics=True))[-1] == 2


# Flat updates


def test_flat_updates_are_sent_with_more_bits_and_less_momentum() -> None:
    auto = Auto(flat_reserve=3, careful_momentum=0.5)
    losses = [2.0, *[1.0] * 99]
    made = courses(auto, progress=[0.8], losses=losses, flat=range(4, 51), population=100)
    assert rungs(made) == [4] * 3 + [1] * 47 + [2] * 4 + [3] * 4 + [4] * 42
    careful = [each.round for each in made if each.momentum is not None]
    assert careful == [1, 2, *range(4, 51)]
    assert reasons(made)[4] == "gentler: updates are flat; momentum 0.5: updates are flat"
    assert reasons(made)[51].endswith("; more momentum: no loss speaks against it")


def test_flat_updates_never_have_more_momentum_than_half() -> None:
    losses = [2.0, *[1.0] * 29, 2.0, *[1.0] * 69]
    made = courses(Auto(careful_momentum=0.9), losses=losses, population=10, flat=range(1, 101))
    assert {each.momentum for each in made} == {0.5}


def test_flat_updates_are_sent_with_still_more_bits_where_less_progress_asks_for_it() -> None:
    auto, flat = Auto(flat_reserve=2), range(2, 101)
    made = courses(auto, progress=[0.4, 0.4, 0.8], flat=flat, population=100)
    assert rungs(made)[:9] == [4] + [2] * 8
    assert max(rungs(made)[1:]) == 2
    assert min(rungs(made)) == 0


@pytest.mark.parametrize(
    ("flat_reserve", "seldom", "often"), [(0, 1, 4), (1, 1, 3), (2, 0, 2), (4, 0, 0)]
)
def test_flat_updates_of_clients_that_upload_seldom_have_twice_the_bits(
    flat_reserve: int, seldom: int, often: int
) -> None:
    auto = Auto(reserve=3, flat_reserve=flat_reserve)
    for population, expected in ((1e9, seldom), (100, often)):
        made = courses(auto, progress=[1.0], population=population, flat=range(2, 101))
        assert rungs(made)[0] == (1 if population == 1e9 else 4)
        assert set(rungs(made)[1:]) == {expected}


def test_flat_updates_that_nobody_can_compare_go_no_harder_where_clients_upload_seldom() -> None:
    auto = Auto(sketch=0)
    seldom = courses(auto, population=200, flat=range(1, 101))
    assert rungs(seldom) == [1] * 100
    assert rungs(courses(auto, population=200, flat=range(1, 50)))[48:55] == [1] + [2] * 4 + [3] * 2
    often = courses(auto, population=100, flat=range(1, 101))
    assert rungs(often)[-1] == 4


def test_updates_are_flat_if_most_of_the_newest_are() -> None:
    assert not mostly_flat(0, 0)
    assert not mostly_flat(5, 10)
    assert mostly_flat(6, 10)


def test_devices_say_that_their_updates_are_flat(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    cohort = {"size": 4, "minimum": 4}
    operator.begin(model, rounds=100, cohort=cohort, profiles=None, strategy=None, downlink=None)
    devices = [enrolled() for _ in range(4)]
    for number, said in ((1, [0.9, 0.55, 0.55, None]), (2, [0.54, 0.54, None, None])):
        for device, value in zip(devices, said, strict=True):
            assignment = device.assignment("digits")
            query = UploadFigures(nmse=1.0, flatness=value).query
            path = f"/v1/assignments/{assignment.assignment}/update?{query}"
            answer = device.request("PUT", path, device.body_for(assignment, ones(model)))
            assert answer.status_code == 201, answer.text
        while operator.get("/v1/tasks/digits")["round"] < number:
            http.tick()
    read = http.app.services.database.read
    for since, expected in ((0, (3, 8)), (2, (0, 4)), (4, (0, 0))):
        assert http.call(read, partial(records.flat, task="digits", since=since)) == expected
    courses = {each["round"]: each["course"] for each in operator.get("/v1/tasks/digits/rounds")}
    assert courses[1]["hardest"] > courses[2]["hardest"] == BITS.index(1.13)
    assert ["flat" in courses[number]["why"] for number in (1, 2, 3)] == [False, True, False]


# A task that names nothing


def config(**changes: Any) -> TaskConfig:
    fields: dict[str, Any] = {
        "task": "t",
        "model": "a" * 64,
        "rounds": 100,
        "cohort": {"size": 10, "minimum": 5},
    }
    return TaskConfig.model_validate({**fields, **changes})


def test_a_task_that_names_no_profiles_has_auto_an_average_and_a_downlink() -> None:
    made = config()
    auto = automatic(made.policies)
    assert auto == Auto(careful_momentum=0.5, flat_reserve=5, statistics_reserve=4)
    assert made.profiles[-1 - auto.flat_reserve].name == "0.57-bit"
    assert [each.name for each in made.profiles] == [f"{bits:g}-bit" for bits in BITS[: USUAL + 1]]
    assert made.downlink is not None
    assert made.strategy["id"] == "ema"
    from_config(made.strategy, made.training)
    made.check_new()
    assert TaskConfig.model_validate_json(made.model_dump_json()) == made
    choices = list(every_choice(made.policies, made.profiles))
    assert choices == [(each,) for each in made.profiles]
    course = next_course(made.policies, len(made.profiles), None, Facts(1, 100, size=10))
    assert profiles_of(made.profiles, course) == made.profiles[-1:]


@pytest.mark.parametrize(
    ("rounds", "size", "least"),
    [(100, 10, 0.1), (60, 4, 0.1), (30, 4, 0.2), (12, 4, 0.57), (1, 1, 1.13), (10_000, 9, 0.1)],
)
def test_all_uploads_of_a_task_together_tell_enough(rounds: int, size: int, least: float) -> None:
    made = config(rounds=rounds, cohort={"size": size, "minimum": 1})
    assert made.profiles[-1].name == f"{least:g}-bit"
    assert [each.name for each in made.profiles] == [
        f"{bits:g}-bit" for bits in BITS[: BITS.index(least) + 1]
    ]


@pytest.mark.parametrize(("size", "momentum"), [(2, 0.5), (9, 0.5), (10, 0.8), (200, 0.8)])
def test_a_small_cohort_has_less_momentum(size: int, momentum: float) -> None:
    made = config(cohort={"size": size, "minimum": 1})
    assert made.strategy["inner"]["inner"]["momentum"] == momentum
    auto = automatic(made.policies)
    assert auto is not None
    assert auto.careful_momentum == (0 if size < 10 else 0.5)


def test_a_strategy_that_a_task_names_keeps_its_momentum() -> None:
    own, terms, cohort = {"id": "fedavgm"}, {"concurrency": 9}, {"size": 10, "minimum": 10}
    for changes in ({"strategy": own}, {"asynchronous": terms, "cohort": cohort}):
        auto = automatic(config(**changes).policies)
        assert auto is not None
        assert auto.careful_momentum is None
    for momentum in (0.3, None):
        auto = automatic(config(policies=[{"id": "auto", "careful_momentum": momentum}]).policies)
        assert auto is not None
        assert auto.careful_momentum == momentum


@pytest.mark.parametrize(
    ("rounds", "size", "seldom"), [(90, 10, 0.1), (24, 10, 0.4), (30, 4, 0.8), (10, 10, 1.13)]
)
def test_clients_that_upload_seldom_send_more(rounds: int, size: int, seldom: float) -> None:
    made = config(rounds=rounds, cohort={"size": size, "minimum": 1})
    auto = automatic(made.policies)
    assert auto is not None
    hardest, expected = len(made.profiles) - 1, BITS.index(seldom)
    assert hardest - auto.reserve == expected
    course = None
    for number in range(1, 8):  # the same clients come again from the third round on
        population = None if number < 3 else float(size)
        course = next_course(
            made.policies,
            hardest + 1,
            course,
            Facts(number, rounds, (), size=size, population=population),
        )
        assert course.pace is not None
        assert course.pace.rung == (expected if number < 3 else hardest)
    many = Facts(8, rounds, (), size=size, population=100.0 * size)
    assert next_course(made.policies, hardest + 1, course, many).gentlest <= expected


@pytest.mark.parametrize(
    "policies",
    [
        [{"id": "auto", "gap": 0.5}],
        [{"id": "auto", "upload_bytes": 10_000}],
        [{"id": "auto"}, {"id": "bandwidth_aware"}],
    ],
)
def test_who_bounds_what_is_sent_has_all_rates(policies: list[dict[str, Any]]) -> None:
    made = config(rounds=6, cohort={"size": 2, "minimum": 1}, policies=policies)
    assert made.profiles[-1].name == "0.1-bit"
    auto = automatic(made.policies)
    assert auto is not None
    assert (auto.reserve, auto.flat_reserve) == (0, 0)


def test_what_a_task_says_itself_stays() -> None:
    named = {"name": "p", "compressor": {"id": "topk"}}
    plain = config(profiles=[named])
    assert (plain.policies, plain.downlink, plain.strategy) == ((), None, {"id": "fedavg"})
    made = config(strategy={"id": "fedadam"}, downlink=None)
    assert (made.strategy, made.downlink) == ({"id": "fedadam"}, None)
    assert config(strategy={"id": "scaffold"}).downlink is None
    ours = config(policies=[{"id": "auto"}], profiles=[named, {**named, "name": "q"}])
    assert [each.name for each in ours.profiles] == ["p", "q"]
    with pytest.raises(ValidationError, match="profiles"):
        config(policies=[{"id": "accuracy_driven"}])


@pytest.mark.parametrize(
    ("gap", "bits"), [(0.05, 0.4), (0.125, 0.2), (0.25, 0.14), (0.5, 0.1), (2, 0.05), (50, 0.05)]
)
def test_a_larger_gap_is_a_harder_ladder(gap: float, bits: float) -> None:
    made = config(policies=[{"id": "auto", "gap": gap}])
    assert made.profiles[-1].name == f"{bits:g}-bit"


def test_a_device_whose_training_diverged_once_sends_usual_updates_again() -> None:
    spec = Model.from_tensors({"weight": np.zeros(2000, np.float32)}).spec
    rng = np.random.default_rng(0)
    made = config().profiles[-1].compressor
    state = made.init(spec)
    norms = list[float]()
    for number in range(1, 21):
        update = rng.normal(0, 1e6 if number == 10 else 1, spec.size).astype(np.float32)
        previous = np.ones(spec.size, np.float32)
        public = Public(spec, PublicRandomness(bytes(32)), {"previous": previous}, number)
        symbols, state = made.compress(update, state, public, rng)
        norms.append(made.decompress(symbols, public).norm)
    usual = np.sqrt(spec.size)
    assert max(norms[:9]) < 2 * usual
    assert norms[9] > 1e5 * usual
    assert max(norms[10:]) < 30 * usual


def test_the_average_goes_over_a_tenth_of_the_rounds() -> None:
    decays = [config(rounds=rounds).strategy["decay"] for rounds in (1, 30, 100, 1000)]
    assert decays == [0.6667, 0.6667, 0.9, 0.98]


def test_the_server_s_rate_falls_over_the_second_half_of_the_rounds() -> None:
    whole = {"id": "fedavgm", "learning_rate": 1.0, "momentum": 0.8}
    falling = {"constant_rounds": 50, "decay_rounds": 49, "final": 0.25}
    clipping = {"id": "spike_clipping", "ratio": 1.5}
    assert config(rounds=99).strategy["inner"] == {**clipping, "inner": whole | falling}
    assert config(rounds=1).strategy["inner"] == {**clipping, "inner": whole}
    longer = {**whole, "learning_rate": 1.5}
    masked = config(lane="masked", rounds=99)
    assert masked.strategy["inner"] == longer | falling
    assert config(lane="masked", rounds=1).strategy["inner"] == longer
    assert config(lane="masked", training={"restricted": False}).strategy["inner"] == whole
    private = completed({"lane": "masked", "rounds": 99, "privacy": {"clip": 1.0}})
    assert private["strategy"]["inner"] == whole


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 20.0},
        {"rounds": "20"},
        {"rounds": 20, "cohort": {"size": "10", "minimum": 5.0}},
        {"rounds": 20, "policies": [Auto()]},
    ],
)
def test_a_number_in_another_form_asks_for_the_same_task(changes: dict[str, Any]) -> None:
    usual, made = config(rounds=20), config(**changes)
    assert made.profiles[-1].name == usual.profiles[-1].name
    assert made.strategy == usual.strategy
    assert automatic(made.policies) is not None


def test_a_gap_counts_in_another_form() -> None:
    made = [config(policies=[{"id": "auto", "gap": gap}]) for gap in (2, "2", 2.0)]
    assert [each.profiles[-1].name for each in made] == ["0.05-bit"] * 3


def test_names_of_profiles_are_unique_in_new_tasks() -> None:
    twice = [
        {
            "name": "p",
            "compressor": {"id": "error_feedback", "inner": {"id": "topk", "fraction": k}},
        }
        for k in (0.1, 0.01)
    ]
    with pytest.raises(IncompatiblePlan, match="must be unique, not p, p"):
        config(profiles=twice, policies=[{"id": "auto"}]).check_new()


def test_a_masked_task_has_one_profile_and_no_policy() -> None:
    made = config(lane="masked")
    assert made.policies == ()
    assert [each.name for each in made.profiles] == ["support"]
    assert made.training.restricted
    assert made.masking is not None
    assert made.masking.levels == 4
    other = config(lane="masked", masking={"levels": 7}, training={"restricted": False})
    assert other.masking is not None
    assert (other.masking.levels, other.training.restricted) == (7, False)


def test_a_masked_task_that_trains_everything_sends_everything() -> None:
    """A narrow support would lose most of each update, unless training keeps to it."""
    made = config(lane="masked", training={"restricted": False})
    assert [each.name for each in made.profiles] == ["all"]
    assert made.masking is not None
    assert (made.masking.levels, made.masking.headroom) == (2, 5.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": [{"id": "auto"}, {"id": "divergence_guard"}]}, "auto beside divergence"),
        ({"policies": [{"id": "automatic"}]}, "^1 validation error.*\n.*\n.*'automatic'"),
        ({"policies": [{"id": "bandwidth_aware"}]}, "the task names none; give profiles"),
        ({"lane": "masked", "policies": [{"id": "auto"}]}, "auto in the masked lane"),
        ({"policies": [{"id": "auto", "gap": 0}]}, "gap"),
        ({"policies": "auto"}, "policies"),
        ({"lane": "masked", "training": 3}, "training"),
        ({"policies": [{"id": "auto", "rate": 1}]}, "rate"),
    ],
)
def test_what_auto_cannot_be_asked_for_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changes)


def test_auto_beside_what_does_its_work_is_refused() -> None:
    ladder = [
        {"name": name, "compressor": {"id": "topk", "fraction": share}}
        for name, share in (("p", 0.1), ("q", 0.01))
    ]
    with pytest.raises(ValidationError, match="auto beside accuracy_driven"):
        config(profiles=ladder, policies=[{"id": "auto"}, {"id": "accuracy_driven"}])
    with pytest.raises(ValidationError, match="auto in the masked lane"):
        config(profiles=ladder, policies=[{"id": "auto"}], lane="masked")
    with pytest.raises(ValidationError, match="share"):
        config(profiles=ladder, policies=[{"id": "auto", "share": 0.5}])


def test_a_check_of_a_task_says_that_auto_chooses(tmp_path: Path) -> None:
    file = tmp_path / "task.json"
    file.write_text('{"task": "t", "rounds": 9, "cohort": {"size": 4, "minimum": 2}}')
    lines = list(summary(file, checked(file, None)))
    assert "  profiles: 1.6-bit, 1.13-bit, 0.8-bit" in lines
    assert "  auto chooses one of them for each round, with a gap of 0.5 points" in lines
    assert any("strategy ema of spike_clipping of fedavgm" in line for line in lines)


def test_a_check_of_a_task_says_that_a_budget_is_too_small(tmp_path: Path) -> None:
    file, model = tmp_path / "task.json", Model.from_tensors({"w": np.zeros(4000, np.float32)})
    fields = {"task": "t", "rounds": 50, "cohort": {"size": 10, "minimum": 2}}
    for budget, is_warned in ((20_000, True), (30_000, False)):
        policies = [{"id": "auto", "upload_bytes": budget}]
        file.write_text(json.dumps({**fields, "policies": policies}))
        lines = list(summary(file, checked(file, model)))
        assert f"  all uploads together have a budget of {budget:,} bytes" in lines
        warning = "  warning: 50 rounds of 10 uploads take some 25,000 bytes"
        assert any(line.startswith(warning) for line in lines) == is_warned


def test_a_check_of_a_task_says_that_a_gap_is_of_the_defaults_profiles(tmp_path: Path) -> None:
    file = tmp_path / "task.json"
    made = config(policies=[{"id": "auto", "gap": 2}]).model_dump(mode="json")
    file.write_text(json.dumps(made))
    lines = list(summary(file, checked(file, None)))
    assert "  auto chooses one of them for each round, with a gap of 2 points" in lines
    file.write_text(json.dumps({**made, "profiles": made["profiles"][1:]}))
    lines = list(summary(file, checked(file, None)))
    assert "  auto chooses one of them for each round; a gap says nothing about your own" in lines


def test_a_check_of_a_task_names_what_will_not_be_trained(tmp_path: Path) -> None:
    file = tmp_path / "task.json"
    file.write_text('{"task": "t", "rounds": 9, "cohort": {"size": 4, "minimum": 2}}')
    wide: dict[str, np.ndarray] = {
        "b": np.zeros(3),
        "c": np.zeros(3),
        "w": np.zeros(400, np.float32),
    }
    model = Model.from_tensors(wide, frozen=["b", "c"])
    last = list(summary(file, checked(file, model)))[-1]
    assert last.startswith("  warning: tensor 'b' and 1 more of float64 will not be trained")
