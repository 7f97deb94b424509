"""Conditions under which a device takes part, and the ready-made ones."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fedpress.cli import app
from fedpress.cli.client import _conditions, _print_changes
from fedpress.conditions import Battery, Hours, Interface, Load, Refusal
from fedpress_client.apps import load_condition
from fedpress_client.events import ClientWaiting, Event, ParticipationPostponed, TaskJoined
from fedpress_compression.compressors.none import Uncompressed
from fedpress_protocols.errors import ConfigurationError, TransportError
from fedpress_protocols.model import Model
from tests.client.fake_server import FakeLink, FakeServer, RandomTrainer, make_client
from tests.systems import ON_WINDOWS


def fleet(rounds: int = 2, auto: int | None = 1) -> FakeServer:
    model = Model.from_tensors({"w": np.zeros(20, np.float32)})
    return FakeServer(model, lambda r, a: [Uncompressed()], rounds=rounds, auto=auto)


# In the client


def test_a_device_that_refuses_asks_for_nothing_and_no_round_waits_for_it(tmp_path: Path) -> None:
    server, seen = fleet(), list[Event]()
    link = FakeLink(server)
    away = make_client(
        server,
        RandomTrainer(20),
        tmp_path / "away",
        link,
        on_event=seen.append,
        should_participate=lambda: Refusal("not on the home network", 600),
    )
    assert away.step() == 600
    make_client(server, RandomTrainer(20), tmp_path / "here").run()
    assert server.state == "finished"
    assert away.step() == 600
    assert "check_in" not in link.calls
    assert not any(part.assignment.client_id == "client0" for part in server.parts.values())
    assert [e.details for e in seen if isinstance(e, ParticipationPostponed)] == 2 * [
        {"condition": "<lambda>", "reason": "not on the home network", "seconds": 600}
    ]


def test_conditions_are_asked_in_order_until_one_refuses(tmp_path: Path) -> None:
    asked, answers = [], {"first": True, "second": False, "third": True}

    def condition(name: str) -> Any:
        def ask() -> bool | np.bool_:
            asked.append(name)
            return answers[name] if name != "third" else np.bool_(answers[name])

        return ask

    client = make_client(
        fleet(), RandomTrainer(20), tmp_path, should_participate=[*map(condition, answers)]
    )
    assert client.step() == 60
    assert asked == ["first", "second"]
    answers["second"] = True
    assert client.step() == 0
    assert asked == ["first", "second", "first", "second", "third"]
    answers["third"] = False
    assert client.step() == 60


def test_an_update_waits_in_the_outbox_while_the_device_refuses(tmp_path: Path) -> None:
    server, refusals = fleet(), list[Refusal]()

    def breaks(verb: str) -> None:
        if verb == "before upload" and not refusals:
            raise TransportError("the link broke")

    link = FakeLink(server, breaks)
    client = make_client(
        server,
        RandomTrainer(20),
        tmp_path,
        link,
        should_participate=lambda: refusals[-1] if len(refusals) == 1 else True,
    )
    with pytest.raises(TransportError):
        client.step()
    refusals.append(Refusal("metered"))
    assert client.step() == 60
    assert len(client.ledger.pending) == 1
    assert "before upload" not in link.calls[-1:]
    refusals.append(Refusal("never returned"))
    summary = client.run()
    assert (summary.included, summary.pending, server.committed) == (2, 0, 2)


def test_a_masked_session_under_way_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(fleet(), RandomTrainer(20), tmp_path, should_participate=lambda: False)
    assert client.step() == 60
    monkeypatch.setattr(client._runner.masked, "resume", lambda task: 3.0)
    assert client.step() == 3.0


def test_a_condition_that_fails_refuses_and_says_why(tmp_path: Path) -> None:
    def sensor() -> bool:
        raise OSError("no such sensor")

    seen: list[Event] = []
    client = make_client(
        fleet(), RandomTrainer(20), tmp_path, on_event=seen.append, should_participate=sensor
    )
    assert client.step() == 60
    assert seen[-1].details["reason"] == "sensor failed: OSError: no such sensor"


@pytest.mark.parametrize("answer", [None, "no", 1, 0.5])
def test_an_answer_that_is_none_raises(tmp_path: Path, answer: object) -> None:
    client = make_client(fleet(), RandomTrainer(20), tmp_path, should_participate=lambda: answer)
    with pytest.raises(ConfigurationError, match="return True to take part"):
        client.step()


@pytest.mark.parametrize("wrong", [[True], "Battery", [Battery, None], 3])
def test_what_cannot_be_called_is_refused_at_once(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be called"):
        make_client(fleet(), RandomTrainer(20), tmp_path, should_participate=wrong)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_refusal_says_when_to_ask_again(seconds: float) -> None:
    for make in (
        lambda: Refusal("no", seconds),
        lambda: Battery(seconds=seconds),
        lambda: Interface(seconds=seconds),
        lambda: Load(seconds=seconds),
    ):
        with pytest.raises(ConfigurationError, match="a number above 0"):
            make()


# Battery


def supply(folder: Path, name: str, **files: object) -> None:
    (folder / name).mkdir(parents=True)
    for file, value in files.items():
        (folder / name / file).write_text(f"{value}\n")


def battery(folder: Path, name: str = "BAT0", status: str = "Discharging", **files: object) -> None:
    supply(folder, name, type="Battery", status=status, **files)


def answer_of(condition: Any) -> str:
    answer = condition()
    return answer.reason if isinstance(answer, Refusal) else str(answer)


linux = pytest.mark.skipif(
    ON_WINDOWS or not sys.platform.startswith("linux"), reason="files of Linux"
)


@linux
def test_the_battery_decides_without_external_power(tmp_path: Path) -> None:
    battery(tmp_path, capacity=29)
    supply(tmp_path, "AC", type="Mains", online=0)
    low = "the battery has 29 %, less than 30 %, and no external power"
    assert answer_of(Battery(folder=tmp_path)) == low
    assert Battery(folder=tmp_path)() == Refusal(low, 60)
    assert Battery(seconds=5, folder=tmp_path)() == Refusal(low, 5)
    assert answer_of(Battery(29, folder=tmp_path)) == "True"
    assert answer_of(Battery(0, only_on_power=True, folder=tmp_path)) == "no external power"
    (tmp_path / "AC" / "online").write_text("1\n")
    assert answer_of(Battery(100, only_on_power=True, folder=tmp_path)) == "True"


@linux
def test_batteries_count_by_their_mean_and_peripherals_do_not(tmp_path: Path) -> None:
    battery(tmp_path, "BAT0", capacity=10)
    battery(tmp_path, "BAT1", capacity=60)
    battery(tmp_path, "mouse", "Charging", capacity=90, scope="Device")
    battery(tmp_path, "BAT2", "Full", capacity=100, present=0)
    assert answer_of(Battery(36, folder=tmp_path)).startswith("the battery has 35 %")
    assert answer_of(Battery(35, folder=tmp_path)) == "True"


@linux
def test_a_machine_without_battery_takes_part_and_an_unreadable_one_does_not(
    tmp_path: Path,
) -> None:
    assert Battery(only_on_power=True, folder=tmp_path / "none")() is True
    battery(tmp_path, status="Unknown")
    assert answer_of(Battery(folder=tmp_path)) == "the charge of the battery cannot be read"
    (tmp_path / "BAT0" / "status").write_text("Charging\n")
    assert Battery(folder=tmp_path)() is True


def test_elsewhere_psutil_reads_the_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    psutil = ModuleType("psutil")
    reading: Any = SimpleNamespace(percent=20.0, power_plugged=False)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: reading, raising=False)
    monkeypatch.setitem(sys.modules, "psutil", psutil)
    assert answer_of(Battery()).startswith("the battery has 20 %")
    reading.power_plugged = True
    assert Battery()() is True
    reading = None
    assert Battery(only_on_power=True)() is True
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ConfigurationError, match="psutil is not installed"):
        Battery()


@pytest.mark.parametrize("percent", [-1, 101, float("nan"), "x"])
def test_a_charge_beyond_the_battery_is_refused(percent: Any) -> None:
    with pytest.raises(ConfigurationError, match="min_percent must be a number from 0 to 100"):
        Battery(percent)


# Interface

ROUTES = """\
Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
wwan0	00000000	0102A8C0	0003	0	0	700	00000000	0	0	0
eth0	00000000	0101A8C0	0003	0	0	100	00000000	0	0	0
eth0	0001A8C0	00000000	0001	0	0	0	00FFFFFF	0	0	0
"""
NOWHERE = 32 * "0"
ROUTES_6 = f"""\
{NOWHERE} 00 {NOWHERE} 00 {NOWHERE} 00000032 00000001 00000000 00000003     ppp0
{NOWHERE} 00 {NOWHERE} 00 {NOWHERE} ffffffff 00000001 00000000 00200200       lo
"""


@linux
def test_the_default_route_decides(tmp_path: Path) -> None:
    condition = Interface(folder=tmp_path)
    assert condition() is True  # no route, so no link that costs anything
    (tmp_path / "route").write_text(ROUTES)
    assert condition() is True
    (tmp_path / "ipv6_route").write_text(ROUTES_6)
    assert answer_of(condition) == "the network is reached by ppp0"
    assert Interface(("wlan*",), folder=tmp_path)() is True
    (tmp_path / "ipv6_route").unlink()
    (tmp_path / "route").write_text("\n".join(ROUTES.splitlines()[:2]))
    assert answer_of(condition) == "the network is reached by wwan0"
    (tmp_path / "route").write_text(ROUTES.replace("0003", "0000"))  # none is up
    assert condition() is True


@linux
def test_the_tables_of_this_machine_can_be_read() -> None:
    assert Interface(("no-such-interface",))() is True


@pytest.mark.parametrize("wrong", ["wwan0", ()])
def test_interfaces_are_a_tuple(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="a tuple of names"):
        Interface(wrong)


def test_where_there_are_no_routing_tables_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigurationError, match="which is Linux's"):
        Interface()


# Load and hours


def test_a_busy_machine_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = "fedpress_client.participation.os"
    monkeypatch.setattr(f"{seen}.cpu_count", lambda: 4)
    monkeypatch.setattr(f"{seen}.getloadavg", lambda: (2.0, 0.0, 0.0), raising=False)
    assert Load(0.5)() is True
    assert answer_of(Load(0.4)) == "the load is 0.50 a processor, more than 0.4"
    with pytest.raises(ConfigurationError, match="above 0"):
        Load(0)
    monkeypatch.delattr(f"{seen}.getloadavg")
    with pytest.raises(ConfigurationError, match="does not say its load"):
        Load()


def at(text: str) -> Any:
    return lambda: datetime.fromisoformat(f"2026-11-23T{text}")


@pytest.mark.parametrize(
    ("now", "seconds"),
    [
        ("22:00:00", None),
        ("05:59:59", None),
        ("06:00:00", 900),
        ("12:30:00", None),
        ("13:00:00", 900),
        ("21:59:30", 30),
        ("11:59:59.9", 1),
    ],
)
def test_hours_are_those_of_the_clock(now: str, seconds: float | None) -> None:
    answer = Hours("22:00-06:00", "12:00-13:00", clock=at(now))()
    assert (answer.seconds if isinstance(answer, Refusal) else None) == seconds
    assert (answer is True) == (seconds is None)


def test_a_refusal_names_the_hours() -> None:
    condition = Hours("22:00-06:00", "12:00-13:00", clock=at("09:15:00"))
    assert answer_of(condition) == "it is 09:15, outside of 22:00-06:00, 12:00-13:00"


@pytest.mark.parametrize("window", ["22-6", "24:00-06:00", "22:00-22:00", "", "22:00 - 06:00"])
def test_windows_that_are_none_are_refused(window: str) -> None:
    with pytest.raises(ConfigurationError, match="no window of the day"):
        Hours(window)


def test_no_hours_are_no_condition() -> None:
    with pytest.raises(ConfigurationError, match="no hours"):
        Hours()


# On the command line


@linux
def test_options_make_conditions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_conditions.py").write_text("def home():\n    return True\n\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = _conditions(20, ("22:00-06:00",), ("wwan*",), 0.5, ("my_conditions:home",))
    assert [type(each).__name__ for each in made] == [
        "Hours",
        "Battery",
        "Interface",
        "Load",
        "function",
    ]
    assert made[-1]() is True
    assert _conditions(None, (), (), None, ()) == []
    for wrong in ("my_conditions", "my_conditions:away", "my_conditions:number", "none_such:home"):
        with pytest.raises(ConfigurationError) as caught:
            load_condition(wrong, tmp_path)
        assert caught.value.hint.startswith("--condition takes module:function")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hours", "22-6"], "'22-6' is no window of the day"),
        (["--min-battery", "130"], "130"),
        (["--max-load", "0"], "0"),
        (["--condition", "home"], "'home' names no function"),
    ],
)
def test_wrong_options_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    join = ["client", "join", "http://127.0.0.1:9", "--app", "nothing"]
    ended = CliRunner().invoke(app, [*join, *options])
    assert ended.exit_code != 0
    assert message in ended.output + str(ended.exception)


def test_a_reason_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    on_event = _print_changes()
    low = ParticipationPostponed(condition="Battery", reason="low", seconds=60)
    for event in (low, ClientWaiting(seconds=60), low, ClientWaiting(seconds=60)):
        on_event(event)
    on_event(ParticipationPostponed(condition="Hours", reason="day", seconds=900))
    on_event(TaskJoined(pending=0))
    on_event(low)
    assert capsys.readouterr().err.splitlines() == [
        "not taking part: low; asking again in 60 s",
        "not taking part: day; asking again in 900 s",
        "not taking part: low; asking again in 60 s",
    ]
