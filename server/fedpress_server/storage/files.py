"""Where everything that stays lies, by name; see `payloads`. Names are made of ids and digests."""

from __future__ import annotations

from fedpress_server.storage.records import RoundKey


def model_name(digest: str) -> str:
    return f"models/{digest}.safetensors"


def optimizer_name(digest: str) -> str:
    return f"optimizers/{digest}.safetensors"


def artefact_name(digest: str) -> str:
    """Of what a plan names besides models."""
    return f"artefacts/{digest}"


def bases_folder(task: str) -> str:
    return f"bases/{task}"


def base_name(task: str, client_id: str, digest: str) -> str:
    """Of what a client's last included upload stood for."""
    return f"{bases_folder(task)}/{client_id}-{digest}"


def uploads_folder(key: RoundKey) -> str:
    task, number, attempt = key
    return f"uploads/{task}/{number}-{attempt}"


def upload_name(key: RoundKey, assignment: str, digest: str) -> str:
    """Two different bodies sent at once under one assignment lie in two files."""
    return f"{uploads_folder(key)}/{assignment}-{digest}"


def parts_folder(partial: str = "") -> str:
    """Of one upload by parts, or of all."""
    return f"parts/{partial}" if partial else "parts"


def part_name(partial: str, start: int, digest: str) -> str:
    """Two different parts sent at once for one place lie in two files."""
    return f"{parts_folder(partial)}/{start:016d}-{digest}"


def coded_folder(task: str) -> str:
    return f"coded/{task}"


def coded_name(task: str, model: str, base: str | None, coder: str) -> str:
    """Of a model whole, or as the difference to `base`, in the form that the task's coder makes."""
    of = model if base is None else f"{model}-{base}"
    return f"{coded_folder(task)}/{of}.{coder}"
