"""`import fedpress`, the command line and the demo, as a newcomer meets them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedpress
from fedpress.cli import main
from fedpress.cli.outcomes import FAILED, NO_ANSWER, WRONG_USE
from fedpress.compressor_option import auto_from_option, compressor_from_option
from fedpress.demo.history import Curve, History
from fedpress_compression.compressor import compressors
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.per_tensor import PerTensor
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.topk import TopK
from fedpress_protocols.errors import ConfigurationError, MissingExtra
from fedpress_protocols.policies import Auto
from fedpress_strategies import strategies
from tests.processes import heed_ctrl_c


def command(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """`fedpress ...` as a process of its own, without a terminal."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "100"}
    environment |= more.pop("environment", {})
    return subprocess.run(
        [sys.executable, "-m", "fedpress", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
        **more,
    )


def test_every_registered_compressor_and_strategy_has_its_name_in_a_namespace() -> None:
    for wire_id, made in compressors().items():
        if made.__module__.startswith("fedpress_compression."):
            at = f"add {made.__name__} ({wire_id}) to fedpress/compressors.py"
            assert getattr(fedpress.compressors, made.__name__, None) is made, at
            assert made.__name__ in fedpress.compressors.__all__, at
    for identifier, builder in strategies().items():
        if builder.__module__.startswith("fedpress_strategies."):
            at = f"add {builder.__name__} ({identifier}) to fedpress/strategies.py"
            assert getattr(fedpress.strategies, builder.__name__, None) is builder, at
            assert builder.__name__ in fedpress.strategies.__all__, at


def test_a_namespace_whose_library_is_missing_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "fedpress_server.app", None)
    with pytest.raises(MissingExtra, match=r"fedpress\.server\.create_app.*fedpress\[server\]"):
        _ = fedpress.server.create_app


def test_pages_and_examples_import_public_names_alone() -> None:
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("**/examples/**/*.py")]
    files = [each for each in pages if not {".venv", "tests"} & {*each.relative_to(root).parts}]
    files += root.glob("examples/**/*.diff")
    assert len(files) > 40
    private = re.compile(r"^[ +]*(from|import) fedpress_", re.MULTILINE)
    assert [str(file) for file in files if private.search(file.read_text())] == []


def test_every_name_of_the_face_is_there_and_costs_nothing_before_it_is_used() -> None:
    for name in fedpress.__all__:
        assert getattr(fedpress, name) is not None
    assert set(dir(fedpress)) == set(fedpress.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fedpress.nonsense
    code = (
        "import sys, fedpress; print([m for m in ('torch','fastapi','numpy') if m in sys.modules])"
    )
    alone = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    assert alone.stdout.strip() == "[]"


def test_a_former_name_warns_and_is_not_listed() -> None:
    with pytest.warns(DeprecationWarning, match="fedpress.Work is now called TrainingRequest"):
        assert fedpress.Work is fedpress.TrainingRequest
    with pytest.warns(DeprecationWarning, match="Work is now called TrainingRequest"):
        from fedpress_client import Work
    assert Work is fedpress.TrainingRequest
    assert "Work" not in dir(fedpress)


def test_every_error_is_public() -> None:
    from fedpress_protocols import errors

    defined = {
        name
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, Exception)
    }
    assert set(fedpress.errors.__all__) == defined


def test_help_names_the_commands() -> None:
    shown = command("--help").stdout
    for name in ("server", "client", "demo", "task", "devices"):
        assert name in shown


def test_the_servers_settings_are_all_in_its_help() -> None:
    from fedpress_server.settings import Settings

    shown = command("server", "run", "--help", environment={"COLUMNS": "200"})
    assert shown.returncode == 0, shown.stderr
    for name, field in Settings.model_fields.items():
        assert f"FEDPRESS_{name.upper()}" in shown.stdout
        if "SecretStr" in str(field.annotation):  # none belongs on a command line
            assert f"--{name.replace('_', '-')} " not in shown.stdout
        else:
            assert f"--{name.replace('_', '-')}" in shown.stdout
            assert field.description is not None
            assert field.description[:20] in shown.stdout


JOIN = ("client", "join", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["server", "run", "--port", "many"], "port"),
        (["server", "run", "--colour", "red"], "colour"),
        (["server", "run", "--config", "nowhere.toml"], "nowhere.toml"),
        (["client", "join", "http://127.0.0.1:9", "--app", "nothing"], "module:factory"),
        (
            ["client", "join", "http://127.0.0.1:9", "--app", "no_such_module:make"],
            "no_such_module",
        ),
        (
            [
                "client",
                "join",
                "http://127.0.0.1:9",
                "--app",
                "fedpress:no",
                "--attribute",
                "memory",
            ],
            "give KEY=VALUE",
        ),
        (["demo", "--rounds", "0"], "--rounds must lie in 1 to 10000, not 0"),
        (["demo", "--secure", "--compressor", "auto"], "--compressor auto with --secure"),
        (["demo", "--compressor", "zip"], "no compressor has the id 'zip'"),
        (["demo", "--compressor", "topk:fraction"], "not of the form key=value"),
        (["demo", "--compressor", "{"], "--compressor is not JSON"),
        (["task", "list", "--admin-token", "x" * 16, "--url", "http://127.0.0.1:9"], "no answer"),
        (["task", "create", "a.json", "b", "--admin-token", "x" * 16], "cannot be read"),
    ],
)
def test_wrong_input_is_one_sentence_on_stderr(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedpress", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (FAILED, WRONG_USE, NO_ANSWER)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", Uncompressed()),
        ("topk", ErrorFeedback(PerTensor(TopK()))),
        (
            "topk:fraction=0.02,magnitude_bits=1",
            ErrorFeedback(PerTensor(TopK(0.02, magnitude_bits=1))),
        ),
        ("quantize:bits=4,rounding=nearest", ErrorFeedback(PerTensor(Quantize(4)))),
        ("per_tensor:min_size=10", ErrorFeedback(PerTensor(min_size=10))),
        ('{"id": "quantize", "bits": 3}', Quantize(3)),
        (
            'error_feedback:inner={"id": "topk", "fraction": 0.02, "magnitude_bits": 1}, decay=0.9',
            ErrorFeedback(TopK(0.02, magnitude_bits=1), decay=0.9),
        ),
    ],
)
def test_a_compressor_can_be_typed(text: str, expected: object) -> None:
    assert compressor_from_option(text) == expected


def test_a_compressor_that_is_not_one_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        compressor_from_option("topk:fraction=2")
    with pytest.raises(ConfigurationError, match="is not JSON"):
        compressor_from_option('error_feedback:inner={"id": "topk", fraction')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("topkk:fraction=0.1", "no compressor has the id 'topkk'; did you mean topk?"),
        ("AUTO", "no compressor has the id 'AUTO'; did you mean auto?"),
        ('{"id": "error_feedback", "inner": {"id": "randk"}}', "did you mean randomk?"),
        ("nosuch", "no compressor has the id 'nosuch'; known are bernoulli, "),
        ("none:x=1", "none takes no options, not x"),
        ("topk:fraction=0.1,fraction=0.2", "fraction is there twice"),
        ('{"id": "topk", "fraction": 0.1, "fraction": 0.2}', "fraction is there twice"),
        ("topk:id=none", "id is there twice"),
        ('{"fraction": 0.1}', "the object has no id"),
        ("auto:gap=1", "auto cannot be given here"),
    ],
)
def test_what_is_wrong_with_a_typed_compressor_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        compressor_from_option(text)
    assert said in error.value.detail
    assert "upgrade" not in str(error.value)


def test_terms_of_auto_can_be_typed() -> None:
    assert auto_from_option("topk") is None
    assert auto_from_option("auto") == Auto()
    assert auto_from_option("auto:gap=1") == auto_from_option('{"id": "auto", "gap": 1}')
    assert auto_from_option('{"id": "auto", "gap": 1}') == Auto(gap=1)
    for text, said in {
        "auto:nosuch=1": "--compressor: auto takes gap, upload_bytes, .*, not nosuch",
        "auto:gap=1,gap=2": "--compressor: gap is there twice",
        "auto:gap=0": "--compressor: auto: gap: must be more than 0, not 0",
    }.items():
        with pytest.raises(ConfigurationError, match=said):
            auto_from_option(text)


def test_a_history_of_nothing_is_still_json(tmp_path: Path) -> None:
    history = History(Curve("plain", {}), Curve("compressed", {}), clients=2, seed=0)
    history.write(tmp_path / "deep" / "history.json")
    written = json.loads((tmp_path / "deep" / "history.json").read_text())
    assert written["upload_ratio"] == 0
    assert written["rounds"] == 0
    assert written["complete"] is False


@pytest.mark.slow
def test_the_demo_runs_to_its_end(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    figures = tmp_path / "figures.json"
    answer = command("demo", "--quick", "--out", str(tmp_path / "out"), "--json", str(figures))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    written = json.loads(figures.read_text())
    assert written["complete"] is True
    assert written["rounds"] == 5
    assert written["upload_ratio"] > 20
    assert written["final_accuracy"] > 0.7
    assert written["wire_upload_bytes"] > written["upload_bytes"] > 0
    assert written["download_bytes"] > 0
    for curve in written["tasks"].values():
        assert [point["participants"] for point in curve["rounds"]] == [4] * 5
    assert (tmp_path / "out" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out" / "history.json").read_text()) == written
    assert "uploaded, bodies" in answer.stdout
    ratio, accuracy = written["upload_ratio"], written["final_accuracy"]
    record_property("figure", f"demo --quick: {ratio:.0f}x, accuracy {100 * accuracy:.1f} %")


@pytest.mark.slow
def test_ctrl_c_stops_every_process(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "fedpress", "demo", "--out", str(tmp_path / "out")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TMPDIR": str(tmp_path),
    }
    process = subprocess.Popen(
        arguments,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_ctrl_c,
    )
    ready = tmp_path / "out" / "logs" / "device-9.log"
    give_up = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < give_up:
        time.sleep(0.1)
    assert len(processes_of(tmp_path)) >= 10  # the last device is just being started, or was
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130, shown
    assert "all processes have ended" in shown
    assert "Traceback" not in shown
    assert processes_of(tmp_path) == []
    assert json.loads((tmp_path / "out" / "history.json").read_text())["complete"] is False


def processes_of(folder: Path) -> list[str]:
    """The server and devices whose state lies below `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            about = line + (entry / "environ").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in about and ("fedpress_server" in line or "fedpress.demo.device" in line):
            found.append(line)
    return found
