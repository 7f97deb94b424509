"""A task that diverges: 0.01 % top-k with error feedback and a learning rate far too high.

A server and its devices on this machine; prints NMSE, residual, loss and the signs of divergence of
each round and, with Chromium and the browser extra, saves the console's page of the task as a
picture, 1000 px wide.

    python benchmarks/diverging_run.py --picture docs/images/diverging-run.png
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
from io import BytesIO
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from fedpress.cli.tables import table
from fedpress.demo import digits
from fedpress.demo.fleet import Fleet
from fedpress.operator import Operator
from fedpress_client import Client
from fedpress_client.torch_trainer import TorchTrainer
from fedpress_protocols.messages import TaskConfig

TASK = "diverging"
CLIENTS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=1.5)
    parser.add_argument("--fraction", type=float, default=0.0001)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fedpress-diverging-") as folder:
        place = Path(folder)
        with Fleet(place, place) as fleet, fleet.start_server() as operator:
            images = digits.split(0, CLIENTS)[1]
            model = digits.trainer(0, images[0]).initial_model()
            operator.register_model(model)
            operator.create_task(configuration(model.digest, arguments))
            federate(operator, fleet.url, place)
            report(operator)
            if arguments.picture is not None:
                viewer = operator.create_operator("viewer", note="picture")
                take_picture(fleet.url, viewer.token, arguments.picture)


def configuration(model: str, arguments: argparse.Namespace) -> TaskConfig:
    top_k = {"id": "topk", "fraction": arguments.fraction}
    compressor = {"id": "error_feedback", "inner": top_k}
    return TaskConfig.model_validate(
        {
            "task": TASK,
            "model": model,
            "rounds": arguments.rounds,
            "cohort": {"size": CLIENTS, "minimum": CLIENTS},
            "profiles": [{"name": "device", "compressor": compressor}],
            "training": {
                "local_epochs": 1,
                "batch_size": 16,
                "learning_rate": arguments.learning_rate,
            },
            "seed": 0,
        }
    )


def trainer(images: digits.Images) -> TorchTrainer:
    """The demo's, which evaluates each model on its own images besides."""
    data = TensorDataset(torch.from_numpy(images.pixels), torch.from_numpy(images.labels))
    return TorchTrainer(
        digits.network(0),
        torch.nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data,
        evaluation_data=data,
    )


def federate(operator: Operator, url: str, folder: Path) -> None:
    """Run the task to its end, each device in a thread."""
    token = operator.create_token(uses=CLIENTS)
    clients = [
        Client(
            url,
            trainer(images),
            state_dir=folder / f"device-{index}",
            task=TASK,
            token=token,
            seed=index,
        )
        for index, images in enumerate(digits.split(0, CLIENTS)[1])
    ]
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def report(operator: Operator) -> None:
    rows = []
    for each in operator.rounds(TASK):
        figures, loss = each.figures, each.metrics.get("loss")
        rows.append(
            (
                f"{each.round}.{each.attempt}",
                each.state,
                "-" if figures is None else f"{figures.nmse:.3f}",
                "-" if figures is None else f"{figures.residual:.2f}",
                "-" if figures is None else f"{figures.norm:.3g}",
                "-" if loss is None else f"{loss:.3g}",
                "; ".join(each.warnings.values()),
            )
        )
    headings = ("round", "state", "NMSE", "residual", "norm", "loss", "signs of divergence")
    print("\n".join(table(headings, rows)))


def take_picture(url: str, token: str, path: Path) -> None:
    """The page of the task in Chromium."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    path.parent.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1000, "height": 700}, color_scheme="light")
        page.goto(f"{url}/console/login")
        page.fill("input[name=token]", token)
        page.press("input[name=token]", "Enter")
        page.wait_for_url("**/console")
        page.goto(f"{url}/console/tasks/{TASK}")
        picture = Image.open(BytesIO(page.screenshot(full_page=True)))
        browser.close()
    picture.convert("RGB").quantize(64).save(path, optimize=True)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
