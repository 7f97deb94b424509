"""Names of all files in the store, made of ids and digests; see `payloads`."""

from __future__ import annotations

from fedpress_server.storage.records import RoundKey


def model_name(digest: str) -> str:
    return f"models/{digest}.safetensors"


def optimizer_name(digest: str) -> str:
    return f"optimizers/{digest}.safetensors"


def artefact_name(digest: str) -> str:
    """The name of a plan's artefact."""
    return f"artefacts/{digest}"


def bases_folder(task: str) -> str:
    return f"bases/{task}"


def base_name(task: str, client_id: str, digest: str) -> str:
    """The name of a client's last included update, decoded."""
    return f"{bases_folder(task)}/{client_id}-{digest}"


def uploads_folder(key: RoundKey) -> str:
    task, number, attempt = key
    return f"uploads/{task}/{number}-{attempt}"


def upload_name(key: RoundKey, assignment: str, digest: str) -> str:
    """The name of an upload; concurrent different bodies of one assignment have different names."""
    return f"{uploads_folder(key)}/{assignment}-{digest}"


def parts_folder(partial: str = "") -> str:
    """The folder of one upload in parts, or of all."""
    return f"parts/{partial}" if partial else "parts"


def part_name(partial: str, start: int, digest: str) -> str:
    """The name of a part; concurrent different parts for one offset have different names."""
    return f"{parts_folder(partial)}/{start:016d}-{digest}"


def coded_folder(task: str) -> str:
    return f"coded/{task}"


def coded_name(task: str, model: str, base: str | None, coder: str) -> str:
    """The name of a model coded by the task's coder: whole, or as the difference to `base`."""
    of = model if base is None else f"{model}-{base}"
    return f"{coded_folder(task)}/{of}.{coder}"


def trained_name(task: str, model: str, base: str) -> str:
    """The name of a model's trained tensors, for devices that have its base."""
    return f"{coded_folder(task)}/{model}.{base}.trained"
