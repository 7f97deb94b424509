"""Three stations on this machine, whose made-up batteries the sun charges and training drains.

    python day.py run day                the task's rounds, and day/history.json
    python day.py draw day result.svg    who took part when

Stations and server are processes as in README.md. Batteries and routes are files as Linux has them.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from station import MIN_PERCENT, initial_model, write_battery, write_route

from fedpress import FedpressError, Operator
from fedpress.demo.fleet import Fleet
from fedpress.errors import ServerError
from fedpress.plotting import SUFFIXES, save
from fedpress.task_file import task_config

HERE = Path(__file__).resolve().parent
ROUND_COST = 15.0
"""Percent of a battery that training and one upload take. Real stations spend far less, and a round
takes them longer: here a day lasts for half a minute."""
EVERY, PATIENCE = 0.1, 180.0
"""Seconds between two looks at the stations, and until the run is given up."""
_TRAINED = re.compile(r"^round (\d+): (\d+) bytes to upload", re.MULTILINE)
_REFUSED = re.compile(r"^not now: (.*); asking again", re.MULTILINE)


@dataclass
class Station:
    """A made-up battery and link: `percent` at first, charged by `sun` percent a second; `metered`
    are the seconds between which the station reaches the network by a modem."""

    number: int
    percent: float
    sun: float
    metered: tuple[float, float] = (0.0, 0.0)
    samples: list[tuple[float, float, bool]] = field(default_factory=list)
    updates: list[tuple[float, int, int]] = field(default_factory=list)
    refusals: list[tuple[float, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"station-{self.number}"

    def live(self, folder: Path, now: float, seconds: float, log: str) -> None:
        """Charge for `seconds`, pay for what the log has of new, and write what is left."""
        trained = _TRAINED.findall(log)[len(self.updates) :]
        self.updates += [(now, int(number), int(size)) for number, size in trained]
        refused = _REFUSED.findall(log)[len(self.refusals) :]
        self.refusals += [(now, reason) for reason in refused]
        charged = self.percent + self.sun * seconds - ROUND_COST * len(trained)
        self.percent = min(100.0, max(0.0, charged))
        begin, end = self.metered
        is_metered = begin <= now < end
        write_battery(folder / f"power-{self.number}", self.percent)
        write_route(folder / f"network-{self.number}", "ppp0" if is_metered else "eth0")
        self.samples.append((now, self.percent, is_metered))

    def words(self, folder: Path, url: str) -> list[str]:
        """The command that starts the station."""
        places = {"--power": f"power-{self.number}", "--network": f"network-{self.number}"}
        options = {"--state-dir": self.name, **places}
        words = ["station.py", "run", url, "--number", str(self.number), "--ask-again", "0.5"]
        return words + [word for name, to in options.items() for word in (name, str(folder / to))]

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "samples": self.samples,
            "updates": self.updates,
            "refusals": self.refusals,
        }


def run(folder: Path) -> None:
    """Run the task's rounds, and write what stations did when to `folder`/history.json."""
    stations = [Station(1, 80, 1.0), Station(2, 12, 4.0), Station(3, 70, 2.0, (17.0, 26.0))]
    (folder / "logs").mkdir(parents=True)
    with Fleet(folder, folder / "logs") as fleet, fleet.start_server() as operator:
        config = task_config(HERE / "task.json", operator.register_model(initial_model()))
        operator.create_task(config)
        token = operator.create_token(uses=len(stations), note="example")
        for each in stations:
            each.live(folder, 0.0, 0.0, "")
            environment = {"FEDPRESS_TOKEN": token, "OMP_NUM_THREADS": "1"}
            fleet.start(each.name, each.words(folder, fleet.url), environment, HERE)
        spend_the_day(fleet, operator, config.task, folder, stations)
        rounds = operator.rounds(config.task)
    history = [
        {"round": each.round, "included": each.included, "upload_bytes": each.upload_bytes}
        | dict(each.metrics)
        for each in sorted(rounds, key=lambda each: each.round)
        if each.state == "committed"
    ]
    for entry in history:
        print(json.dumps(entry))
    document = {"rounds": history, "stations": [each.as_json() for each in stations]}
    (folder / "history.json").write_text(json.dumps(document) + "\n")


def spend_the_day(
    fleet: Fleet, operator: Operator, task: str, folder: Path, stations: list[Station]
) -> None:
    """Let batteries and links change until the task is over; raises ServerError after PATIENCE."""
    begun = before = time.monotonic()
    while operator.task(task).state != "finished":
        time.sleep(EVERY)
        fleet.check()
        now = time.monotonic()
        if now - begun > PATIENCE:
            raise ServerError(f"not finished after {PATIENCE:.0f} s", hint=f"see {folder}/logs")
        for each in stations:
            each.live(folder, now - begun, now - before, fleet.log(each.name))
        before = now


def draw(document: dict[str, Any], picture: Path) -> None:
    """Draw each station's battery and link over time, with the rounds that it trained for."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stations = document["stations"]
    figure, panels = pyplot.subplots(
        len(stations), 1, figsize=(6, 7), layout="constrained", sharex=True, sharey=True
    )
    for axes, station in zip(panels, stations, strict=True):
        times, percents, metered = zip(*station["samples"], strict=True)
        axes.fill_between(
            times, 0, 105, where=metered, color="tab:orange", alpha=0.25, label="metered link"
        )
        axes.plot(times, percents, color="0.45", label="battery")
        axes.axhline(MIN_PERCENT, color="0.45", ls=":", lw=1, label=f"least, {MIN_PERCENT} %")
        refused = [at for at, _ in station["refusals"]]
        axes.plot(refused, [4] * len(refused), "x", color="tab:red", ms=5, label="refuses")
        trained = [(at, 92 - 20 * (number % 2)) for at, number, _ in station["updates"]]
        for place, (_, number, _) in zip(trained, station["updates"], strict=True):
            axes.annotate(str(number), place, ha="center", va="center", color="white", size=9)
        places = zip(*trained, strict=True) if trained else ([], [])
        axes.plot(*places, "o", color="tab:blue", ms=14, label="trains, round")
        axes.set(ylabel=f"station {station['number']}, %", ylim=(0, 105))
        axes.grid(alpha=0.3)
    panels[-1].set(xlabel="seconds")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, markerscale=0.6)
    save(figure, picture)


def main() -> None:
    parser = argparse.ArgumentParser(description="A day of three stations on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    day = commands.add_parser("run")
    day.add_argument("folder", type=Path, help="for states and logs; must not exist")
    picture = commands.add_parser("draw")
    picture.add_argument("folder", type=Path, help="of a run")
    picture.add_argument("picture", type=Path, help="a name in .png, .svg or .pdf")
    asked = parser.parse_args()
    if asked.command == "run":
        if asked.folder.exists():
            parser.error(f"{asked.folder} exists; remove it, or name another")
        try:
            run(asked.folder.resolve())
        except FedpressError as exc:
            raise SystemExit(f"error: {exc}") from None
        return
    if asked.picture.suffix not in SUFFIXES:
        parser.error(f"{asked.picture} does not end in {', '.join(SUFFIXES)}")
    history = asked.folder / "history.json"
    if not history.exists():
        parser.error(f"{history} is missing; `python day.py run {asked.folder}` writes it")
    draw(json.loads(history.read_text()), asked.picture)


if __name__ == "__main__":
    main()
