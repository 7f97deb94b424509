"""The `--compressor` of the command line, as short as it can be typed.

none                                   float32 as it is
topk                                   a method with its defaults
topk:fraction=0.02,magnitude_bits=1    ... or with settings
{"id": "error_feedback", ...}          any configuration, as a plan holds it

A bare method other than `none` gets what a device should use with it: 8 bits for tensors too small
to sparsify, and error feedback around, unless the method is unbiased or can lose more than it is
given.
"""

from __future__ import annotations

import json
from typing import Any

from fedpress_compression.compressor import Compressor, Config, from_config, properties
from fedpress_compression.compressors.error_feedback import check_feedback
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan


def compressor_from_option(text: str, *, masked: bool = False) -> Compressor[Any]:
    """The compressor that `text` names; raises ConfigurationError saying what is off.

    For the masked lane, in which all tensors share one support, a bare method gets error feedback.
    """
    if text.lstrip().startswith("{"):
        try:
            config = json.loads(text)
        except ValueError as exc:
            raise ConfigurationError(f"--compressor is not JSON: {exc}") from exc
        return _checked(config)
    name, _, settings = text.partition(":")
    config = {"id": name.strip(), **dict(_setting(item) for item in settings.split(",") if item)}
    if name.strip() in ("none", "error_feedback", "dgc"):
        return _checked(config)
    claimed = properties(from_config(config))
    by_tensor = masked or name.strip() == "per_tensor"
    inner = config if by_tensor else {"id": "per_tensor", "large": config}
    if claimed.suits_feedback and (masked or not claimed.unbiased):
        return from_config({"id": "error_feedback", "inner": inner})
    return from_config(inner)


def _checked(config: Config) -> Compressor[Any]:
    made = from_config(config)
    check_feedback(made)
    return made


def _setting(item: str) -> tuple[str, Any]:
    key, equals, value = item.partition("=")
    if not equals or not key.strip():
        raise IncompatiblePlan(f"--compressor: {item!r} where key=value is due")
    try:
        return key.strip(), json.loads(value)
    except ValueError:
        return key.strip(), value.strip()
