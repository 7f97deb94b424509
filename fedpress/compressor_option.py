"""The `--compressor` of the command line, as short as it can be typed.

auto                                   the default, docs/auto.md, where a command has it
auto:gap=1,upload_bytes=10000000       ... with its terms
none                                   float32 as it is
topk                                   a method with its defaults
topk:fraction=0.02,magnitude_bits=1    ... or with settings
error_feedback:inner={"id": "topk", "fraction": 0.01}      a value may be JSON, commas and all
{"id": "error_feedback", ...}          any configuration, as a plan has it

A bare method other than `none` gets what a device should use with it: 8 bits for tensors too small
to sparsify, and error feedback around, unless the method is unbiased or can lose more than it is
given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fedpress_compression.compressor import Compressor, Config, from_config, properties
from fedpress_compression.compressors.error_feedback import check_feedback
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.plan import parsed
from fedpress_protocols.policies import Auto


def compressor_from_option(text: str, *, masked: bool = False) -> Compressor[Any]:
    """The compressor that `text` names; raises ConfigurationError.

    For the masked lane, in which all tensors share one support, a bare method gets error feedback.
    """
    if text.lstrip().startswith("{"):
        try:
            config = json.loads(text)
        except ValueError as exc:
            raise ConfigurationError(f"--compressor is not JSON: {exc}") from exc
        return _checked(config)
    name, _, settings = text.partition(":")
    config = {"id": name.strip(), **dict(_settings(settings))}
    if name.strip() in ("none", "error_feedback", "dgc"):
        return _checked(config)
    claimed = properties(from_config(config))
    by_tensor = masked or name.strip() == "per_tensor"
    inner = config if by_tensor else {"id": "per_tensor", "large": config}
    if claimed.suits_feedback and (masked or not claimed.unbiased):
        return from_config({"id": "error_feedback", "inner": inner})
    return from_config(inner)


def auto_from_option(text: str) -> Auto | None:
    """The terms of auto that `text` gives; None if it names a compressor. Raises
    ConfigurationError."""
    name, _, settings = text.partition(":")
    if name.strip() != Auto().id:
        return None
    return parsed(Auto, json.dumps({"id": Auto().id, **dict(_settings(settings))}))


def _checked(config: Config) -> Compressor[Any]:
    made = from_config(config)
    check_feedback(made)
    return made


def _settings(text: str) -> Iterator[tuple[str, Any]]:
    """The settings `key=value,...`; a value is JSON to its end, or text up to the next comma."""
    while text.strip():
        key, equals, rest = text.partition("=")
        if not equals or not key.strip() or "," in key:
            raise IncompatiblePlan(
                f"--compressor: {text.partition(',')[0]!r} is not of the form key=value"
            )
        value, text = _value(rest.lstrip())
        yield key.strip(), value


def _value(text: str) -> tuple[Any, str]:
    """The value at the start of `text`, and the text behind its comma."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
        if not text[end:].strip() or text[end:].lstrip().startswith(","):
            return value, text[end:].strip()[1:]
    except ValueError as exc:
        if text.startswith(("{", "[")):
            raise ConfigurationError(f"--compressor: {text!r} is not JSON: {exc}") from exc
    value, _, rest = text.partition(",")
    return value.strip(), rest
