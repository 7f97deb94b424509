"""The adapter of a PEFT model as a module of its own: the tensors that travel, under PEFT's names.

A model of an adapter names the base that it is for: a tensor BASE holds the SHA-256 of the base's
tensors. So an adapter never meets another base than the one that it was trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np

from fedpress_protocols.errors import ConfigurationError, MissingExtra
from fedpress_protocols.model import Model, from_stored, to_stored

try:
    import torch
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import save_file
    from torch import nn
except ModuleNotFoundError as exc:
    raise MissingExtra("adapters need PEFT", hint="pip install fedpress[peft]") from exc

BASE = "fedpress.base_sha256"
"""The name of the tensor uint8[32] that names the base."""


class AdapterModule(nn.Module):
    """A PEFT model whose state is its active adapter's, and the digest of its base.

    With `sends_base` the state has the tensors of the base, too, in the place of the digest.
    """

    def __init__(self, model: PeftModel, *, sends_base: bool = False) -> None:
        super().__init__()
        self.peft_model = model
        adapter = _adapter_tensors(model)
        names = {id(tensor): name for name, tensor in adapter.items()}
        whole = model.state_dict(keep_vars=True)
        rest = {name: each for name, each in whole.items() if id(each) not in names}
        odd = [name for name, each in rest.items() if each.requires_grad]
        if odd:
            raise ConfigurationError(
                f"{len(odd)} tensors are trained that are no part of the adapter, {odd[0]!r} among "
                "them, so its file would not have them",
                hint="freeze them, or name their modules in the adapter's modules_to_save",
            )
        self._tensors = {**rest, **adapter} if sends_base else adapter
        self._digest = None if sends_base else torch.frombuffer(_digest(rest), dtype=torch.uint8)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.peft_model(*inputs, **named)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that travel."""
        known: set[int] = set()
        for name, tensor in self._tensors.items():
            if isinstance(tensor, nn.Parameter) and not (remove_duplicate and id(tensor) in known):
                known.add(id(tensor))
                yield f"{prefix}{name}", tensor

    def state_dict(  # type: ignore[override]
        self, *_: Any, keep_vars: bool = False, **__: Any
    ) -> dict[str, Any]:
        """The tensors that travel, by the names that PEFT's files have for them."""
        state = {
            name: tensor if keep_vars else tensor.detach() for name, tensor in self._tensors.items()
        }
        return state if self._digest is None else {**state, BASE: self._digest}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Take over the values of `state_dict`; raises ConfigurationError for another base."""
        digest = self._digest
        if digest is not None and not torch.equal(state_dict[BASE], digest):
            raise ConfigurationError(
                f"the task's adapter is for the base {_hex(state_dict[BASE])}, and the base here "
                f"is {_hex(digest)}",
                hint="load the very base model, in the same dtype, that the task was begun with",
            )
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(state_dict[name])


def save_adapter(model: Model, peft_model: PeftModel, folder: str) -> None:
    """Write the adapter in `model` to `folder`, for `PeftModel.from_pretrained(base, folder)`.

    `peft_model` gives the configuration; its values stay as they are. Raises ConfigurationError if
    the model is of another adapter.
    """
    expected = _adapter_tensors(peft_model)
    arrays = model.tensors()
    missing = sorted(set(expected).difference(arrays))
    if missing:
        raise ConfigurationError(
            f"the model lacks {len(missing)} tensors of the adapter, {missing[0]!r} among them",
            hint="build the adapter with the configuration that the task was begun with",
        )
    specs = {tensor.name: tensor for tensor in model.spec.tensors}
    tensors = {}
    for name, tensor in expected.items():
        rounded = from_stored(specs[name], to_stored(specs[name], np.asarray(arrays[name])))
        value = torch.from_numpy(np.array(rounded)).to(tensor.dtype)
        if value.shape != tensor.shape:
            raise ConfigurationError(
                f"{name!r} is {list(value.shape)} in the model, {list(tensor.shape)} in the adapter"
            )
        tensors[name] = value
    config = peft_model.peft_config[peft_model.active_adapter]
    config.save_pretrained(folder)
    save_file(tensors, f"{folder}/adapter_model.safetensors", metadata={"format": "pt"})


def _adapter_tensors(model: PeftModel) -> dict[str, torch.Tensor]:
    """The very tensors of the active adapter, by PEFT's names; raises ConfigurationError."""
    if not isinstance(model, PeftModel):
        raise ConfigurationError(
            f"a {type(model).__name__} is no PEFT model",
            hint="wrap it: get_peft_model(model, LoraConfig(...))",
        )
    adapter = model.active_adapter
    state = cast(
        "dict[str, torch.Tensor]",
        get_peft_model_state_dict(
            model,
            state_dict=model.state_dict(keep_vars=True),
            adapter_name=adapter,
            save_embedding_layers=False,
        ),
    )
    own = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    if not state or any(id(tensor) not in own for tensor in state.values()):
        kind = model.peft_config[adapter].peft_type
        raise ConfigurationError(
            f"the adapter {adapter!r} of type {kind} is computed, not stored, so it cannot be set",
            hint="use LoRA or another adapter that is saved as it stands",
        )
    return state


def _digest(tensors: Mapping[str, torch.Tensor]) -> bytearray:
    """SHA-256 over the name, dtype, shape and bytes of each tensor, by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return bytearray(digest.digest())


def _hex(digest: torch.Tensor) -> str:
    return bytes(digest.tolist()).hex()[:12]
