"""1-bit optimizers in a group of one process, beside torch's Adam and the papers written out."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from fedpress_ddp.optimizers import OneBitAdam, OneBitLamb
from fedpress_protocols.errors import ConfigurationError

CHUNK = 8
OPTIMIZERS = [OneBitAdam, OneBitLamb]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameters() -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((6, 4), (7,))]


def gradients(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=draw) for shape in ((6, 4), (7,))]


def take(optimizer: torch.optim.Optimizer, trained: list[torch.nn.Parameter], step: int) -> None:
    for parameter, gradient in zip(trained, gradients(step), strict=True):
        parameter.grad = gradient
    optimizer.step()


def flat(tensors: list[Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return torch.cat([each.detach().ravel() for each in tensors]).double().numpy()


def test_the_warm_up_is_torch_s_adam() -> None:
    ours, torch_s = parameters(), parameters()
    one_bit = OneBitAdam(ours, 0.1, (0.8, 0.95), 1e-6, warm_up_steps=20)
    adam = torch.optim.Adam(torch_s, 0.1, (0.8, 0.95), 1e-6)
    for step in range(20):
        take(one_bit, ours, step)
        take(adam, torch_s, step)
        np.testing.assert_allclose(flat(ours), flat(torch_s), atol=1e-5)
    assert one_bit.sent.num_bytes == one_bit.sent.plain_bytes == 20 * 4 * 31


def test_frozen_adam_is_the_recurrence_written_out() -> None:
    trained, lr, beta1, beta2, eps, warm = parameters(), 0.05, 0.9, 0.99, 1e-4, 5
    optimizer = OneBitAdam(trained, lr, (beta1, beta2), eps, warm_up_steps=warm, chunk=CHUNK)
    point, first, second, residual = flat(trained), np.zeros(31), np.zeros(31), np.zeros(31)
    for step in range(12):
        gradient = flat(gradients(step))
        if step < warm:
            second = beta2 * second + (1 - beta2) * gradient**2
        else:
            if step == warm:  # no root below .3 of its chunk's or parameter's, .03 of the model's
                chunks = np.split(second, range(CHUNK, 31, CHUNK))
                least = np.concatenate([np.full(c.size, c.mean()) for c in chunks])
                least[:24] = np.maximum(least[:24], second[:24].mean())
                least[24:] = np.maximum(least[24:], second[24:].mean())
                second = np.maximum(second, 0.3**2 * np.maximum(least, second.mean() / 100))
            whole = gradient + residual
            gradient = np.concatenate(
                [np.abs(c).mean() * np.sign(c) for c in np.split(whole, range(CHUNK, 31, CHUNK))]
            )
            residual = whole - gradient
        first = beta1 * first + (1 - beta1) * gradient
        root = np.sqrt(second / (1 - beta2 ** min(step + 1, warm))) + eps
        point -= lr * first / (1 - beta1 ** (step + 1)) / root
        take(optimizer, trained, step)
        np.testing.assert_allclose(flat(trained), point, rtol=5e-3, atol=5e-3)
    assert 0 < optimizer.sent.num_bytes - warm * 4 * 31 < 7 * 60


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_coordinates_without_a_gradient_stay_near(cls: type[OneBitAdam]) -> None:
    """As the weights of a pixel that is never set, beside others in one chunk."""
    trained = [torch.nn.Parameter(torch.ones(4, 8))]
    optimizer = cls(trained, 0.01, warm_up_steps=5)
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        gradient = torch.randn(4, 8, generator=draw)
        gradient[:, ::4] = 0
        trained[0].grad = gradient
        optimizer.step()
    assert float((trained[0].detach() - 1).abs().max()) < 20 * 0.01 / 0.3


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("size", [8, 16], ids=["a chunk", "a parameter"])
def test_values_that_wake_after_the_warm_up_take_bounded_steps(
    cls: type[OneBitAdam], size: int
) -> None:
    """As the weights of a unit that never was active in the warm-up, all of a chunk or more."""
    trained = [torch.nn.Parameter(torch.ones(16)), torch.nn.Parameter(torch.ones(16))]
    optimizer = cls(trained, 0.01, warm_up_steps=5, chunk=8)
    draw = torch.Generator().manual_seed(0)
    for step in range(20):
        gradients = torch.randn(2, 16, generator=draw)
        if step < 5:
            gradients[1, :size] = 0
        trained[0].grad, trained[1].grad = gradients.unbind()
        optimizer.step()
    change = (trained[1].detach() - 1).abs().max()
    assert float(change) < 20 * 0.01 / 0.03


def test_the_warm_up_of_lamb_scales_layers_by_their_norms() -> None:
    trained, lr = parameters(), 0.05
    before = [each.detach().double().numpy().copy() for each in trained]
    take(OneBitLamb(trained, lr, eps=1e-6, warm_up_steps=3), trained, 0)
    for parameter, start, gradient in zip(trained, before, gradients(0), strict=True):
        values = gradient.double().numpy()
        direction = values / (np.abs(values) + 1e-6)
        ratio = np.linalg.norm(start) / np.linalg.norm(direction)
        expected = start - lr * ratio * direction
        np.testing.assert_allclose(parameter.detach().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("stop", [2, 7])
def test_a_checkpoint_continues_bit_by_bit(cls: type[OneBitAdam], stop: int) -> None:
    trained = parameters()
    optimizer = cls(trained, 0.01, warm_up_steps=4)
    for step in range(stop):
        take(optimizer, trained, step)
    resumed, file = copy.deepcopy(trained), BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = cls(resumed, 0.5, warm_up_steps=4)
    again.load_state_dict(torch.load(file, weights_only=True))
    for step in range(stop, 10):
        take(optimizer, trained, step)
        take(again, resumed, step)
        np.testing.assert_array_equal(flat(trained), flat(resumed))


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_infinity_changes_nothing_and_a_scheduler_sets_the_rate(cls: type[OneBitAdam]) -> None:
    trained = parameters()
    optimizer = cls(trained, 0.01, warm_up_steps=2)
    for step in range(4):
        take(optimizer, trained, step)
        before = flat(trained)
        gradient = trained[0].grad
        assert gradient is not None
        gradient[0, 0] = math.inf
        optimizer.step()
        np.testing.assert_array_equal(flat(trained), before)
    optimizer.param_groups[0]["lr"] = 0.0001
    take(optimizer, trained, 4)
    assert 0 < np.abs(flat(trained) - before).max() < 0.01


def test_a_state_of_another_model_is_refused() -> None:
    state = OneBitAdam(parameters(), warm_up_steps=1).state_dict()
    with pytest.raises(ConfigurationError, match=r"another model: .* is \[31\], .* is \[24\]"):
        OneBitAdam(parameters()[:1], warm_up_steps=1).load_state_dict(state)
    with pytest.raises(ConfigurationError, match="a dict without state, param_groups, steps"):
        OneBitAdam(parameters(), warm_up_steps=1).load_state_dict({})


def test_what_cannot_work_says_why() -> None:
    with pytest.raises(
        ConfigurationError, match="warm_up_steps must be a whole number from 1 on, not 0"
    ):
        OneBitAdam(parameters(), warm_up_steps=0)
    half: Any = 1.5
    with pytest.raises(ConfigurationError, match=r"from 1 on, not 1\.5 .*15 to 20 %"):
        OneBitAdam(parameters(), warm_up_steps=half)
    groups: Any = [{"params": parameters()}]
    with pytest.raises(ConfigurationError, match=r"must be tensors, not dict .*for each group"):
        OneBitAdam(groups, warm_up_steps=1)
    with pytest.raises(ConfigurationError, match=r"floor must lie in \[0, 1\], not 2"):
        OneBitAdam(parameters(), warm_up_steps=1, floor=2)
    with pytest.raises(ConfigurationError, match="no parameter"):
        OneBitAdam([], warm_up_steps=1)
    with pytest.raises(ConfigurationError, match=r"beta2 must lie in \[0, 1\)"):
        OneBitLamb(parameters(), betas=(0.9, 1.0), warm_up_steps=1)
    with pytest.raises(ConfigurationError, match="one group of parameters"):
        OneBitAdam(parameters(), warm_up_steps=1).add_param_group({"params": parameters()})
