"""The consortium on this machine: an association, a coordinator, four hospitals, a power cut.

    python consortium.py run private                      masks and noise
    python consortium.py run open --without-noise         masks alone
    python consortium.py draw private open result.png

Each party is a process, or a command that is printed before it runs, with a folder of its own
inside of the one that is named. See README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hospital import HOSPITALS, HospitalTrainer, accuracy, initial_model, patients

from fedpress import FedpressError, Model, Operator, TrainingRequest, TrainingTerms
from fedpress.demo.fleet import Fleet
from fedpress.errors import ServerError
from fedpress.operator import RoundStatus
from fedpress.plotting import SUFFIXES, save

HERE = Path(__file__).resolve().parent
TASK = "biopsies"
CUT, CUT_ROUND = 3, 4
"""The power of this hospital fails when it is ready for this round's masks, until a round has ended
without it."""
PATIENCE = 300.0


class Consortium:
    """`folder` holds a folder for each party, and the logs; `fleet` the processes."""

    def __init__(self, folder: Path, fleet: Fleet, is_private: bool) -> None:
        self.folder, self.fleet, self.is_private = folder, fleet, is_private
        self.authority = self.token = ""

    def fedpress(self, *words: str | Path) -> str:
        """Print a command as a party would type it, run it, and return what it prints."""
        texts = [str(word) for word in words]
        print("$ fedpress", shlex.join(texts).replace(f"{self.folder}/", ""), flush=True)
        access = {"FEDPRESS_URL": self.fleet.url, "FEDPRESS_ADMIN_TOKEN": self.fleet.admin_token}
        done = subprocess.run(  # noqa: S603 - our own module, no shell
            [sys.executable, "-m", "fedpress", *texts],
            env={**os.environ, **access},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ServerError(f"fedpress {texts[0]} {texts[1]} failed: {done.stderr.strip()}")
        return done.stdout.strip()

    def certify(self) -> None:
        """The association makes its key; it certifies those that the hospitals make."""
        key, requests = self.folder / "association" / "authority.key", []
        self.authority = self.fedpress("authority", "init", key)
        for number in range(1, HOSPITALS + 1):
            name = f"hospital-{number}"
            public = self.fedpress("authority", "request", self.folder / name / "state")
            requests.append(f"{public} {name}\n")
        names = key.with_name("requests.txt")
        names.write_text("".join(requests))
        out = key.with_name("certificates")
        self.fedpress("authority", "issue", key, "--requests", names, "--out", out)

    def serve(self) -> Operator:
        """The coordinator's server knows the public half of the association's key alone."""
        settings = ("--data-dir", "coordinator/server", "--masking-authority", self.authority)
        print("$ fedpress server run", shlex.join(settings), flush=True)
        self.fleet.settings["masking_authority"] = self.authority
        return self.fleet.start_server()

    def open_task(self) -> None:
        """The coordinator creates the task, and a token that lets nobody in without approval."""
        folder = self.folder / "coordinator"
        model, task = folder / "model.safetensors", folder / "task.json"
        model.write_bytes(initial_model().to_bytes())
        terms = json.loads((HERE / "task.json").read_text())
        if not self.is_private:
            del terms["privacy"]
        task.write_text(json.dumps(terms))
        self.fedpress("task", "create", task, model)
        uses = str(HOSPITALS)
        self.token = self.fedpress("devices", "token", "create", "--uses", uses, "--approve-each")

    def join(self, number: int) -> None:
        """A hospital takes part, or goes on from its folder: the command is the same."""
        name = f"hospital-{number}"
        certificate = self.folder / "association" / "certificates" / f"{name}.cert"
        words = ["client", "join", self.fleet.url, "--app", "hospital:trainer", "--task", TASK]
        words += ["--state-dir", str(self.folder / name / "state")]
        words += ["--authority", self.authority, "--certificate", str(certificate)]
        words += ["--max-epsilon", "8"] if self.is_private else []
        print(f"{name}$ fedpress", shlex.join(words).replace(f"{self.folder}/", ""), flush=True)
        environment = {"HOSPITAL": str(number), "FEDPRESS_TOKEN": self.token}
        self.fleet.start(name, ["-m", "fedpress", *words], environment, HERE)

    def approve(self, number: int) -> None:
        """Compare the key that a hospital reads out with the one at the server, and let it in."""
        name = f"hospital-{number}"
        told = self.wait(lambda: self.fleet.log(name).partition("its key is ")[2].split())[0]
        waiting = json.loads(self.fedpress("devices", "list", "--state", "waiting", "--json"))
        client = next((each["client_id"] for each in waiting if each["key_id"] == told), None)
        if client is None:
            raise ServerError(f"{name} reads out the key {told}, and no device waits with it")
        print(f"{name} reads out the key {told}", flush=True)
        self.fedpress("devices", "approve", client, "--key", told)

    def wait(self, result: Callable[[], Any]) -> Any:
        """The result once it is true; raises ServerError if a process dies, or after PATIENCE."""
        give_up = time.monotonic() + PATIENCE
        while time.monotonic() < give_up:
            self.fleet.check()
            if found := result():
                return found
            time.sleep(0.05)
        raise ServerError(f"no progress for {PATIENCE:.0f} s", hint=f"see {self.folder / 'logs'}")


def committed(operator: Operator, number: int) -> RoundStatus | None:
    attempts = operator.rounds(TASK)
    return next((e for e in attempts if e.round == number and e.state == "committed"), None)


def measured(operator: Operator, status: RoundStatus) -> dict[str, Any]:
    """Print a round, and return its entry in the history."""
    share = accuracy(operator.model(status.model or ""))
    masking = status.session.message_bytes if status.session else 0
    spent = f", epsilon {status.privacy.epsilon:.2f} spent" if status.privacy else ""
    print(
        f"round {status.round}: {status.included} hospitals in the sum, accuracy {share:.1%}, "
        f"{status.upload_bytes} bytes of updates, {masking:,} of masking{spent}",
        flush=True,
    )
    return {
        "round": status.round,
        "included": status.included,
        "accuracy": share,
        "upload_bytes": status.upload_bytes,
        "masking_bytes": masking,
        "epsilon": status.privacy.epsilon if status.privacy else None,
    }


def federate(parties: Consortium) -> list[dict[str, Any]]:
    """All rounds of the task, with the power cut; returns the history."""
    parties.certify()
    operator = parties.serve()
    parties.open_task()
    everybody = range(1, HOSPITALS + 1)
    for number in everybody:
        parties.join(number)
    for number in everybody:
        parties.approve(number)
    history: list[dict[str, Any]] = []
    cut, is_cut = f"hospital-{CUT}", False
    for number in range(1, operator.task(TASK).rounds + 1):
        if number == CUT_ROUND:
            parties.wait(lambda: f"session round {CUT_ROUND}." in parties.fleet.log(cut))
            parties.fleet.kill(cut)
            print(f"{cut} has trained for round {CUT_ROUND}, and loses its power", flush=True)
            is_cut = True
        status = parties.wait(partial(committed, operator, number))
        history.append(measured(operator, status))
        if is_cut and status.included < HOSPITALS:
            parties.join(CUT)
            is_cut = False
    parties.fleet.finish()
    for number in everybody:
        name = f"hospital-{number}"
        print(f"{name}:", parties.fleet.log(name).splitlines()[-1].partition(";")[0])
    return history


def run(folder: Path, is_private: bool) -> None:
    if folder.exists():
        raise SystemExit(f"{folder} exists; remove it, or name a folder that does not exist")
    folder = folder.resolve()
    for name in ("association", "coordinator", "logs"):
        (folder / name).mkdir(parents=True)
    started = time.monotonic()
    with Fleet(folder / "coordinator", folder / "logs") as fleet:
        parties = Consortium(folder, fleet, is_private)
        history = federate(parties)
    seconds = round(time.monotonic() - started, 1)
    alone = [accuracy(trained_alone(number)) for number in range(1, HOSPITALS + 1)]
    print("each hospital alone:", ", ".join(f"{share:.1%}" for share in alone))
    print(f"{len(history)} rounds, {seconds:.0f} s; folders and logs: {folder}")
    document = {"rounds": history, "alone": alone, "seconds": seconds}
    (folder / "history.json").write_text(json.dumps(document, indent=2) + "\n")


def trained_alone(number: int) -> Model:
    """The model of a hospital that takes no part: as many steps, without noise."""
    task = json.loads((HERE / "task.json").read_text())
    own = task["training"] | {"local_steps": task["rounds"] * task["training"]["local_steps"]}
    model = initial_model()
    request = TrainingRequest(TASK, 1, 1, TrainingTerms(**own), seed=0)
    trained = HospitalTrainer(*patients()[number]).train(model, request)
    return model.with_parameters(trained.parameters)


def draw(runs: Sequence[Path], picture: Path) -> None:
    """The accuracy on the public patients after each round of each run, and of hospitals alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    documents = [document_of(folder) for folder in runs]
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for folder, document in zip(runs, documents, strict=True):
        points = [(each["round"], 100 * each["accuracy"]) for each in document["rounds"]]
        (line,) = axes.plot(*zip(*points, strict=True), ".-", label=f"together, {folder.name}")
        for point, each in zip(points, document["rounds"], strict=True):
            if each["included"] < HOSPITALS:
                axes.plot(*point, "o", mfc="none", ms=12, color=line.get_color())
    for number, share in enumerate(documents[0]["alone"], 1):
        axes.axhline(100 * share, color="0.6", linestyle=":", linewidth=1)
        place, units = (1.01, 100 * share), ("axes fraction", "data")
        axes.annotate(f"hospital {number} alone", place, xycoords=units, va="center", size=8)
    axes.plot([], [], "o", mfc="none", ms=12, color="0.4", label=f"without hospital {CUT}")
    axes.set(xlabel="round", ylabel="accuracy on public patients, %")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    save(figure, picture)


def document_of(folder: Path) -> dict[str, Any]:
    path = folder / "history.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing; `python consortium.py run {folder}` writes it")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description="Four hospitals and a server on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="federate, with a power cut")
    one.add_argument("folder", type=Path, help="for the parties' folders; must not exist")
    one.add_argument("--without-noise", action="store_true", help="masks alone")
    picture = commands.add_parser("draw", help="draw the history of runs")
    picture.add_argument("folder", type=Path, nargs="+", help="of a run")
    picture.add_argument("picture", type=Path, help="a name in .png, .svg or .pdf")
    asked = parser.parse_args()
    if asked.command == "draw":
        if asked.picture.suffix not in SUFFIXES:
            parser.error(f"{asked.picture} does not end in {', '.join(SUFFIXES)}")
        draw(asked.folder, asked.picture)
        return
    try:
        run(asked.folder, not asked.without_noise)
    except KeyboardInterrupt:
        raise SystemExit("stopped; all processes have ended") from None
    except FedpressError as exc:
        raise SystemExit(f"error: {exc}") from None


if __name__ == "__main__":
    main()
