"""A task's configuration as a file: JSON, or YAML with the extra `server`.

YAML is read as JSON with another look: no anchors, no tags, no key twice, and 1e-3 is a number. So
one file means the same in both.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from fedpress.command_line import needs, read
from fedpress_compression.bias import MOST_NEVER_SENT, never_sent
from fedpress_compression.compressor import properties
from fedpress_compression.running_statistics import has_statistics
from fedpress_compression.tensors import ModelSpec
from fedpress_protocols.defaults import BITS, rate_levels
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.plan import Profile
from fedpress_protocols.policies import automatic
from fedpress_protocols.validation import format_validation_errors, unrepeated
from fedpress_strategies import from_config

_YAML = (".yaml", ".yml")
_UNNAMED = "0" * 64
_MOST_BYTES = 16 * 2**20
_STAND_IN = {
    "weight": np.ones((64, 64), np.float32),
    "bias": np.ones(64, np.float32),
    "adapted.lora_A.weight": np.ones((1024, 16), np.float32),
    "adapted.lora_B.weight": np.ones((16, 1024), np.float32),
}


@dataclass(frozen=True, slots=True)
class Checked:
    """Summary of a valid task file; `max_upload` and `spec` are None without its model."""

    config: TaskConfig
    max_upload: int | None
    spec: ModelSpec | None = None


def task_config(path: Path, model: str | None = None) -> TaskConfig:
    """The task in the file; `model`, a digest, takes the place of the one it names.

    Raises ConfigurationError that says where and what, MissingExtra for YAML without PyYAML.
    """
    fields = _fields(path)
    named_model = model or fields.get("model", _UNNAMED)
    try:
        return TaskConfig.model_validate({**fields, "model": named_model}, strict=False)
    except ValidationError as exc:
        raise ConfigurationError(f"{path}: {format_validation_errors(exc)}") from exc


def read_model(path: Path) -> Model:
    """The model in a file; raises ConfigurationError that names the file."""
    try:
        return Model.from_bytes(read(path))
    except ConfigurationError as exc:
        raise ConfigurationError(f"{path}: {exc.detail}", hint=exc.hint) from exc


def checked(path: Path, model: Path | Model | None) -> Checked:
    """Check a task as a server with its usual settings does when the task is created.

    Without `model`, lane, compressors and strategy are checked on tensors that stand in for it, and
    what hangs on the model's own tensors is left out: patterns of names, sizes, the order of
    profiles. Raises ConfigurationError, or MissingExtra where the server is not installed.
    """
    initial = read_model(model) if isinstance(model, Path) else model
    config = task_config(path, None if initial is None else initial.digest)
    try:
        config.check_new()
    except ConfigurationError as exc:
        raise ConfigurationError(f"{path}: {exc}") from exc
    try:
        strategy = from_config(config.strategy, config.training)
    except ConfigurationError as exc:
        raise ConfigurationError(f"{path}: strategy: {exc}") from exc
    try:
        from fedpress_server.aggregation.masked import Host
        from fedpress_server.coordination.checking import checked_task
        from fedpress_server.coordination.opening import RoundCarryover, opened
        from fedpress_server.identity.membership import Authority
        from fedpress_server.identity.signing import SigningKeys
        from fedpress_server.settings import Settings
        from fedpress_server.storage.files import model_name
        from fedpress_server.storage.payloads import LocalPayloads
    except ModuleNotFoundError as exc:
        needs("server", exc)
    from fedpress_protocols.signatures import DeviceKey

    if initial is None:
        anything = strategy.client_terms.model_copy(update={"personal": ()})
        strategy = strategy._replace(client_terms=anything)
    begun = initial or Model.from_tensors(_STAND_IN)
    usual = Settings.model_fields
    most, memory = usual["max_body_bytes"].default, usual["fold_memory_bytes"].default
    seeded = config if config.seed is not None else config.model_copy(update={"seed": 0})
    with tempfile.TemporaryDirectory() as folder:
        payloads = LocalPayloads(Path(folder))
        payloads.put(model_name(begun.digest), begun.to_bytes())
        nobody = DeviceKey.generate()
        begin = partial(
            opened,
            strategy=strategy,
            payloads=payloads,
            host=Host(SigningKeys.of(nobody), Authority.here("fedpress", nobody)),
            carryover=RoundCarryover.beginning(begun.digest, begun.spec),
            number=1,
            attempt=1,
            now=time.time(),
        )
        spec = None if initial is None else initial.spec
        try:
            _, bound = checked_task(seeded, strategy, begin, spec, most=most, memory=memory)
        except ConfigurationError as exc:
            raise ConfigurationError(f"{path}: {exc}") from exc
    return Checked(config, None if initial is None else bound, spec)


def summary(path: Path, checked: Checked) -> Iterator[str]:
    """For people, a line for each thing that is worth a second look."""
    config = checked.config
    yield f"{path}: the task {config.task!r} is right"
    lane = f"{config.lane} lane"
    cohort = config.cohort
    yield (
        f"  {config.rounds} rounds of {cohort.size} uploads ({cohort.assigned} asked, "
        f"{cohort.minimum} at least) in {config.round_seconds:g} s, {lane}, strategy "
        f"{' of '.join(_strategies(config.strategy))}"
    )
    names = dict.fromkeys(profile.name for profile in config.every_profile)
    yield f"  profiles: {', '.join(names)}"
    yield from _rates(checked)
    if not config.training.restricted:  # else nothing is trained that is not sent
        yield from _warnings({each.name: each for each in config.every_profile}.values())
    yield from _participations(config)
    if config.retention is None:
        yield "  files stay of all versions"
    else:
        every = config.retention.every
        besides = "" if every is None else f", one of every {every}"
        yield f"  files stay of the newest {config.retention.last} versions{besides}"
    if checked.max_upload is None:
        yield "  sizes and names of tensors are not checked: give the model with --model"
    else:
        yield f"  an upload takes {checked.max_upload:,} bytes at most"
    if checked.spec is not None:
        yield from _untrained(checked.spec)
        if config.lane == "masked" and has_statistics(checked.spec):
            yield from _masked_statistics(config)


def _strategies(config: Mapping[str, Any]) -> Iterator[str]:
    """Their ids, from the outermost in."""
    yield config["id"]
    if isinstance(inner := config.get("inner"), Mapping):
        yield from _strategies(inner)


def _rates(checked: Checked) -> Iterator[str]:
    """The gap and the budget of `auto`, if the task has it, and a warning of a small one."""
    config = checked.config
    auto = automatic(config.policies)
    if auto is None:
        return
    ladder = tuple(map(Profile.model_validate, rate_levels(100.0)[: len(config.profiles)]))
    if config.profiles != ladder:
        yield "  auto chooses one of them for each round; a gap says nothing about your own"
    else:
        yield f"  auto chooses one of them for each round, with a gap of {auto.gap:g} points"
    if auto.upload_bytes is None:
        return
    yield f"  all uploads together have a budget of {auto.upload_bytes:,} bytes"
    if config.profiles != ladder or checked.spec is None:
        return
    each = BITS[len(ladder) - 1] * checked.spec.size / 8
    least = round(config.rounds * config.cohort.size * each)
    if least > auto.upload_bytes:
        yield (
            f"  warning: {config.rounds} rounds of {config.cohort.size} uploads take some "
            f"{least:,} bytes at the most compressed profile: lower rounds or cohort.size, or "
            "raise upload_bytes or gap"
        )


def _participations(config: TaskConfig) -> Iterator[str]:
    """A warning where a device that is in every round that it may be in has no participation to
    spare for a lost attempt."""
    privacy, cohort = config.privacy, config.cohort
    if privacy is None or privacy.participations > math.ceil(config.rounds / privacy.separation):
        return
    each = privacy.participations
    if len(set(config.members)) * each >= (config.rounds + 1) * cohort.assigned:
        return
    least = max(cohort.minimum, math.ceil(config.rounds * cohort.minimum / each))
    yield (
        f"  warning: privacy.participations of {each} leaves none to spare over {config.rounds} "
        "rounds: a lost attempt costs every device that sent an upload a participation, and the "
        "task waits once too few devices have any left; without a lost attempt it takes at least "
        f"{least} devices"
    )


def _untrained(spec: ModelSpec) -> Iterator[str]:
    names = [tensor.name for tensor in spec.tensors if tensor.dtype == "float64"]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"  warning: tensor {names[0]!r}{more} of float64 will not be trained; convert to "
            "float32 if it should be"
        )


def _masked_statistics(config: TaskConfig) -> Iterator[str]:
    if "fedper" not in _strategies(config.strategy):
        yield (
            "  warning: the model has BatchNorm, whose running statistics are sent in few levels "
            "under masks: use GroupNorm or LayerNorm, or keep them on the devices (`personal` of "
            "fedper)"
        )


def _warnings(profiles: Iterable[Profile]) -> Iterator[str]:
    for profile in profiles:
        made = profile.compressor
        lost = 0.0 if "basis" in made.needs else never_sent(made)
        if lost > MOST_NEVER_SENT:
            name = made.wire_id
            around = properties(made).suits_feedback
            advice = "put error_feedback around it" if around else "choose a higher rate"
            yield (
                f"  warning: profile {profile.name!r} sends {name} without error feedback, which "
                f"never sends {lost:.0%} of a typical update; {advice}"
            )


def _fields(path: Path) -> dict[str, Any]:
    data = read(path)
    if len(data) > _MOST_BYTES:
        raise ConfigurationError(f"{path} has {len(data)} bytes, more than any task's file")
    is_yaml = path.suffix.lower() in _YAML
    try:
        text = data.decode()
        fields = _from_yaml(text) if is_yaml else json.loads(text, object_pairs_hook=unrepeated)
    except (ValueError, RecursionError) as exc:
        kind = "YAML" if is_yaml else "JSON"
        reason = " ".join(str(exc).split())
        raise ConfigurationError(f"{path} is not {kind}: {reason}") from exc
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{path} holds a {type(fields).__name__}, not a task's fields")
    return fields


def _from_yaml(text: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as exc:
        needs("server", exc)

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise ValueError(f"line {event.start_mark.line + 1}: an anchor; write it out")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if repr(key.value) in seen:
                    raise ValueError(f"line {key.start_mark.line + 1}: {key.value} is there twice")
                seen.add(repr(key.value))
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
    try:
        return yaml.load(text, Loader)  # noqa: S506
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc
