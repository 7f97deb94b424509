"""Adapters of PEFT: they alone travel, and what is published loads in PEFT as it stands."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("peft", reason="PEFT is not installed: pip install fedpress[peft]")
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from fedpress.peft import PeftTrainer, averaging_error, save_adapter
from fedpress_client.trainer import TrainingRequest
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.update import Update
from fedpress_peft.adapters import BASE
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms
from fedpress_strategies import from_config
from fedpress_strategies.lora import FactorMean, layers_of
from fedpress_strategies.strategy import Tally

# Between these versions of PEFT and transformers, and none of ours.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
LAYERS = 2
BOUNDS = FixedPoint.widest(max_abs=64.0, max_weight=99)


def base(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": LAYERS, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def adapted(config: Any = None, seed: int = 0, model: Any = None) -> PeftModel:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")
        torch.manual_seed(seed + 1)
        lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        return get_peft_model(model or base(seed), config or lora)


class Lines(torch.utils.data.Dataset[Any]):
    def __init__(self, seed: int, num: int = 24) -> None:
        self.rows = torch.randint(0, 8, (num, 12), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def trainer(seed: int = 0, **options: Any) -> PeftTrainer:
    model = options.pop("model", None) or adapted(options.pop("config", None))
    return PeftTrainer(
        model, Lines(seed), evaluation_data=Lines(9, 16), learning_rate=0.02, **options
    )


def request(number: int = 1) -> TrainingRequest:
    return TrainingRequest("task", number, 1, TrainingTerms(local_steps=4), 7)


def test_the_adapter_alone_travels_by_peft_names_and_says_which_base_it_is_for() -> None:
    made = trainer()
    names = [tensor.name for tensor in made.spec.tensors]
    layers = [f"base_model.model.transformer.h.{i}.attn.c_attn" for i in range(LAYERS)]
    factors = [f"{layer}.lora_{factor}.weight" for layer in layers for factor in "AB"]
    assert names == [*factors, BASE]
    assert made.spec.size == LAYERS * 4 * (16 + 48)
    assert len(made.initial_model().to_bytes()) < 4 * made.spec.size + 1500


def test_it_learns_and_its_model_loads_in_plain_peft_with_equal_logits(tmp_path: Path) -> None:
    made = trainer()
    first = made.initial_model()
    before = made.evaluate(first)
    trained = made.train(first, request())
    model = Model.from_bytes(first.with_parameters(trained.parameters).to_bytes())
    after = made.evaluate(model)
    assert before is not None
    assert after is not None
    assert after.metrics["loss"] < before.metrics["loss"]
    made.save(model, str(tmp_path))
    loaded = PeftModel.from_pretrained(base(), str(tmp_path)).eval()
    made.peft_model.eval()
    rows = Lines(3, 5).rows
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=rows).logits, made.peft_model(input_ids=rows).logits)
        assert not torch.equal(loaded(input_ids=rows).logits, base().eval()(input_ids=rows).logits)


def test_an_adapter_of_another_base_is_refused() -> None:
    ours = trainer()
    other = PeftTrainer(adapted(seed=5), Lines(0))
    with pytest.raises(ConfigurationError, match=r"for the base .*, and the base here is"):
        other.train(ours.initial_model(), request())
    half = PeftTrainer(adapted(model=base().to(torch.bfloat16)), Lines(0))
    theirs = half.initial_model().tensors()[BASE]
    assert not np.array_equal(theirs, ours.initial_model().tensors()[BASE])


def factors(made: PeftTrainer, parameters: Any, which: str) -> np.ndarray[Any, Any]:
    tensors = made.spec.unflatten(parameters)
    return np.concatenate([a.ravel() for name, a in tensors.items() if f"lora_{which}" in name])


def test_with_ffa_the_first_factor_is_frozen_and_the_average_is_right() -> None:
    first, second = trainer(0, averages="ffa"), trainer(1, averages="ffa")
    model = first.initial_model()
    assert first.spec.size == LAYERS * 4 * 48
    assert {t.name.split(".")[-2] for t in model.spec.tensors if t.frozen} == {"lora_A"}
    after = [each.train(model, request()).parameters for each in (first, second)]
    adapters = [model.with_parameters(each).tensors() for each in after]
    assert averaging_error(adapters) < 1e-12
    plain = [trainer(0), trainer(1)]
    model = plain[0].initial_model()
    both = [model.with_parameters(each.train(model, request()).parameters) for each in plain]
    assert 1e-3 < averaging_error([each.tensors() for each in both]) < 2
    weighted = averaging_error([each.tensors() for each in both], [1, 0])
    assert weighted < 1e-12


def test_alternating_rounds_move_one_factor_at_a_time() -> None:
    made = trainer(averages="alternating")
    model = made.initial_model()
    for number, (moving, still) in ((1, "BA"), (2, "AB"), (3, "BA")):
        parameters = made.train(model, request(number)).parameters
        same = factors(made, parameters, still) == factors(made, model.parameters, still)
        assert same.all()
        assert (factors(made, parameters, moving) != factors(made, model.parameters, moving)).any()
        model = model.with_parameters(parameters)
    assert all(p.requires_grad for _, p in made.model.named_parameters())


def test_a_base_that_is_sent_is_frozen_and_reaches_a_device_with_another(tmp_path: Path) -> None:
    made = trainer(sends_base=True)
    model = made.initial_model()
    assert model.spec.size == LAYERS * 4 * (16 + 48)
    assert model.base.num_bytes > 10 * 4 * model.spec.size
    device = trainer(model=adapted(seed=5), sends_base=True)
    device.train(model, request())
    rows = Lines(3, 5).rows
    made.peft_model.eval()
    device.peft_model.eval()
    device.evaluate(model)
    with torch.no_grad():
        ours, theirs = (each.peft_model(input_ids=rows).logits for each in (made, device))
    assert torch.equal(ours, theirs)
    save_adapter(model, made.peft_model, str(tmp_path))
    PeftModel.from_pretrained(base(), str(tmp_path))


def test_another_adapter_that_is_stored_as_it_stands_goes_too(tmp_path: Path) -> None:
    config = IA3Config(target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True)
    made = trainer(config=config)
    model = made.initial_model()
    after = model.with_parameters(made.train(model, request()).parameters)
    made.save(after, str(tmp_path))
    PeftModel.from_pretrained(base(), str(tmp_path))
    with pytest.raises(ConfigurationError, match="no factors lora_A and lora_B"):
        trainer(config=config, averages="ffa")


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="GPT2LMHeadModel is no PEFT model"):
        PeftTrainer(base(), Lines(0))
    with pytest.raises(ConfigurationError, match="known are plain, ffa, alternating"):
        trainer(averages="flora")
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ConfigurationError, match="computed, not stored"):
        trainer(config=prompts)
    model = adapted()
    next(model.parameters()).requires_grad_(True)
    with pytest.raises(ConfigurationError, match="modules_to_save"):
        trainer(model=model)
    made = trainer()
    rows: Any = [{"input_ids": torch.zeros(4).long()}]
    unlabelled = PeftTrainer(adapted(), rows)
    with pytest.raises(ConfigurationError, match="no labels"):
        unlabelled.train(unlabelled.initial_model(), request())
    small = adapted(LoraConfig(r=2, target_modules=["c_proj"], fan_in_fan_out=True))
    with pytest.raises(ConfigurationError, match="the model lacks"):
        save_adapter(made.initial_model(), small, "unused")


def test_the_callers_model_is_copied_nowhere() -> None:
    model = adapted()
    made = trainer(model=model)
    kept = copy.deepcopy({name: p.detach().clone() for name, p in model.named_parameters()})
    made.train(made.initial_model(), request())
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, kept[name])}
    assert moved
    assert all("lora_" in name for name in moved)


def test_a_device_trains_its_first_ranks_and_sends_no_change_of_the_others() -> None:
    for rank in (1, 3):
        made = trainer(trained_rank=rank)
        model = made.initial_model()
        change = made.train(model, request(rank)).parameters - model.parameters
        for name, values in made.spec.unflatten(change).items():
            moved = values if "lora_A" in name else values.T
            assert not moved[rank:].any()
            assert "lora_A" in name or moved[:rank].any(axis=1).all()
    support = np.arange(0, model.spec.size, 2)
    both = made.train(model, replace(request(1), support=support)).parameters
    assert not (both - model.parameters)[1::2].any()
    with pytest.raises(ConfigurationError, match=r"trained_rank is 5, .* ranks \[4\]"):
        trainer(trained_rank=5)


def test_exact_averages_are_those_of_the_devices_products() -> None:
    devices = [trainer(seed, trained_rank=2) for seed in (0, 1)]
    model = devices[0].initial_model()
    made = from_config({"id": "lora", "rank": 2})
    rows = Lines(3, 5).rows
    state = made.optimizer.init(model.parameters)
    for number in (1, 2):
        sums = FactorMean(layers_of(model.spec), model.spec.size, BOUNDS)
        trained = [each.train(model, request(number)).parameters for each in devices]
        for parameters in trained:
            sums.add(Update.from_dense(parameters - model.parameters), 1)
        after, state = made.optimizer.apply(
            model.parameters, sums.result(), state, Tally(2, spec=model.spec)
        )
        for layer in layers_of(model.spec):
            right = np.mean([np.matmul(*layer.factors(each)) for each in trained], axis=0)
            rest = np.asarray(state[f"rest.{layer.name}"])
            np.testing.assert_allclose(np.matmul(*layer.factors(after)) + rest, right, atol=1e-6)
        model = model.with_parameters(after)
    devices[0].evaluate(model)
    assert torch.isfinite(devices[0].peft_model(input_ids=rows).logits).all()


def test_a_transformers_trainer_becomes_a_device(tmp_path: Path) -> None:
    def arguments(**settings: Any) -> TrainingArguments:
        return TrainingArguments(
            str(tmp_path),
            learning_rate=0.02,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            **settings,
        )

    theirs = Trainer(
        adapted(), arguments(num_train_epochs=2), train_dataset=Lines(0), eval_dataset=Lines(9, 16)
    )
    made = PeftTrainer.from_transformers(theirs)
    model = made.initial_model()
    free = TrainingRequest("task", 1, 1, TrainingTerms(), 7)
    trained = made.train(model, free)
    assert trained.report["steps"] == 2 * 24 / 4
    before = made.evaluate(model)
    after = made.evaluate(model.with_parameters(trained.parameters))
    assert before is not None
    assert after is not None
    assert after.metrics["loss"] < before.metrics["loss"]

    halved = Trainer(adapted(), arguments(bf16=True), train_dataset=Lines(0))
    inexact = PeftTrainer.from_transformers(halved, local_epochs=2).train(model, free)
    assert (inexact.parameters != trained.parameters).any()
    np.testing.assert_allclose(inexact.parameters, trained.parameters, atol=0.05)

    class Own(Trainer):  # type: ignore[misc]
        def compute_loss(self, *inputs: Any, **named: Any) -> Any:
            return super().compute_loss(*inputs, **named)

    for odd, says in (
        (Trainer(adapted(), arguments(max_steps=3), train_dataset=Lines(0)), "max_steps"),
        (Own(adapted(), arguments(), train_dataset=Lines(0)), "compute_loss of its own"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            PeftTrainer.from_transformers(odd)
