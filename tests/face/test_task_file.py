"""A task's file: YAML and JSON say the same, and what is wrong is told before a server hears it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from fedpress import task_file
from fedpress.cli import app
from fedpress.task_file import task_config
from fedpress_compression.compressor import compressors
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.model import Model
from fedpress_protocols.privacy.correlated import best
from fedpress_strategies import strategies
from fedpress_strategies.strategy import example_of

YAML = """
# as in the README
task: keyboard
rounds: 100
strategy: {id: fedavgm, momentum: 0.8}
profiles:
  - name: phone
    compressor:
      id: error_feedback
      inner: {id: topk, fraction: 2e-2, magnitude_bits: 1}
training: {local_epochs: 5, batch_size: 16, learning_rate: 1e-1}
cohort: {size: 100, minimum: 60, over_selection: 1.2}
round_seconds: 600
retention: {last: 5, every: 10}
"""
TOPK = "{id: topk, fraction: 2e-2, magnitude_bits: 1}"
FIELDS = {
    "task": "keyboard",
    "rounds": 100,
    "strategy": {"id": "fedavgm", "momentum": 0.8},
    "profiles": [
        {
            "name": "phone",
            "compressor": {
                "id": "error_feedback",
                "inner": {"id": "topk", "fraction": 0.02, "magnitude_bits": 1},
            },
        }
    ],
    "training": {"local_epochs": 5, "batch_size": 16, "learning_rate": 0.1},
    "cohort": {"size": 100, "minimum": 60, "over_selection": 1.2},
    "round_seconds": 600,
    "retention": {"last": 5, "every": 10},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    made = Model.from_tensors(
        {"weight": np.ones((64, 32), np.float32), "bias": np.zeros(32, np.float32)}
    )
    file.write_bytes(made.to_bytes())
    return file


def written(folder: Path, text: str, name: str = "task.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def check(file: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["task", "check", str(file), *more])


def refused(file: Path, *more: str) -> str:
    done = check(file, *more)
    assert isinstance(done.exception, ConfigurationError), done.output
    return str(done.exception)


def test_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    as_json = written(tmp_path, json.dumps(FIELDS), "task.json")
    assert task_config(written(tmp_path, YAML)) == task_config(as_json)


def test_a_right_file_is_summed_up(tmp_path: Path, model: Path) -> None:
    done = check(written(tmp_path, YAML))
    assert done.exit_code == 0, done.output
    assert "100 rounds of 100 uploads (120 asked, 60 at least) in 600 s" in done.output
    assert "newest 5 versions, one of every 10" in done.output
    assert "sizes and names of tensors are not checked" in done.output
    done = check(written(tmp_path, YAML), "--model", str(model))
    assert done.exit_code == 0, done.output
    assert "an upload takes" in done.output


WRAPPED = f"id: error_feedback\n      inner: {TOPK}"


@pytest.mark.parametrize(
    ("compressor", "says"),
    [
        ("{id: topk, fraction: 1e-3}", "sends topk without error feedback, which never sends 80%"),
        ("{id: per_tensor, large: {id: stc, fraction: 1e-3}}", "sends per_tensor without"),
        ("{id: clip, inner: {id: qsgd}, max_norm: 1e-3}", "choose a higher rate"),
        ("{id: topk, fraction: 0.1}", None),
        ("{id: qsgd}", None),
        ("{id: dgc}", None),
    ],
)
def test_what_never_sends_the_most_of_an_update_is_warned_of(
    tmp_path: Path, compressor: str, says: str | None
) -> None:
    done = check(written(tmp_path, one_line(compressor)))
    assert done.exit_code == 0, done.output
    if says is None:
        assert "warning" not in done.output
    else:
        assert "  warning: profile 'phone'" in done.output
        assert says in done.output


def test_where_only_what_is_sent_is_trained_there_is_nothing_to_warn_of(tmp_path: Path) -> None:
    text = one_line("{id: shared_support}")
    assert "never sends" in check(written(tmp_path, text)).output
    restricted = text.replace("training: {", "training: {restricted: true, ")
    done = check(written(tmp_path, restricted))
    assert done.exit_code == 0, done.output
    assert "never sends" not in done.output


@pytest.mark.parametrize("lane", ["clear", "masked"])
@pytest.mark.parametrize("keeps", [False, True])
def test_batch_norm_under_masks_is_warned_of(tmp_path: Path, lane: str, keeps: bool) -> None:
    statistics = {"bn.running_mean": np.zeros(4), "bn.running_var": np.ones(4)}
    values = {"weight": np.zeros((40, 30)), **statistics}
    tensors = {name: each.astype(np.float32) for name, each in values.items()}
    model = tmp_path / "bn.safetensors"
    model.write_bytes(Model.from_tensors(tensors).to_bytes())
    fields: dict[str, Any] = {"task": "t", "rounds": 9, "training": {"local_epochs": 1}}
    fields |= {"lane": lane, "cohort": {"size": 8, "minimum": 6}}
    if keeps:
        fields["strategy"] = {"id": "fedper", "personal": ["bn.*"], "inner": {"id": "fedavg"}}
    done = check(written(tmp_path, json.dumps(fields), "task.json"), "--model", str(model))
    assert done.exit_code == 0, done.output
    assert ("use GroupNorm or LayerNorm" in done.output) == (lane == "masked" and not keeps)


def one_line(compressor: str) -> str:
    """The task with `compressor` instead of its own."""
    whole = YAML.replace(f"compressor:\n      {WRAPPED}", f"compressor: {compressor}")
    assert whole != YAML
    return whole


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("rounds: 100", "rounds: 0", "rounds: must be 1 or more, not 0"),
        ("rounds: 100", "rounds: 100\nrouns: 3", "rouns: there is no such field"),
        ("rounds: 100", "rounds: 100\nrounds: 3", "line 5: rounds is there twice"),
        ("id: topk", "id: topq", "no compressor has the id 'topq'"),
        ("momentum: 0.8", "momentum: 8", "momentum"),
        (TOPK, "{id: qsgd}", "error_feedback around qsgd, which does not contract"),
        ("id: fedavgm", "id: fedavgn", "strategy"),
        ("minimum: 60", "minimum: 160", "minimum 160 is larger than size 100"),
        ("rounds: 100", "rounds: [", "is not YAML"),
        ("rounds: 100", "rounds: &many 100", "an anchor; write it out"),
        ("task: keyboard", "task: !!python/object:os.system x", "is not YAML"),
        ("task: keyboard", "task: 2026-11-20 10:00", "task"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    file = written(tmp_path, YAML.replace(old, new, 1))
    told = refused(file)
    assert says in told
    assert str(file) in told


def test_aliases_cannot_make_a_small_file_large(tmp_path: Path) -> None:
    lines = ["a: &a [x, x]", *(f"{b}: &{b} [*{a}, *{a}]" for a, b in zip("abcdefg", "bcdefgh"))]  # noqa: B905
    assert "an anchor" in refused(written(tmp_path, "\n".join(lines)))


def test_a_file_that_is_no_mapping_or_no_text_is_refused(tmp_path: Path) -> None:
    assert "holds a list" in refused(written(tmp_path, "- a\n- b"))
    assert "holds a str" in refused(written(tmp_path, '"word"', "task.json"))
    assert "is there twice" in refused(written(tmp_path, '{"a": 1, "a": 2}', "task.json"))
    binary = tmp_path / "task.yml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "is not YAML" in refused(binary)
    assert "cannot be read" in refused(tmp_path / "nowhere.yaml")
    deep = written(tmp_path, "[" * 100_000, "deep.json")
    assert "is not JSON" in refused(deep)
    assert "is not YAML" in refused(written(tmp_path, "[" * 100_000, "deep.yaml"))


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lane": "masked", "masking": {}}, "commute with the sum"),
        (
            {
                "lane": "masked",
                "masking": {},
                "strategy": {"id": "median"},
                "profiles": [
                    {"name": "p", "compressor": {"id": "shared_support", "fraction": 0.1}}
                ],
            },
            "lane sees the sum",
        ),
        ({"strategy": {"id": "median"}}, "coordinate"),
        (
            {
                "strategy": {"id": "scaffold", "clients": 200},
                "training": {"local_steps": 5, "learning_rate": 0.1},
            },
            "control variate",
        ),
        ({"strategy": {"id": "fedbuff"}}, "asynchronous"),
        ({"strategy": {"id": "onebit_adam"}}, "warm-up"),
        (
            {
                "strategy": {"id": "fedavg"},
                "downlink": {},
                "profiles": [{"name": "p", "compressor": {"id": "ef21", "inner": {"id": "topk"}}}],
            },
            "counts on a model",
        ),
    ],
)
def test_parts_that_cannot_work_together_are_refused_without_the_model_too(
    tmp_path: Path, model: Path, changes: dict[str, Any], says: str, with_model: bool
) -> None:
    file = written(tmp_path, json.dumps(FIELDS | changes), "task.json")
    assert says in refused(file, *(["--model", str(model)] if with_model else []))


@pytest.mark.parametrize("wire_id", sorted(compressors()))
def test_a_compressor_is_judged_alike_with_and_without_the_model(
    tmp_path: Path, model: Path, wire_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_file, "never_sent", lambda made: 0.0)  # a warning, and no judgement
    profile = {"name": "p", "compressor": {"id": wire_id}}
    file = written(tmp_path, json.dumps(FIELDS | {"profiles": [profile]}), "task.json")
    assert check(file).exit_code == check(file, "--model", str(model)).exit_code


@pytest.mark.parametrize("identifier", sorted(set(strategies()) - {"lora"}))
def test_a_strategy_is_judged_alike_with_and_without_the_model(
    tmp_path: Path, model: Path, identifier: str
) -> None:
    config = {"id": identifier, **example_of(identifier)}
    if identifier == "fedper":
        config["personal"] = ["bias"]
    file = written(tmp_path, json.dumps(FIELDS | {"strategy": config}), "task.json")
    assert check(file).exit_code == check(file, "--model", str(model)).exit_code


@pytest.mark.parametrize("length", ["local_epochs", "local_steps", "gradient_accumulation"])
def test_one_step_of_fedsgd_has_no_other_length(tmp_path: Path, length: str) -> None:
    fields = FIELDS | {"strategy": {"id": "ema", "inner": {"id": "fedsgd"}}}
    file = written(tmp_path, json.dumps(fields | {"training": {length: 5}}), "task.json")
    assert f"training.{length} of 5 under a strategy" in refused(file)
    file = written(tmp_path, json.dumps(fields | {"training": {length: 1}}), "task.json")
    assert check(file).exit_code == 0


@pytest.mark.parametrize(
    ("participations", "changes", "warns_of"),
    [
        (5, {}, "at least 4 devices"),
        (4, {}, "at least 5 devices"),
        (6, {}, None),  # one to spare
        (5, {"correlation": True, "rounds": 10}, "at least 8 devices"),
        (6, {"correlation": True, "rounds": 10}, None),
        (5, {"members": [f"d{number}" for number in range(8)]}, "at least 4 devices"),
        (5, {"members": [f"d{number}" for number in range(10)]}, None),
    ],
)
def test_participations_without_one_to_spare_are_warned_of(
    tmp_path: Path, participations: int, changes: dict[str, Any], warns_of: str | None
) -> None:
    privacy: dict[str, Any] = {
        "lane": "central",
        "clip": 0.5,
        "noise_multiplier": 20.0,
        "participations": participations,
        "epsilon": 8.0,
    }
    if changes.get("correlation"):
        privacy["correlation"] = best(2, 10).model_dump(mode="json")
    more = {name: value for name, value in changes.items() if name != "correlation"}
    fields = {
        "task": "private",
        "rounds": 5,
        "profiles": [{"name": "p", "compressor": {"id": "quantize", "clip": 0.1}}],
        "cohort": {"size": 8, "minimum": 4},
        "privacy": privacy,
    } | more
    done = check(written(tmp_path, json.dumps(fields), "task.json"))
    assert done.exit_code == 0, (done.output, done.exception)
    assert ("leaves none to spare" in done.output) == (warns_of is not None)
    assert (warns_of or "") in done.output


def test_factors_of_adapters_wait_for_the_model(tmp_path: Path, model: Path) -> None:
    file = written(tmp_path, json.dumps(FIELDS | {"strategy": {"id": "lora", "rank": 4}}))
    assert check(file).exit_code == 0
    assert "no trained factors lora_A and lora_B" in refused(file, "--model", str(model))


def test_patterns_of_names_wait_for_the_model(tmp_path: Path, model: Path) -> None:
    personal = FIELDS | {"strategy": {"id": "fedper", "personal": ["nothing*"]}}
    file = written(tmp_path, json.dumps(personal), "task.json")
    assert check(file).exit_code == 0
    assert "no trained tensor" in refused(file, "--model", str(model))


def test_against_its_model_what_the_server_would_refuse_is_refused(
    tmp_path: Path, model: Path
) -> None:
    masked = {
        **FIELDS,
        "lane": "masked",
        "masking": {},
        "strategy": {"id": "median"},
        "profiles": [{"name": "p", "compressor": {"id": "shared_support", "fraction": 0.1}}],
    }
    file = written(tmp_path, json.dumps(masked), "task.json")
    assert "lane sees the sum" in refused(file, "--model", str(model))
    topk = masked | {"strategy": {"id": "fedavg"}, "profiles": FIELDS["profiles"]}
    file = written(tmp_path, json.dumps(topk), "task.json")
    assert "commute with the sum" in refused(file, "--model", str(model))
    personal = FIELDS | {"strategy": {"id": "personal_layers", "patterns": ["nothing*"]}}
    file = written(tmp_path, json.dumps(personal), "task.json")
    refused(file, "--model", str(model))
    inner = FIELDS["profiles"][0]["compressor"]["inner"]  # type: ignore[index]
    ladder = [
        {"name": f"p{share}", "compressor": {**inner, "fraction": share}} for share in (0.02, 0.2)
    ]
    walked = FIELDS | {"profiles": ladder, "policies": [{"id": "accuracy_driven"}]}
    file = written(tmp_path, json.dumps(walked), "task.json")
    assert "'p0.02' comes before 'p0.2'" in refused(file, "--model", str(model))
    file = written(tmp_path, json.dumps(walked | {"policies": []}), "task.json")
    assert check(file, "--model", str(model)).exit_code == 0
    assert "not a safetensors model" in refused(file, "--model", str(file))
