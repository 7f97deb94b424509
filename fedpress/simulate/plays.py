"""Plays as text, read by role.

A folder has .txt files, or a plays.tar.xz of them. In a play a speech begins with a line
`NAME<tab>text` and goes on over lines that begin with a tab. What stands before the first heading
(ACT, SCENE, ...) and stage directions in brackets are left out.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LARGEST_FILE = 64 * 2**20
_SPEECH = re.compile(r"^([A-Z][A-Za-z .'\-]+)\t(.*)")
_HEADING = re.compile(r"^\s*(ACT|SCENE|EPILOGUE|PROLOGUE)\b")


class Role(NamedTuple):
    """A role of a play, and all its lines."""

    play: str
    """The file's name without its ending."""
    name: str
    text: str


def roles(folder: Path) -> Iterator[Role]:
    """The roles of all plays in a folder, in the order of plays and of first lines."""
    for play, text in _plays(folder):
        speeches: dict[str, list[str]] = {}
        speaker: str | None = None
        lines = text.splitlines()
        acts = (place for place, line in enumerate(lines) if _HEADING.match(line))
        for line in lines[next(acts, len(lines)) :]:  # before them stand the persons
            begins = _SPEECH.match(line)
            if _HEADING.match(line) or not line.strip():
                speaker = None if _HEADING.match(line) else speaker
            elif begins:
                speaker = begins[1].strip()
                speeches.setdefault(speaker, []).append(begins[2])
            elif line.startswith("\t") and speaker is not None:
                speeches[speaker].append(line.strip())
            else:
                speaker = None
        for name, own in speeches.items():
            yield Role(play, name, re.sub(r"\[[^\]]*\]", "", "\n".join(own)).strip() + "\n")


def _plays(folder: Path) -> Iterator[tuple[str, str]]:
    archive = folder / "plays.tar.xz"
    if archive.exists():
        with tarfile.open(archive) as tar:
            members = sorted((m for m in tar if m.isfile()), key=lambda member: member.name)
            for member in members:
                file = tar.extractfile(member)
                if file is not None and member.name.endswith(".txt"):
                    yield Path(member.name).stem, file.read(_LARGEST_FILE).decode("latin-1")
        return
    for path in sorted(folder.glob("*.txt")):
        yield path.stem, path.read_text("latin-1")
