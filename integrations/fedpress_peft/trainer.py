"""Local training of a PEFT adapter, and how averages of low-rank factors are made right.

The average of products B_i A_i is not the product of the averages of B_i and of A_i. If all devices
have one A, or one B, it is: `ffa` trains B alone (Sun et al. 2024, arXiv:2403.12313),
`alternating` trains B and A in turn, a round each (Chen et al. 2025, arXiv:2502.15436).
`averaging_error` is the price of `plain`. With the strategy `lora` the server adds the error to
ranks that the devices do not train: `trained_rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from peft import PeftModel
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fedpress_client.torch_trainer import TorchTrainer
from fedpress_client.trainer import Trained, TrainingRequest
from fedpress_compression.tensors import ModelSpec
from fedpress_compression.update import Indices
from fedpress_peft.adapters import AdapterModule, save_adapter
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.model import Model

Averages = Literal["plain", "ffa", "alternating"]
_A, _B = ("lora_A", "lora_embedding_A"), ("lora_B", "lora_embedding_B")


class PeftTrainer(TorchTrainer):
    """Trains the active adapter of a PEFT model: that alone travels.

    `data` yields dicts of tensors as transformers' models take them, `labels` among them;
    `collator` makes a batch of them, such as one of transformers' data collators. The model's own
    `loss` is minimized, by AdamW with `learning_rate` or by what `optimizer` makes.

    `averages`: `plain` trains both factors of LoRA; `ffa` the second alone, the first is sent to
    each device once; `alternating` the second in odd rounds, the first in even ones.

    `trained_rank`: train the first so many ranks of each layer's factors, and send no change of the
    others. Devices may differ in it: what one does not train counts as zero in its update.

    Each device loads the base by itself, from a folder or the hub, and the task's model has its
    digest: a device with another base declines. With `sends_base` the base is part of the task's
    model, as frozen tensors, and goes to each device once.
    """

    def __init__(
        self,
        model: PeftModel,
        data: Dataset[Any],
        *,
        evaluation_data: Dataset[Any] | None = None,
        averages: Averages = "plain",
        trained_rank: int | None = None,
        sends_base: bool = False,
        collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
        learning_rate: float = 1e-3,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        batch_size: int = 8,
        **options: Any,
    ) -> None:
        if averages not in get_args(Averages):
            known = ", ".join(get_args(Averages))
            raise ConfigurationError(f"averages is {averages!r}; known are {known}")
        self.peft_model = model
        module = AdapterModule(model, sends_base=sends_base)
        self._averages = averages
        self._factors = {
            turn: [p for name, p in module.named_parameters() if _is_of(name, kinds)]
            for turn, kinds in (("A", _A), ("B", _B))
        }
        if averages != "plain" and not all(self._factors.values()):
            raise ConfigurationError(
                f"averages is {averages!r}, and the adapter has no factors lora_A and lora_B",
                hint="use LoRA, or plain averages",
            )
        self._trained_rank = trained_rank
        if trained_rank is not None:
            self._check_rank(trained_rank)
        if averages == "ffa":
            for parameter in self._factors["A"]:
                parameter.requires_grad_(False)

        def loaded(dataset: Dataset[Any]) -> DataLoader[Any]:
            return DataLoader(
                dataset,
                batch_size,
                shuffle=dataset is data,
                collate_fn=_Pairs(collator or torch.utils.data.default_collate),
            )

        super().__init__(
            module,
            _loss,
            optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate)),
            loaded(data),
            evaluation_data=None if evaluation_data is None else loaded(evaluation_data),
            batch_size=batch_size,
            **options,
        )

    @classmethod
    def from_transformers(cls, trainer: Any, **options: Any) -> PeftTrainer:
        """Make a device of a `transformers.Trainer` of a PEFT model; `options` as in PeftTrainer.

        It takes over the model, the datasets with their columns and collator, the batch size, the
        epochs, mixed precision, and the optimizer with its settings. A round has no use for the
        rest: learning-rate schedules, callbacks, checkpoints, `compute_loss`. Raises
        ConfigurationError for what would train otherwise than the trainer says.
        """
        args = trainer.args
        unlike = {
            "gradient_accumulation_steps": args.gradient_accumulation_steps != 1,
            "max_steps": args.max_steps > 0,
            "label_smoothing_factor": args.label_smoothing_factor != 0,
            "compute_loss of its own": trainer.compute_loss.__module__ != "transformers.trainer",
        }
        if used := [name for name, is_set in unlike.items() if is_set]:
            raise ConfigurationError(
                f"a device does not take over the transformers.Trainer's {', '.join(used)}",
                hint="set the task's training terms instead (local_steps, gradient_accumulation), "
                "or build PeftTrainer yourself",
            )
        loader = trainer.get_train_dataloader()
        kind, settings = trainer.get_optimizer_cls_and_kwargs(args, trainer.model)
        evaluated = trainer.eval_dataset
        own: dict[str, Any] = {
            "evaluation_data": None
            if evaluated is None
            else trainer.get_eval_dataloader(evaluated).dataset,
            "collator": loader.collate_fn,
            "optimizer": partial(kind, **settings),
            "batch_size": args.per_device_train_batch_size,
            "local_epochs": max(1, round(args.num_train_epochs)),
            "autocast": "bfloat16" if args.bf16 else "float16" if args.fp16 else None,
        }
        return cls(trainer.model, loader.dataset, **{**own, **options})

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        """Train the ranks that this device trains; see `TorchTrainer.train`."""
        if self._trained_rank is not None:
            support = _ranks(model.spec, self._trained_rank)
            if work.support is not None:
                support = np.intersect1d(support, work.support, assume_unique=True)
            work = replace(work, support=support)
        return super().train(model, work)

    def _check_rank(self, rank: int) -> None:
        """Raise ConfigurationError unless every layer has so many ranks."""
        ranks = {
            int(parameter.shape[0 if turn == "A" else 1])
            for turn, parameters in self._factors.items()
            for parameter in parameters
        }
        if not ranks or not isinstance(rank, int) or not 1 <= rank <= min(ranks):
            raise ConfigurationError(
                f"trained_rank is {rank}, and the adapter's layers have the ranks "
                f"{sorted(ranks) or 'of no LoRA'}",
                hint="build it with LoraConfig(r=...) of the task's model, trained_rank at most",
            )

    def _train(self, work: TrainingRequest, spec: ModelSpec) -> Trained:
        with self._turn(work.round):
            return super()._train(work, spec)

    def save(self, model: Model, folder: str) -> None:
        """Write the adapter of a task's model, see `save_adapter`."""
        save_adapter(model, self.peft_model, folder)

    @contextmanager
    def _turn(self, number: int) -> Iterator[None]:
        """Freeze the factor whose turn the round is not."""
        idle = self._factors["A" if number % 2 else "B"] if self._averages == "alternating" else []
        idle = [parameter for parameter in idle if parameter.requires_grad]
        try:
            for parameter in idle:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in idle:
                parameter.requires_grad_(True)


def averaging_error(
    adapters: Sequence[Mapping[str, npt.NDArray[Any]]], weights: Sequence[float] | None = None
) -> float:
    """The relative error of averaging LoRA's factors in the place of their products.

    `adapters` are the tensors of the devices by PEFT's names. The result is the norm of
    mean(B_i A_i) - mean(B_i) mean(A_i), over all layers, in units of the norm of mean(B_i A_i); 0
    for adapters that have one factor in common. Embeddings and convolutions are left out.
    """
    shares = np.ones(len(adapters)) if weights is None else np.asarray(weights, np.float64)
    if not adapters or len(shares) != len(adapters) or not shares.sum() > 0:
        raise ConfigurationError(f"{len(adapters)} adapters and {len(shares)} weights")
    shares = shares / shares.sum()
    error = norm = 0.0
    for name, first in adapters[0].items():
        if not _is_of(name, ("lora_A",)) or first.ndim != 2:
            continue
        other = name.replace("lora_A", "lora_B")
        rows = [
            (each[other].astype(np.float64), each[name].astype(np.float64)) for each in adapters
        ]
        right = sum(share * (b @ a) for share, (b, a) in zip(shares, rows, strict=True))
        mean_b = sum(share * b for share, (b, _) in zip(shares, rows, strict=True))
        mean_a = sum(share * a for share, (_, a) in zip(shares, rows, strict=True))
        error += float(np.square(right - mean_b @ mean_a).sum())
        norm += float(np.square(right).sum())
    return float(np.sqrt(error / norm)) if norm else 0.0


def _ranks(spec: ModelSpec, rank: int) -> Indices:
    """The coordinates of all but the ranks from `rank` up, rising."""
    trained = np.ones(spec.size, bool)
    for name, values in spec.unflatten(np.empty(spec.size, np.float32)).items():
        flags = trained[spec.slices[name]].reshape(values.shape)
        if _is_of(name, _A):
            flags[rank:] = False
        elif _is_of(name, _B):
            flags[:, rank:] = False
    return np.flatnonzero(trained)


class _Pairs:
    """Collates rows to a batch (inputs, labels), of which the inputs have the labels too."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, rows: list[Any]) -> tuple[dict[str, Any], Sized]:
        batch = self._collate(rows)
        if not isinstance(batch, Mapping) or "labels" not in batch:
            raise ConfigurationError(
                "the data yields no labels, from which the model computes its loss",
                hint="have each row a dict with labels, or give a collator that adds them",
            )
        return dict(batch), cast(Sized, batch["labels"])


def _loss(outputs: Any, labels: Any) -> torch.Tensor:
    loss: torch.Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs.loss
    return loss


def _is_of(name: str, kinds: Iterable[str]) -> bool:
    return not set(kinds).isdisjoint(name.split("."))
