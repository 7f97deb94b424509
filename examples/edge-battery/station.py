"""Weather stations on batteries and a cellular link learn together, when they can afford to.

    python station.py model model.safetensors          the model that the task begins with
    python station.py battery power --percent 12       a made-up battery, in the place of a real one
    python station.py run URL --number 1 --state-dir station-1 --power power

See README.md for the whole run.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedpress import (
    Bandwidth,
    Client,
    ClientWaiting,
    Evaluation,
    Event,
    Model,
    ParticipationPostponed,
    Progress,
    Trained,
    TrainingRequest,
    UpdateTrained,
)
from fedpress.conditions import Battery, Condition, Hours, Interface

Array = npt.NDArray[np.float32]

FEATURES, HIDDEN, CLASSES = 24, 64, 4
"""Readings of the last hours; tomorrow is dry, wet, stormy or foggy."""
UPLOAD_RATE, DOWNLOAD_RATE = 16_000, 64_000
"""Bytes a second that training may take of the link."""
DISK = 2_000_000
"""Bytes of the flash that training may fill: some thirty times the model."""


MIN_PERCENT = 40
"""Of the battery's charge, which training leaves to the station's own work."""
NETWORK = Path("/proc/net")


class StationTrainer:
    """A perceptron of one hidden layer, by mini-batch gradient descent in numpy."""

    honours = frozenset({"proximal", "control"})

    def __init__(self, inputs: Array, labels: npt.NDArray[np.int64]) -> None:
        split = len(inputs) - len(inputs) // 5
        self.inputs, self.labels = inputs[:split], labels[:split]
        self.test_inputs, self.test_labels = inputs[split:], labels[split:]

    def train(self, model: Model, request: TrainingRequest) -> Trained:
        terms, flat = request.terms, model.parameters.copy()
        tensors = model.spec.unflatten(flat)  # views: a step changes `flat`
        rng = np.random.default_rng(request.seed)
        size = terms.batch_size or 32
        epochs = terms.local_epochs or 1
        for epoch in range(epochs):
            order = rng.permutation(len(self.inputs))
            for begin in range(0, len(order), size):
                rows = order[begin : begin + size]
                gradient = slope(tensors, self.inputs[rows], self.labels[rows])
                step = model.spec.flatten(gradient) + request.added(model, flat)
                flat -= (terms.learning_rate or 0.2) * step
            request.progress(epoch + 1, epochs)
        return Trained(flat, len(self.inputs))

    def evaluate(self, model: Model) -> Evaluation:
        _, scores = forward(model.tensors(), self.test_inputs)
        accuracy = float((scores.argmax(axis=1) == self.test_labels).mean())
        return Evaluation(len(self.test_labels), {"accuracy": accuracy})


def forward(tensors: dict[str, Array], inputs: Array) -> tuple[Array, Array]:
    """The hidden layer and the shares of the classes, each a row for every input."""
    hidden = np.maximum(inputs @ tensors["weight"] + tensors["bias"], 0)
    scores = hidden @ tensors["out_weight"] + tensors["out_bias"]
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, powers / powers.sum(axis=1, keepdims=True)


def slope(
    tensors: dict[str, Array], inputs: Array, labels: npt.NDArray[np.int64]
) -> dict[str, Array]:
    """The gradient of the mean cross entropy, by tensor."""
    hidden, error = forward(tensors, inputs)
    error[np.arange(len(labels)), labels] -= 1
    error /= np.float32(len(labels))
    back = (error @ tensors["out_weight"].T) * (hidden > 0)
    return {
        "weight": inputs.T @ back,
        "bias": back.sum(axis=0),
        "out_weight": hidden.T @ error,
        "out_bias": error.sum(axis=0),
    }


def initial_model() -> Model:
    rng = np.random.default_rng(0)
    shapes = {"weight": (FEATURES, HIDDEN), "out_weight": (HIDDEN, CLASSES)}
    tensors = {
        name: rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    tensors |= {"bias": np.zeros(HIDDEN, np.float32), "out_bias": np.zeros(CLASSES, np.float32)}
    return Model.from_tensors(tensors)


def readings(number: int, examples: int = 600) -> tuple[Array, npt.NDArray[np.int64]]:
    """Made-up readings of one station: its weather is its own, what follows from it is not."""
    common = np.random.default_rng(7)
    centres = common.normal(size=(CLASSES, FEATURES))
    rng = np.random.default_rng(number)
    labels = rng.choice(CLASSES, examples, p=rng.dirichlet(np.full(CLASSES, 2.0)))
    inputs = centres[labels] + rng.normal(scale=1.2, size=(examples, FEATURES))
    return inputs.astype(np.float32), labels


def write_battery(folder: Path, percent: float) -> None:
    """A folder as Linux has it under /sys/class/power_supply; `percent` is 0 .. 100."""
    battery = folder / "BAT0"
    battery.mkdir(parents=True, exist_ok=True)
    values = {"type": "Battery", "status": "Discharging", "capacity": int(percent)}
    for name, value in values.items():
        write(battery / name, f"{value}\n")


def write_route(folder: Path, interface: str) -> None:
    """A routing table as Linux has it in /proc/net, whose default route is by `interface`."""
    folder.mkdir(parents=True, exist_ok=True)
    names = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
    write(folder / "route", f"{names}\n{interface} 00000000 0101A8C0 0003 0 0 100 00000000 0 0 0\n")


def write(path: Path, text: str) -> None:
    """Replace a file at once: a station may read it meanwhile."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def conditions(
    power: Path, ask_again: float, hours: list[str], network: Path = NETWORK
) -> list[Condition]:
    """The cheapest first: the first that refuses decides."""
    asked: list[Condition] = [Hours(*hours)] if hours else []
    return [
        *asked,
        Battery(min_percent=MIN_PERCENT, seconds=ask_again, folder=power),
        Interface(avoid=("ppp*",), seconds=ask_again, folder=network),
    ]


def show_event(event: Event) -> None:
    match event:
        case ParticipationPostponed(reason=reason, seconds=seconds):
            print(f"not now: {reason}; asking again in {seconds:.0f} s", flush=True)
        case UpdateTrained(body_bytes=num_bytes):
            print(f"round {event.round}: {num_bytes} bytes to upload", flush=True)
        case ClientWaiting():
            pass
        case _:
            print(event.kind, flush=True)


def show_progress(progress: Progress) -> None:
    if progress.is_done and progress.step == "download":
        print(f"  {progress.done:.0f} bytes downloaded", flush=True)


def run(arguments: argparse.Namespace) -> None:
    client = Client(
        arguments.url,
        StationTrainer(*readings(arguments.number)),
        state_dir=arguments.state_dir,
        token=os.environ.get("FEDPRESS_TOKEN"),
        should_participate=conditions(
            arguments.power, arguments.ask_again, arguments.hours, arguments.network
        ),
        bandwidth=Bandwidth(upload=UPLOAD_RATE, download=DOWNLOAD_RATE),
        max_disk_bytes=DISK,
        on_event=show_event,
        on_progress=show_progress,
    )
    with client.start() as running:  # the station's own work would stand here
        summary = running.join()
    scores = forward(client.model().tensors(), readings(arguments.number)[0])[1]
    print(f"{summary.included} updates included; tomorrow is of class {scores[-1].argmax()}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A weather station, and the files of its example.")
    commands = parser.add_subparsers(dest="command", required=True)
    model = commands.add_parser("model")
    model.add_argument("path", type=Path)
    battery = commands.add_parser("battery")
    battery.add_argument("folder", type=Path)
    battery.add_argument("--percent", type=int, default=80)
    station = commands.add_parser("run")
    station.add_argument("url")
    station.add_argument("--number", type=int, default=1)
    station.add_argument("--state-dir", type=Path, required=True)
    station.add_argument("--power", type=Path, default=Path("/sys/class/power_supply"))
    station.add_argument("--network", type=Path, default=NETWORK)
    station.add_argument("--ask-again", type=float, default=60.0)
    station.add_argument("--hours", action="append", default=[])
    arguments = parser.parse_args()
    if arguments.command == "model":
        arguments.path.write_bytes(initial_model().to_bytes())
    elif arguments.command == "battery":
        write_battery(arguments.folder, arguments.percent)
    else:
        run(arguments)


if __name__ == "__main__":
    main()
