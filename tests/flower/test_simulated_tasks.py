"""`fedpress simulate --task`: the same model as on a server, and all that a task's file can say."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from rich.console import Console

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

from fedpress.cli import app
from fedpress.compressor_option import compressor_from_option
from fedpress.simulate.run import TASK, Settings, run, simulate, sweep
from fedpress.simulate.screen import print_summary
from fedpress.simulate.site import Site
from fedpress_compression.compressor import to_config
from fedpress_protocols.errors import ConfigurationError, FedpressError
from fedpress_protocols.plan import PrivacyTerms
from tests.flower.test_simulate import QUICK, model_over_http

PLAIN: dict[str, Any] = {
    "task": TASK,
    "rounds": 3,
    "profiles": [
        {"name": "all", "compressor": to_config(compressor_from_option("topk:fraction=0.02"))}
    ],
    "cohort": {"size": 4, "minimum": 4},
    "training": {"local_steps": 3},
    "seed": 5,
}
EXAMPLES = Path(__file__).parents[2] / "examples"
PUMPS = """
from pathlib import Path
import sensor

class Pump(sensor.SensorTrainer):
    initial_model = staticmethod(sensor.initial_model)

def pump(index, clients):
    return Pump(sensor.read(Path(f"pump-{index}.csv")))
"""
DOWNLINK = {"bits": 12, "rate": 1.0, "keep": 8, "coder": "huffman"}


def of_file(folder: Path, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "task.json"
    path.write_text(json.dumps({**PLAIN, **changes}))
    return str(path)


def settings(folder: Path, changes: dict[str, Any] | None = None, **own: Any) -> Settings:
    fields: dict[str, Any] = {"clients": 4, "seed": 5, "task": of_file(folder, **(changes or {}))}
    return Settings(**{**fields, **own})


def test_a_task_gives_the_model_of_a_server_over_http(tmp_path: Path) -> None:
    history = simulate(settings(tmp_path), tmp_path / "out")
    assert [row.included for row in history.rows] == [4, 4, 4]
    assert history.rows[-1].model == model_over_http(tmp_path, "topk:fraction=0.02")
    assert not (tmp_path / "out" / "run").exists()


def test_a_downlink_is_coded_and_counted(tmp_path: Path) -> None:
    plain = simulate(settings(tmp_path), tmp_path / "plain")
    coded = simulate(settings(tmp_path, {"downlink": DOWNLINK}), tmp_path / "coded")
    sent = [row.download_bytes or 0 for row in coded.rows]
    whole = [row.download_bytes or 0 for row in plain.rows]
    assert sent[0] < 0.6 * whole[0]
    assert sum(sent[1:]) < 0.4 * sum(whole[1:])
    figures = coded.summary()
    assert figures["download_bytes"] == figures["down_bytes"] == sum(sent)
    assert "download_bytes" in (tmp_path / "coded" / "history.csv").read_text().splitlines()[0]


def test_profiles_policies_and_schedules_run(tmp_path: Path) -> None:
    topk = {"id": "error_feedback", "inner": {"id": "topk", "fraction": 0.1}}
    profiles = [
        {"name": "ten", "compressor": topk},
        {"name": "one", "compressor": {**topk, "inner": {"id": "topk", "fraction": 0.01}}},
    ]
    changes = {
        "profiles": profiles,
        "policies": [{"id": "bandwidth_aware"}],
        "cohort": {"size": 4, "minimum": 2},
    }
    chosen = settings(tmp_path, changes, clients=6)
    one = simulate(chosen, tmp_path / "1")
    again = simulate(chosen, tmp_path / "2")
    assert [row.model for row in one.rows] == [row.model for row in again.rows]
    assert {row.included for row in one.rows} == {4}
    bodies = [row.upload_bytes for row in one.rows]
    assert len({*bodies}) > 1


def test_a_task_that_ends_early_says_why(tmp_path: Path) -> None:
    changes = {
        "rounds": 30,
        "evaluation": {"metric": "loss", "min_delta": 9.0, "patience": 2},
    }
    history = simulate(settings(tmp_path, changes), tmp_path / "out")
    assert 2 <= len(history.rows) < 30
    assert history.reason
    assert history.summary()["reason"] == history.reason


def test_lost_devices_end_at_the_deadline_without_waiting(tmp_path: Path) -> None:
    changes = {"cohort": {"size": 6, "minimum": 2}, "round_seconds": 600, "rounds": 4}
    history = simulate(settings(tmp_path, changes, clients=6, dropout=0.4), tmp_path / "out")
    assert len(history.rows) == 4
    assert sum(row.lost for row in history.rows) > 0
    assert max(row.seconds for row in history.rows) > 600
    assert all(row.included == row.answered for row in history.rows)


def test_every_round_has_what_devices_measured_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "numpy-sensor"))
    monkeypatch.chdir(tmp_path)
    for index in range(2):
        __import__("sensor").write_readings(tmp_path / f"pump-{index}.csv", index)
    (tmp_path / "pumps.py").write_text(PUMPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    task = EXAMPLES / "numpy-sensor" / "task.json"
    asked = Settings(clients=2, task=str(task), app="pumps:pump")
    history = simulate(asked, tmp_path / "out")
    assert len(history.rows) == 10
    assert all("rmse_degrees" in row.evaluation for row in history.rows)


def test_a_task_that_was_stopped_goes_on_to_the_same_model(tmp_path: Path) -> None:
    whole = simulate(settings(tmp_path), tmp_path / "whole")

    class Stopping:
        def round_closed(self, history: Any, rounds: int) -> None:
            if len(history.rows) == 2:
                raise KeyboardInterrupt

    screen: Any = Stopping()
    with pytest.raises(KeyboardInterrupt):
        simulate(settings(tmp_path), tmp_path / "stopped", screen=screen)
    history = simulate(settings(tmp_path), tmp_path / "stopped")
    assert [row.model for row in history.rows] == [row.model for row in whole.rows]


def test_a_task_that_was_stopped_does_not_go_on_with_another_file(tmp_path: Path) -> None:
    class Stopping:
        def round_closed(self, history: Any, rounds: int) -> None:
            raise KeyboardInterrupt

    screen: Any = Stopping()
    with pytest.raises(KeyboardInterrupt):
        simulate(settings(tmp_path), tmp_path / "out", screen=screen)
    with pytest.raises(ConfigurationError, match=r"with another content of .*task\.json"):
        simulate(settings(tmp_path, {"training": {"local_steps": 5}}), tmp_path / "out")
    assert len(simulate(settings(tmp_path), tmp_path / "out").rows) == 3


def test_a_sweep_runs_again_what_has_another_file(tmp_path: Path) -> None:
    asked = settings(tmp_path, {"rounds": 1})
    (first,) = sweep(asked, [{}], tmp_path / "out")
    (again,) = sweep(asked, [{}], tmp_path / "out")
    assert again.rows[0].model == first.rows[0].model
    (other,) = sweep(settings(tmp_path, {"rounds": 2}), [{}], tmp_path / "out")
    assert [len(each.rows) for each in (first, again, other)] == [1, 1, 2]


def test_a_task_that_no_device_works_for_any_more_ends_and_says_why(tmp_path: Path) -> None:
    privacy = {
        "lane": "central", "clip": 0.5, "noise_multiplier": 2.5, "participations": 1, "epsilon": 8.0
    }  # fmt: skip
    changes = {
        "rounds": 2,
        "profiles": [{"name": "whole", "compressor": {"id": "quantize", "clip": 0.02}}],
        "privacy": privacy,
    }
    history = simulate(settings(tmp_path, changes), tmp_path / "out")
    assert len(history.rows) == 1
    assert history.complete
    assert "no device had anything to do for 24 hours of the simulated clock" in history.reason
    assert "their privacy budget spent: 4" in history.reason


def test_a_task_that_pauses_at_its_end_ends(tmp_path: Path) -> None:
    history = simulate(settings(tmp_path, {"at_end": "paused"}), tmp_path / "out")
    assert (len(history.rows), history.complete, history.reason) == (3, True, "")


def test_what_all_devices_declined_is_a_reason_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain_trainers.py").write_text(
        "from tests.flower.test_simulate import digit_trainer\n"
        "def make(index, clients):\n"
        "    trainer = digit_trainer(index, clients)\n"
        "    trainer.honours = frozenset()\n"
        "    return trainer\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = {"strategy": {"id": "fedprox", "mu": 0.1}, "max_attempts": 2}
    asked = settings(tmp_path, changes, app="plain_trainers:make")
    with pytest.raises(FedpressError, match="no client answered"):
        run(asked, tmp_path / "out", Console(width=200))
    document = json.loads((tmp_path / "out" / "history.json").read_text())
    assert "; 8 declined: the plan asks for proximal, and the trainer honours" in document["reason"]


def test_whoever_has_the_printed_token_may_look_at_the_server_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed, seen = io.StringIO(), list[tuple[int, str]]()

    def look(_: Site) -> None:
        url = re.findall(r"in a browser: (\S+)/console", printed.getvalue())[0]
        token = re.findall(r"the token to log in: (\S+)", printed.getvalue())[0]
        with httpx.Client(base_url=url, timeout=60) as browser:
            form = browser.get("/console/login").text
            csrf = re.findall(r'name="csrf" value="([^"]+)"', form)[0]
            browser.post("/console/login", data={"csrf": csrf, "token": token})
            for path in ("/console", f"/console/tasks/{TASK}", f"/console/tasks/{TASK}/do/cancel"):
                answer = browser.get(path)
                seen.append((answer.status_code, answer.text))

    monkeypatch.setattr(Site, "stay", look)
    shown = Console(file=printed, width=200)
    history = run(settings(tmp_path), tmp_path / "out", shown, ui=True)[0]
    assert [status for status, _ in seen] == [200, 200, 403]
    assert TASK in seen[0][1]
    assert "/rounds/3" in seen[1][1]
    assert [row.included for row in history.rows] == [4, 4, 4]
    with pytest.raises(ConfigurationError, match="--ui shows the server of one task"):
        run(Settings(), tmp_path / "none", shown, ui=True)


def test_masked_tasks_run(tmp_path: Path) -> None:
    changes = {
        "lane": "masked",
        "rounds": 2,
        "profiles": [{"name": "all", "compressor": {"id": "shared_support", "fraction": 0.05}}],
    }
    history = simulate(settings(tmp_path, changes), tmp_path / "out")
    assert [row.included for row in history.rows] == [4, 4]


@pytest.mark.parametrize(
    ("changes", "own", "said"),
    [
        ({}, {"rounds": 3}, "--rounds cannot be combined with --task"),
        ({}, {"strategy": "fedprox"}, "--strategy cannot be combined with --task"),
        ({}, {"engine": "ray"}, "--engine ray"),
        ({}, {"clients": 3}, "a round needs 4 uploads at least, and --clients is 3"),
        (
            {"eligible": {"memory_gib": {"minimum": 2}}},
            {},
            "eligible cannot be simulated: the devices have no attributes",
        ),
        ({"members": ["a", "b", "c", "d"]}, {}, "members cannot be simulated"),
        ({"rounds": 0}, {}, "rounds: must be 1 or more, not 0"),
        ({}, {"app": "tests.flower.apps:pair"}, "a Flower app brings a server of its own"),
    ],
)
def test_what_does_not_fit_a_task_is_refused(
    changes: dict[str, Any], own: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as error:
        simulate(settings(tmp_path, changes, **own), tmp_path / "out")
    assert said in str(error.value)


def test_rounds_set_what_a_flower_app_reads_and_its_accuracy_is_shown(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "flower"
    out = str(tmp_path / "out")
    arguments = ["simulate", "--app", str(example), "--rounds", "2", "--clients", "2"]
    arguments += ["--engine", "local", "--run-config", "local-epochs=1", "--out", out]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    document = json.loads((tmp_path / "out" / "history.json").read_text())
    assert document["rounds"] == 2


def test_a_servers_own_evaluation_is_in_table_and_history(tmp_path: Path) -> None:
    asked = Settings(clients=4, engine="local", app="tests.flower.apps:evaluated")
    history = simulate(asked, tmp_path)
    assert [row.accuracy for row in history.rows] == [0.25, 0.5]


def test_an_app_that_reads_no_number_of_rounds_refuses_one(tmp_path: Path) -> None:
    asked = Settings(clients=4, rounds=3, engine="local", app="tests.flower.apps:evaluated")
    with pytest.raises(ConfigurationError, match="the app says itself how many rounds it has"):
        simulate(asked, tmp_path)


def test_a_sweeps_names_are_told_their_rule(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"run 1 has the name 'a/b', which cannot be a f"):
        sweep(Settings(**QUICK), [{"name": "a/b"}], tmp_path)
    with pytest.raises(ConfigurationError, match="two runs of the sweep have the name 'a'"):
        sweep(Settings(**QUICK), [{"name": "a"}, {"name": "a"}], tmp_path)
    quick = Settings(**QUICK, engine="local")
    assert [each.name for each in sweep(quick, [{"name": "1 %", "rounds": 1}], tmp_path)] == ["1 %"]


def test_a_private_task_says_what_it_spent_and_against_whom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    privacy = {
        "lane": "central", "clip": 0.5, "noise_multiplier": 2.5, "participations": 2,
        "epsilon": 8.0,
        "correlation": {"separation": 2, "rounds": 4, "weight": 1.2, "decay": 1.0},
    }  # fmt: skip
    changes = {
        "rounds": 4,
        "profiles": [{"name": "whole", "compressor": {"id": "quantize", "clip": 0.02}}],
        "cohort": {"size": 2, "minimum": 2},
        "privacy": privacy,
    }
    history = simulate(settings(tmp_path, changes), tmp_path / "out")
    terms = PrivacyTerms.model_validate(privacy)
    spent = [terms.spent(count) for count in (1, 1, 2, 2)]
    assert [row.epsilon for row in history.rows] == pytest.approx(spent)
    assert [row.lost for row in history.rows] == [0, 0, 0, 0]
    assert history.summary()["epsilon"] == pytest.approx(spent[-1])
    print_summary(Console(width=200), [history], tmp_path)
    shown = capsys.readouterr().out
    assert "by 2 of 2 participations of a device at most, 2 rounds apart; its noise is" in shown
    assert "against other devices and the public" in shown


def test_a_clip_that_adapts_moves_in_a_simulation(tmp_path: Path) -> None:
    privacy = {
        "lane": "central", "clip": 0.01, "noise_multiplier": 2.5, "participations": 2,
        "epsilon": 30.0, "adaptive": {"count_noise": 1.5, "learning_rate": 1.0},
    }  # fmt: skip
    changes = {
        "rounds": 2,
        "profiles": [{"name": "whole", "compressor": {"id": "quantize", "clip": 0.02}}],
        "privacy": privacy,
    }
    history = simulate(settings(tmp_path, changes), tmp_path / "out")
    terms = PrivacyTerms.model_validate(privacy)
    assert [row.epsilon for row in history.rows] == pytest.approx([terms.spent(1), terms.spent(2)])
    clips = [float(re.findall(r"clip ([0-9.e-]+),", row.privacy or "")[0]) for row in history.rows]
    assert clips[0] == 0.01
    assert clips[1] != clips[0]


def test_clips_of_tensors_hold_in_a_simulation(tmp_path: Path) -> None:
    privacy = {
        "lane": "central", "clip": 0.5, "noise_multiplier": 2.5, "participations": 2,
        "epsilon": 30.0, "per_tensor": [["*weight", 3], ["*", 1]],
    }  # fmt: skip
    changes = {
        "rounds": 2,
        "profiles": [{"name": "whole", "compressor": {"id": "quantize", "clip": 0.02}}],
        "privacy": privacy,
    }
    history = simulate(settings(tmp_path, changes), tmp_path / "out")
    terms = PrivacyTerms.model_validate(privacy)
    assert [row.epsilon for row in history.rows] == pytest.approx([terms.spent(1), terms.spent(2)])
    assert [row.included for row in history.rows] == [4, 4]
    assert "clip 0.5, of which each tensor has its share" in (history.rows[-1].privacy or "")
    only = {**changes, "privacy": {**privacy, "per_tensor": [["*weight", 1]]}}
    with pytest.raises(FedpressError, match="which would have no bound"):
        simulate(settings(tmp_path, only), tmp_path / "other")
