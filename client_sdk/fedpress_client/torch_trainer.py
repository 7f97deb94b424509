"""Local SGD in PyTorch on any module, optimizer and dataset."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fedpress_client.trainer import Evaluation, Trained, TrainingRequest
from fedpress_compression.tensors import TRAINED_DTYPES, ModelSpec, TensorSpec
from fedpress_protocols.errors import ConfigurationError, InvalidUpdate, MissingExtra
from fedpress_protocols.messages import MAX_CLASSES
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms

try:
    import torch
    from torch import nn
    from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset
except ModuleNotFoundError as exc:
    raise MissingExtra(
        "TorchTrainer needs PyTorch",
        hint="pip install fedpress[torch]; a trainer of your own, in numpy say, works without it",
    ) from exc

Loss = Callable[[Any, Any], torch.Tensor]
Metrics = Callable[[Any, Any], Mapping[str, float]]
Data = Dataset[Any] | DataLoader[Any]
Autocast = Literal["bfloat16", "float16"]
Batch = tuple[Any, Any]

_global_generators = threading.Lock()
"""Torch's own generators are the process's: two trainings at a time would draw from one stream."""


class TorchTrainer:
    """Trains `model` as its state dict stands: that is what travels.

    Tensors of float32, float16 and bfloat16 are trained, BatchNorm's means and variances among
    them; the others, its counter for one, are carried, and so are parameters that `requires_grad`
    says are frozen. Tied parameters travel once, under the first of their names. Float64 becomes
    float32, with a warning, in `model` and in what `data` yields.

    What the task's model says is trained or frozen rules over `requires_grad`: what it freezes is
    not trained here, and what it trains and the module freezes is sent unchanged, with a warning.
    A task whose model has all names of tied parameters is trained as well.

    `loss(outputs, targets)` is a mean over the batch. `optimizer` makes a fresh one each time, as
    in `lambda p: torch.optim.SGD(p, lr=0.1)`. `data` yields pairs (inputs, targets); inputs that
    are a dict go to the model by name, a tuple or list by position. A DataLoader stays as it is but
    for the batch size, where the plan says another. An update counts for the examples of an epoch,
    as the DataLoader's sampler draws them, at most for as many as the dataset has.

    The plan's terms override `batch_size`, `local_epochs` and the optimizer's learning rate. A
    batch is what passes through the model at once; with `gradient_accumulation` g an optimizer
    step takes the mean over g batches, the last one of an epoch perhaps over fewer.

    `device` "auto" is a GPU if there is one. `metrics(outputs, targets)` gives means over a batch;
    without it accuracy is measured where outputs are scores of two classes or more. There the right
    ones are counted by class too, named by its number, if targets name 1000 classes at most, and
    labels that the loss ignores, which are below 0 or its `ignore_index`, count in no measure. It
    reports the loss over all of `data`, as the module computes it in evaluation mode.

    With `autocast` the module and the loss compute in that type where `torch.autocast` has it so,
    in training and evaluation; parameters, gradients and the update stay as they are, float32 as a
    rule. With "float16" the loss is scaled (`torch.amp.GradScaler`, new in each training): a step
    whose gradients overflow is skipped and not counted, and InvalidUpdate says if all were.
    """

    honours = frozenset({"proximal", "control", "full_batch", "restricted", "steps", "loss"})

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        data: Data,
        *,
        evaluation_data: Data | None = None,
        device: str | torch.device = "cpu",
        batch_size: int = 32,
        local_epochs: int = 1,
        metrics: Metrics | None = None,
        autocast: Autocast | None = None,
    ) -> None:
        _check_kinds(model, loss, optimizer, data, evaluation_data)
        for name, number in {"batch_size": batch_size, "local_epochs": local_epochs}.items():
            if not isinstance(number, int) or number < 1:
                raise ConfigurationError(f"{name} is {number!r}, expected a whole number from 1 on")
        self.device = _device(device)
        _check_autocast(autocast, self.device, model)
        self._autocast = None if autocast is None else getattr(torch, autocast)
        self._told_of_float64 = _narrowed(model)
        self.model = model.to(self.device)
        self._loss, self._optimizer, self._metrics = loss, optimizer, metrics
        self._data, self._evaluation_data = data, evaluation_data
        self._batch_size, self._local_epochs = batch_size, local_epochs
        self._warned = False
        _spec_of(model)  # which refuses what cannot travel

    @property
    def spec(self) -> ModelSpec:
        """The tensors of `initial_model`, as the module stands."""
        return _spec_of(self.model)

    def initial_model(self) -> Model:
        """The module's present values, for an operator to begin a task with."""
        arrays, spec = _arrays(self.model), self.spec
        buffers = {t.name: arrays[t.name] for t in spec.tensors if not t.is_trained}
        return Model(spec, spec.flatten(arrays), buffers)

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        """Local SGD from `model`; torch's global generators are as before when it returns."""
        self._load(model)
        self._warn_of_frozen(model.spec)
        cuda = [self.device] if self.device.type == "cuda" else []
        with _global_generators, torch.random.fork_rng(devices=cuda):
            torch.manual_seed(work.seed)
            report = self._measured(work)
            torch.manual_seed(work.seed)
            with _frozen(self.model, model.spec):
                trained = self._train(work, model.spec)
        trained = replace(trained, report={**trained.report, **report})
        if work.support is None:
            return trained
        parameters = model.parameters.copy()
        parameters[work.support] = trained.parameters[work.support]
        return replace(trained, parameters=parameters)

    def evaluate(self, model: Model) -> Evaluation | None:
        """Mean loss, and accuracy or what `metrics` gives; None without evaluation data."""
        if self._evaluation_data is None:
            return None
        self._load(model)
        return self._evaluation(self._evaluation_data)

    def _evaluation(self, data: Data, requested: int | None = None) -> Evaluation | None:
        self.model.eval()
        totals: dict[str, float] = {}
        classes: Counter[int] = Counter()
        right: Counter[int] = Counter()
        count = 0
        loader = _loader(data, self._batch_size, generator=None, requested=requested)
        with torch.no_grad():
            for inputs, targets in self._batches(loader):
                outputs, loss = self._computed(inputs, targets)
                labelled = self._labelled(outputs, targets)
                size = _size(targets) if labelled is None else int(labelled.sum())
                if not size:
                    continue
                measured = {"loss": float(loss)}
                if labelled is not None:
                    labels = targets[labelled]
                    is_right = outputs[labelled].argmax(dim=1) == labels
                    classes.update(labels.int().tolist())
                    right.update(labels[is_right].int().tolist())
                    measured["accuracy"] = float(is_right.float().mean())
                if self._metrics is not None:
                    measured = {"loss": measured["loss"], **self._metrics(outputs, targets)}
                for name, value in measured.items():
                    totals[name] = totals.get(name, 0.0) + float(value) * size
                count += size
        if not count:
            return None
        metrics = {name: total / count for name, total in totals.items()}
        if len(classes) > MAX_CLASSES:
            return Evaluation(count, metrics)
        counts = {str(label): (n, right[label]) for label, n in sorted(classes.items())}
        return Evaluation(count, metrics, counts)

    def _labelled(self, outputs: Any, targets: Any) -> torch.Tensor | None:
        """Which examples [n] of a batch have a label that counts; None if these are not scores
        [n, classes] and the numbers [n] of classes. One column is a logit, or a regression."""
        if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
            return None
        is_scores = outputs.ndim == 2 and outputs.shape[1] > 1 and outputs.is_floating_point()
        if not is_scores or targets.ndim != 1 or targets.is_floating_point():
            return None
        ignored = int(getattr(self._loss, "ignore_index", -100))
        return (targets >= 0) & (targets != ignored)

    def _measured(self, work: TrainingRequest) -> dict[str, float]:
        """The report on the model as it came."""
        if "loss" not in work.report:
            return {}
        measured = self._evaluation(self._data, work.terms.batch_size)
        return {} if measured is None else {"loss": measured.metrics["loss"]}

    def _train(self, work: TrainingRequest, spec: ModelSpec) -> Trained:
        terms = work.terms
        if work.full_batch:
            whole = {"local_epochs": 1, "local_steps": None, "gradient_accumulation": sys.maxsize}
            terms = terms.model_copy(update=whole)
        generator = torch.Generator().manual_seed(work.seed)
        loader = _loader(
            self._data, self._batch_size, generator=generator, requested=terms.batch_size
        )
        moving = [p for p in self.model.parameters() if p.requires_grad]
        if not moving:
            raise ConfigurationError(
                "every parameter is frozen, by the module or by the task's model, so there is "
                "nothing to train",
                hint="set requires_grad where training is due",
            )
        optimizer = self._optimizer(moving)
        if terms.learning_rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = terms.learning_rate
        restriction = _Held(self.model, work, spec)
        added = _Added(self.model, work, spec)
        scaler = torch.amp.GradScaler(self.device.type, enabled=self._autocast == torch.float16)
        self.model.train()
        # Summed where it is computed: reading it each step would wait for the device.
        total_loss = torch.zeros((), device=self.device)
        total, steps, tried = 0, 0, 0
        first_epoch: list[int] = []
        due = self._num_steps(loader, terms)
        for epoch, batches in self._steps(loader, terms):
            sizes = [_size(targets) for _, targets in batches]
            size = sum(sizes)
            optimizer.zero_grad()
            total_loss += self._backward(batches, scaler) * size
            scaler.unscale_(optimizer)
            added.to_gradients()
            restriction.mask_gradients()
            scaler.step(optimizer)
            restriction.restore()
            scale = scaler.get_scale()
            scaler.update()
            steps += scaler.get_scale() >= scale  # it falls where a step was skipped
            tried += 1
            work.progress(tried, due)
            total += size
            if epoch == 0:
                first_epoch += sizes
        if not total:
            raise _nothing_drawn(loader)
        if not steps:
            raise InvalidUpdate(
                f"gradients overflow in float16 or are NaN in all {tried} steps",
                hint="set autocast to bfloat16, or lower the learning rate",
            )
        num_examples = max(1, _num_examples(loader, first_epoch))
        arrays = _arrays(self.model, {tensor.name for tensor in spec.trained})
        metrics = {"loss": float(total_loss) / total}
        return Trained(spec.flatten(arrays), num_examples, metrics, {"steps": steps})

    def _backward(self, batches: list[Batch], scaler: torch.amp.GradScaler) -> torch.Tensor:
        """Set the gradients of the mean loss over all examples of `batches`; returns that mean."""
        total = torch.zeros((), device=self.device)
        for loss in self._shares(batches):
            scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def _shares(self, batches: list[Batch]) -> Iterator[torch.Tensor]:
        """The part of each batch in the mean loss over all examples."""
        size = sum(_size(targets) for _, targets in batches)
        for inputs, targets in batches:
            yield self._computed(inputs, targets)[1] * (_size(targets) / size)

    def _computed(self, inputs: Any, targets: Any) -> tuple[Any, torch.Tensor]:
        """The module's outputs and the loss, in the type of `autocast`."""
        kind = self._autocast
        with nullcontext() if kind is None else torch.autocast(self.device.type, kind):
            outputs = _forward(self.model, inputs)
            return outputs, self._loss(outputs, targets)

    def _num_steps(self, loader: DataLoader[Any], terms: TrainingTerms) -> int | None:
        """Optimizer steps of a training; None where the data do not say how many they are."""
        if terms.local_steps is not None:
            return terms.local_steps
        batches = _length(loader)
        if batches is None:
            return None
        return (terms.local_epochs or self._local_epochs) * -(
            -batches // terms.gradient_accumulation
        )

    def _steps(
        self, loader: DataLoader[Any], terms: TrainingTerms
    ) -> Iterator[tuple[int, list[Batch]]]:
        """The epoch and the batches of each optimizer step; a step does not span two epochs."""
        epochs = terms.local_epochs or self._local_epochs
        remaining = terms.local_steps
        epoch = 0
        while remaining is not None or epoch < epochs:
            group: list[Batch] = []
            is_empty = True
            for batch in self._batches(loader):
                is_empty = False
                group.append(batch)
                if len(group) == terms.gradient_accumulation:
                    yield epoch, group
                    group = []
                    if remaining is not None and (remaining := remaining - 1) == 0:
                        return
            if group:
                yield epoch, group
                if remaining is not None and (remaining := remaining - 1) == 0:
                    return
            if is_empty:
                return
            epoch += 1

    def _batches(self, loader: DataLoader[Any]) -> Iterator[Batch]:
        for batch in loader:
            if not isinstance(batch, Sequence) or len(batch) != 2:
                raise ConfigurationError(
                    f"the data yields a {type(batch).__name__} where (inputs, targets) is due"
                )
            inputs, targets = (self._moved(part) for part in batch)
            yield inputs, targets

    def _moved(self, value: Any) -> Any:
        """`value` on the device, float64 as float32: the module has no parameters of float64."""
        if isinstance(value, torch.Tensor):
            if value.dtype != torch.float64:
                return value.to(self.device)
            if not self._told_of_float64:
                self._told_of_float64 = True
                warnings.warn(
                    "the data yields float64, which becomes float32 like the module's parameters; "
                    "cast it to say so yourself: numpy.float32(array), or tensor.float()",
                    stacklevel=2,
                )
            return value.to(self.device, torch.float32)
        if isinstance(value, Mapping):
            return {name: self._moved(item) for name, item in value.items()}
        if isinstance(value, tuple | list):
            items = [self._moved(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def _load(self, model: Model) -> None:
        ties = _ties(self.model)
        difference = _difference(_spec_of(self.model, every_name=True), model.spec, ties)
        if difference:
            raise ConfigurationError(
                f"the task's model is not this one: {difference}",
                hint="build the very model that the task was started with",
            )
        tensors = {
            name: torch.from_numpy(np.array(array)) for name, array in model.tensors().items()
        }
        for names in ties:
            value = next(tensors[name] for name in names if name in tensors)
            tensors |= {name: value for name in names if name not in tensors}
        self.model.load_state_dict(tensors)

    def _warn_of_frozen(self, spec: ModelSpec) -> None:
        """Warn, once, of parameters that the task trains and the module does not."""
        frozen = _frozen_names(self.model)
        names = [tensor.name for tensor in spec.trained if tensor.name in frozen]
        if names and not self._warned:
            self._warned = True
            warnings.warn(
                f"the task's model trains {len(names)} parameters that the module freezes, "
                f"{names[0]!r} among them; their updates are zero, and some compressors change "
                "them all the same. Begin a task with this trainer's initial_model(), which "
                "says that they are frozen, or set requires_grad",
                stacklevel=3,
            )


class _Added:
    """The term that a strategy adds to the gradients of the loss, see `TrainingRequest.added`."""

    def __init__(self, model: nn.Module, work: TrainingRequest, spec: ModelSpec) -> None:
        self._proximal = work.proximal
        self._rows: list[tuple[nn.Parameter, torch.Tensor | None, torch.Tensor | None]] = []
        if not work.proximal and work.correction is None:
            return
        parts = {} if work.correction is None else spec.unflatten(work.correction)
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        for parameter, tied in names.items():
            values = next((parts[name] for name in tied if name in parts), None)
            part = None if values is None else torch.tensor(values).to(parameter)
            start = parameter.detach().clone() if work.proximal else None
            self._rows.append((parameter, start, part))

    def to_gradients(self) -> None:
        with torch.no_grad():
            for parameter, start, part in self._rows:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
                if start is not None:
                    parameter.grad.add_(parameter - start, alpha=self._proximal)
                if part is not None:
                    parameter.grad.add_(part)


class _Held:
    """The values outside the support, which no step may move, whatever the optimizer keeps of
    earlier ones or takes off by decay. Tied parameters move where all their supports do."""

    def __init__(self, model: nn.Module, work: TrainingRequest, spec: ModelSpec) -> None:
        self._held: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []
        if work.support is None:
            return
        frozen: dict[nn.Parameter, torch.Tensor] = {}
        trains = work.trains(spec)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in trains:
                outside = torch.from_numpy(~trains[name]).to(parameter.device)
                frozen[parameter] = outside | frozen.get(parameter, outside)
        self._held = [(p, outside, p.detach().clone()) for p, outside in frozen.items()]

    def mask_gradients(self) -> None:
        """So that an optimizer's averages and norms are of the support's gradients alone."""
        for parameter, outside, _ in self._held:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad.masked_fill_(outside, 0)

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, outside, before in self._held:
                parameter.copy_(torch.where(outside, before, parameter))


def _check_kinds(model: Any, loss: Any, optimizer: Any, data: Any, evaluation_data: Any) -> None:
    """Raise ConfigurationError for what `TorchTrainer` could not work with."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model is a {_kind(model)}, expected a torch.nn.Module")
    if not callable(loss):
        raise ConfigurationError(
            f"loss is a {_kind(loss)}, expected a function of outputs and targets"
        )
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise ConfigurationError(
            f"optimizer is a {_kind(optimizer)}, expected a function that makes one",
            hint="write optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
        )
    for name, each in {"data": data, "evaluation_data": evaluation_data}.items():
        if each is None and name == "evaluation_data":
            continue
        if not hasattr(each, "__getitem__") and not hasattr(each, "__iter__"):
            raise ConfigurationError(f"{name} is a {_kind(each)}, expected a Dataset or DataLoader")


def _kind(value: Any) -> str:
    return type(value).__name__


def _device(requested: str | torch.device) -> torch.device:
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(requested)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as exc:
        reason = str(exc).partition("\n")[0]
        raise ConfigurationError(
            f"device {str(requested)!r} cannot be used: {reason}",
            hint='"auto" takes a GPU if there is one, else the CPU',
        ) from exc
    return device


def _check_autocast(autocast: str | None, device: torch.device, model: nn.Module) -> None:
    """Raise ConfigurationError unless modules on `device` can be trained with `autocast`."""
    if autocast is None:
        return
    if autocast not in get_args(Autocast):
        known = " or ".join(get_args(Autocast))
        raise ConfigurationError(f"autocast is {autocast!r}, not {known}")
    if not torch.amp.is_autocast_available(device.type):
        raise ConfigurationError(f"torch has no autocast on {device.type}; leave it out")
    halves = (n for n, p in model.named_parameters() if p.requires_grad and p.dtype is torch.half)
    if autocast == "float16" and (name := next(halves, None)):
        raise ConfigurationError(
            f"{name!r} is float16, and loss scaling needs gradients of float32",
            hint="call model.float(), or set autocast to bfloat16",
        )


def _narrowed(model: nn.Module) -> bool:
    """Whether the module had parameters of float64, which are float32 from here on, with a warning:
    what is trained and sent is float32 at most."""
    wide = [name for name, each in model.named_parameters() if each.dtype == torch.float64]
    if wide:
        warnings.warn(
            f"{len(wide)} parameters are float64, {wide[0]!r} among them, and are trained as "
            "float32; call model.float() to say so yourself",
            stacklevel=3,
        )
        for each in (*model.parameters(), *model.buffers()):  # half precision stays
            if each.dtype == torch.float64:
                each.data = each.data.float()
    return bool(wide)


def _spec_of(model: nn.Module, *, every_name: bool = False) -> ModelSpec:
    """The tensors of the state dict; of those that are tied, the first alone or `every_name`."""
    others = set() if every_name else {name for names in _ties(model) for name in names[1:]}
    frozen = _frozen_names(model)
    tensors = []
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            raise ConfigurationError(f"state {name!r} is a {type(tensor).__name__}, not a tensor")
        if name in others:
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        is_frozen = name in frozen and dtype in TRAINED_DTYPES
        tensors.append(TensorSpec(name, tuple(tensor.shape), dtype, is_frozen))
    return ModelSpec(tuple(tensors))


def _ties(model: nn.Module) -> list[list[str]]:
    """The names in the state dict of each tensor that has several, as of tied weights."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _frozen_names(model: nn.Module) -> set[str]:
    parameters = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in parameters if not parameter.requires_grad}


@contextmanager
def _frozen(model: nn.Module, spec: ModelSpec) -> Iterator[None]:
    """Freeze the parameters that `spec` freezes; the module is as before afterwards."""
    names = {tensor.name for tensor in spec.tensors if tensor.frozen}
    freed = [
        parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in names and parameter.requires_grad
    ]
    try:
        for parameter in freed:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in freed:
            parameter.requires_grad_(True)


def _arrays(model: nn.Module, names: Collection[str] | None = None) -> dict[str, npt.NDArray[Any]]:
    """The state dict, or its `names`, in numpy; bfloat16, which numpy lacks, as float32."""
    arrays = {}
    for name, tensor in model.state_dict().items():
        if names is not None and name not in names:
            continue
        host = tensor.detach().to("cpu")
        arrays[name] = (host.float() if host.dtype == torch.bfloat16 else host).numpy().copy()
    return arrays


def _loader(
    data: Data, batch_size: int, *, generator: torch.Generator | None, requested: int | None = None
) -> DataLoader[Any]:
    """Batches of `data`; shuffled by `generator` if there is one."""
    if not isinstance(data, DataLoader):
        is_empty = isinstance(data, Sized) and not len(data)  # torch cannot shuffle nothing
        shuffle = generator is not None and not isinstance(data, IterableDataset) and not is_empty
        return DataLoader(data, requested or batch_size, shuffle=shuffle, generator=generator)
    if requested is None or requested == data.batch_size:
        return data
    if data.batch_size is None:
        raise ConfigurationError(
            f"the plan asks for batches of {requested}, and the DataLoader makes its own",
            hint="give the trainer a Dataset, or a DataLoader with a batch_size",
        )
    # A copy, as the class and its options may be any; a DataLoader's attributes refuse to be set.
    loader = copy.copy(data)
    batches = BatchSampler(data.sampler, requested, data.drop_last)
    vars(loader).update(batch_size=requested, batch_sampler=batches, _iterator=None)
    return loader


def _num_examples(loader: DataLoader[Any], first_epoch: Sequence[int]) -> int:
    """The examples of an epoch, at most as many as the dataset has.

    Where nothing but the batches tells, these are the sizes of the `first_epoch`; where local steps
    have cut it short and the number of batches is known, their mean stands for the rest.
    """
    dataset, batches = loader.dataset, loader.batch_sampler
    drawn = sum(first_epoch)
    if loader.batch_size is None:  # the user's sampler makes the batches, or the dataset
        known = _length(loader.sampler if batches is None else batches)
        if known is not None and first_epoch:
            drawn = round(drawn / len(first_epoch) * known)
    else:
        known = _length(dataset if isinstance(dataset, IterableDataset) else loader.sampler)
        drawn = drawn if known is None else known
    # Without a batch sampler the dataset's items may be batches, so their number tells nothing.
    most = None if batches is None else _length(dataset)
    return drawn if most is None else min(drawn, most)


def _length(items: Any) -> int | None:
    """None where it is not known; a batch sampler has a length if its sampler has."""
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None


def _nothing_drawn(loader: DataLoader[Any]) -> ConfigurationError:
    if loader.drop_last and (found := _num_examples(loader, ())):
        return ConfigurationError(
            f"{found} examples make no batch of {loader.batch_size} with drop_last",
            hint="leave out drop_last, or lower the batch size, the task's training.batch_size",
        )
    return ConfigurationError("the data yields no batch, so there is nothing to learn from")


def _forward(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _size(targets: Any) -> int:
    """The number of examples in a batch: rows of a tensor, the first of several, or a list's items.

    Several tensors are several targets of each example; dicts in a list are one example each.
    """
    if isinstance(targets, Mapping):
        return _size(next(iter(targets.values())))
    if isinstance(targets, tuple | list) and targets:
        first = targets[0]
        if isinstance(first, tuple | list) or getattr(first, "ndim", None):
            return _size(first)
    try:
        return len(targets)
    except TypeError as exc:
        raise ConfigurationError(
            f"the data yields one {_kind(targets)} for targets, where those of a batch are due",
            hint="give the trainer a Dataset, or a DataLoader with a batch_size",
        ) from exc


def _difference(ours: ModelSpec, theirs: ModelSpec, ties: Sequence[Sequence[str]]) -> str:
    """The first thing, in words, for which a module of `ours` cannot take a model of `theirs`;
    empty if it can.

    `ours` has every name of a tied tensor, `theirs` one at least; which are frozen is theirs to
    say.
    """
    mine = {tensor.name: tensor for tensor in ours.tensors}
    yours = {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        if tensor.name not in mine:
            return f"it has a tensor {tensor.name!r} that the module lacks"
        own = mine[tensor.name]
        if (own.dtype, own.shape) != (tensor.dtype, tensor.shape):
            return (
                f"its {tensor.name!r} is {tensor.dtype}{list(tensor.shape)}, the module's "
                f"{own.dtype}{list(own.shape)}"
            )
    tied = {name for names in ties for name in names if not yours.isdisjoint(names)}
    for name in mine:
        if name not in yours and name not in tied:
            return f"it lacks {name!r}"
    if [name for name in mine if name in yours] != [tensor.name for tensor in theirs.tensors]:
        return "its tensors come in another order"
    return ""
