"""The `--compressor` of the command line, as short as it can be typed.

auto                                   the default, docs/auto.md, where a command has it
auto:gap=1,upload_bytes=10000000       ... with its terms
none                                   float32 as it is
topk                                   a method with its defaults
topk:fraction=0.02,magnitude_bits=1    ... or with settings
error_feedback:inner={"id": "topk", "fraction": 0.01}      a value may be JSON, commas and all
{"id": "error_feedback", ...}          any configuration, as a plan has it

A bare method other than `none` gets what a device should use with it: 8 bits for tensors too small
to sparsify (fewer than 1,024 values, or one dimension), on which its settings have no effect, and
error feedback around, unless the method is unbiased or can lose more than it is given. JSON is
taken as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from fedpress_compression.compressor import (
    Compressor,
    Config,
    compressors,
    from_config,
    properties,
)
from fedpress_compression.compressors.error_feedback import check_feedback
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.plan import parsed
from fedpress_protocols.policies import Auto

_AUTO = Auto().id
_NEAR = 0.7
"""Similarity of a name to one that is suggested instead, of 1."""


def compressor_from_option(text: str, *, masked: bool = False) -> Compressor[Any]:
    """The compressor that `text` names; raises ConfigurationError.

    For the masked lane, in which all tensors share one support, a bare method gets error feedback.
    """
    config = _config(text)
    _check_names(config)
    name = config["id"]
    if _is_json(text) or name in ("none", "error_feedback", "dgc"):
        return _checked(config)
    claimed = properties(from_config(config))
    by_tensor = masked or name == "per_tensor"
    inner = config if by_tensor else {"id": "per_tensor", "large": config}
    if claimed.suits_feedback and (masked or not claimed.unbiased):
        return from_config({"id": "error_feedback", "inner": inner})
    return from_config(inner)


def auto_from_option(text: str) -> Auto | None:
    """The terms of auto that `text` gives; None if it names a compressor. Raises
    ConfigurationError."""
    config = _config(text)
    if config["id"] != _AUTO:
        return None
    unknown = ", ".join(sorted(set(config) - set(Auto.model_fields)))
    if unknown:
        known = ", ".join(name for name in Auto.model_fields if name != "id")
        raise ConfigurationError(f"--compressor: {_AUTO} takes {known}, not {unknown}")
    try:
        return parsed(Auto, json.dumps(config))
    except IncompatiblePlan as exc:
        raise ConfigurationError(f"--compressor: {_AUTO}: {exc.detail}") from exc


def _is_json(text: str) -> bool:
    return text.lstrip().startswith("{")


def _config(text: str) -> dict[str, Any]:
    """The id and the settings in `text`."""
    if not _is_json(text):
        name, _, settings = text.partition(":")
        return _once([("id", name.strip()), *_settings(settings)])
    try:
        config: dict[str, Any] = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as exc:
        raise ConfigurationError(f"--compressor is not JSON: {exc}") from exc
    if "id" not in config:
        raise ConfigurationError(
            "--compressor: the object has no id", hint='as in {"id": "topk", "fraction": 0.01}'
        )
    return config


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"--compressor: {name} is there twice")
    return dict(pairs)


def _check_names(config: Config) -> None:
    """Raise ConfigurationError for the id of no compressor, or settings of one that has none,
    wherever in `config` they stand."""
    parts: list[Any] = [config]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if "id" in part:
                _check_name(part["id"], sorted(set(part) - {"id"}))
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def _check_name(name: Any, settings: list[str]) -> None:
    known, text = compressors(), str(name)
    if text == _AUTO:
        raise ConfigurationError(
            f"--compressor: {_AUTO} cannot be given here, nor inside another compressor",
            hint=f"choose one of {', '.join(known)}",
        )
    if text not in known and "." not in text:  # with a dot it is a plug-in's
        near = get_close_matches(text.lower(), [_AUTO, *known], 1, _NEAR)
        rest = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise ConfigurationError(f"--compressor: no compressor has the id {name!r}; {rest}")
    if text in known and settings and not fields(known[text]):
        raise ConfigurationError(
            f"--compressor: {name} takes no options, not {', '.join(settings)}"
        )


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
        value, end = json.JSONDecoder(object_pairs_hook=_once).raw_decode(text)
        if not text[end:].strip() or text[end:].lstrip().startswith(","):
            return value, text[end:].strip()[1:]
    except ValueError as exc:
        if text.startswith(("{", "[")):
            raise ConfigurationError(f"--compressor: {text!r} is not JSON: {exc}") from exc
    value, _, rest = text.partition(",")
    return value.strip(), rest
