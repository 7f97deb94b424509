"""Federated LoRA: a small transformer, three devices and a server, on this machine.

    python lora.py                      a whole run, on the text below
    python lora.py --data FILE          the same on a text of yours
    python lora.py --task float32.json  the same without compression, to compare
    fedpress client join URL --app lora:trainer     one device of it, elsewhere; see README.md

The first quarter of the text trains the base, which stands for the checkpoint that you would take
from a hub. The devices have the rest, a part each, and train adapters.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from fedpress import Client
from fedpress.demo.fleet import Fleet
from fedpress.operator import Operator
from fedpress.peft import PeftTrainer
from fedpress.task_file import task_config

Averages = Literal["plain", "ffa", "alternating", "exact"]
TASK, DEVICES, CONTEXT, RANK = "adapters", 3, 32, 4
TASK_FILE = Path(__file__).with_name("task.json")
TEXT = """
Tell me not, in mournful numbers, life is but an empty dream! For the soul is dead that slumbers,
and things are not what they seem. Life is real! Life is earnest! And the grave is not its goal;
dust thou art, to dust returnest, was not spoken of the soul. Not enjoyment, and not sorrow, is our
destined end or way; but to act, that each to-morrow find us farther than to-day. Art is long, and
Time is fleeting, and our hearts, though stout and brave, still, like muffled drums, are beating
funeral marches to the grave. In the world's broad field of battle, in the bivouac of Life, be not
like dumb, driven cattle! Be a hero in the strife! Trust no Future, howe'er pleasant! Let the dead
Past bury its dead! Act, act in the living Present! Heart within, and God o'erhead! Lives of great
men all remind us we can make our lives sublime, and, departing, leave behind us footprints on the
sands of time; footprints, that perhaps another, sailing o'er life's solemn main, a forlorn and
shipwrecked brother, seeing, shall take heart again. Let us, then, be up and doing, with a heart
for any fate; still achieving, still pursuing, learn to labor and to wait.
"""  # Henry Wadsworth Longfellow, A Psalm of Life, 1838


class Windows(torch.utils.data.Dataset[Any]):
    """Every window of CONTEXT characters, as transformers' models take them."""

    def __init__(self, text: str) -> None:
        self.codes = torch.tensor([min(ord(each), 127) for each in text])

    def __len__(self) -> int:
        return max(1, (len(self.codes) - 1) // CONTEXT)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        window = self.codes[index * CONTEXT : (index + 1) * CONTEXT]
        return {"input_ids": window, "labels": window}


def parts(text: str) -> list[str]:
    """The text of the base, and those of the devices."""
    size = len(text) // (DEVICES + 1)
    if size < 2 * CONTEXT:
        raise SystemExit(f"a text of {len(text)} characters; {8 * CONTEXT} are needed at least")
    return [text[number * size : (number + 1) * size] for number in range(DEVICES + 1)]


def train_base(text: str, folder: Path, steps: int) -> None:
    """Train a transformer of one's own and save it as any checkpoint is."""
    torch.manual_seed(1)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "vocab_size": 128}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    windows = Windows(text)
    loader = torch.utils.data.DataLoader(windows, 16, shuffle=True)
    while steps > 0:
        for batch in loader:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            steps -= 1
    model.save_pretrained(folder)


def trainer(
    base: str | Path = "", text: str = "", averages: Averages = "plain", rank: int = RANK
) -> PeftTrainer:
    """One device: the base from its folder, an adapter around it, and the device's own text.

    With `exact` averages the adapter has as many ranks again, for the server.
    """
    is_exact = averages == "exact"
    model = GPT2LMHeadModel.from_pretrained(base or os.environ["LORA_BASE"])
    torch.manual_seed(2)  # so that all begin with the same adapter
    ranks = 2 * rank if is_exact else rank
    config = LoraConfig(
        r=ranks, lora_alpha=2 * ranks, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True
    )
    adapter = get_peft_model(model, config)
    data = Windows(text or Path(os.environ["LORA_TEXT"]).read_text(errors="replace"))
    return PeftTrainer(
        adapter,
        data,
        evaluation_data=data,
        averages="plain" if averages == "exact" else averages,
        trained_rank=rank if is_exact else None,
        learning_rate=5e-3,
    )


def join(url: str, device: PeftTrainer, state: Path, token: str) -> None:
    with Client(url, device, state_dir=state, token=token) as client:
        client.run()


def measured(operator: Operator, number: int, trainers: list[PeftTrainer]) -> dict[str, Any]:
    """Print a round, and return its entry in the history."""
    status = operator.round(TASK, number)
    model = operator.model(status.model or "")
    losses = [each.metrics["loss"] for each in map(lambda t: t.evaluate(model), trainers) if each]
    loss, half = sum(losses) / len(losses), 2 * model.spec.size * status.included
    print(
        f"round {number}: loss {loss:.3f}, "
        f"up {status.upload_bytes:,} bytes (adapters in float16: {half:,}), "
        f"down {status.download_bytes:,}",
        flush=True,
    )
    up, down = status.upload_bytes, status.download_bytes
    return {"round": number, "loss": loss, "upload_bytes": up, "download_bytes": down}


def run(
    text: str, folder: Path, rounds: int, averages: Averages, base_steps: int, task: Path
) -> bool:
    """Federate, write adapter and history to `folder`, and check that plain PEFT computes the
    same."""
    base_text, *own = parts(text)
    train_base(base_text, folder / "base", base_steps)
    trainers = [trainer(folder / "base", each, averages) for each in own]
    with (
        tempfile.TemporaryDirectory() as state,
        Fleet(Path(state), folder) as fleet,
        fleet.start_server() as operator,
    ):
        first = operator.register_model(trainers[0].initial_model())
        config = task_config(task, first)
        if averages == "exact":
            config = config.model_copy(update={"strategy": {"id": "lora", "rank": RANK}})
        operator.create_task(config.model_copy(update={"rounds": rounds}))
        token = operator.create_token(uses=DEVICES, note="example")
        threads = [
            threading.Thread(
                target=join, args=(fleet.url, each, Path(state) / name, token), daemon=True
            )
            for name, each in zip("abc", trainers, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        history = [measured(operator, number, trainers) for number in range(1, rounds + 1)]
        published = operator.model(operator.task(TASK).model)
    document = {"tasks": {folder.name: {"rounds": history}}}
    (folder / "history.json").write_text(json.dumps(document, indent=2) + "\n")
    trainers[0].save(published, str(folder / "adapter"))
    trainers[0].evaluate(published)  # which loads it
    loaded = PeftModel.from_pretrained(
        GPT2LMHeadModel.from_pretrained(folder / "base"), str(folder / "adapter")
    ).eval()
    codes = Windows(text)[0]["input_ids"][None]
    with torch.no_grad():
        ours = trainers[0].peft_model.eval()(input_ids=codes).logits
        theirs = loaded(input_ids=codes).logits
    is_same = torch.equal(ours, theirs)
    print(f"{folder / 'adapter'} in plain PEFT: logits {'equal' if is_same else 'DIFFER'}")
    return is_same


def main() -> int:
    # From between PEFT and transformers.
    warnings.filterwarnings("ignore", "`is_.*` is deprecated", FutureWarning)
    parser = argparse.ArgumentParser(description="Federated LoRA on this machine.")
    parser.add_argument("--data", type=Path, help="a text; by default a poem of 1,400 characters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--averages", choices=get_args(Averages), default="plain")
    parser.add_argument("--task", type=Path, default=TASK_FILE, help="a task file")
    parser.add_argument("--base-steps", type=int, default=200, help="steps that train the base")
    parser.add_argument("--out", type=Path, default=Path("lora-out"))
    asked = parser.parse_args()
    text = TEXT if asked.data is None else asked.data.read_text(errors="replace")
    is_same = run(text, asked.out, asked.rounds, asked.averages, asked.base_steps, asked.task)
    return 0 if is_same else 1


if __name__ == "__main__":
    raise SystemExit(main())
