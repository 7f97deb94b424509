"""Writes audit.json: an audit log of three entries, as docs/audit.md describes it.

Run from the repository's root. Released vectors do not change.
"""

import json
from pathlib import Path

from fedpress_protocols.audit import BEFORE_THE_FIRST, digest_of

SAID = [
    (1_800_000_000_000, "server", "server.started", "api-1", {"role": "all"}),
    (1_800_000_001_250, "settings-token", "operator.created", "5f1c", {"note": "Zoë, €", "n": 1}),
    (1_800_000_002_000, "operator:5f1c", "task.created", "digits", {"rounds": 30, "b": [None]}),
]


def main() -> None:
    lines, previous = [], BEFORE_THE_FIRST
    for seq, (at, actor, action, subject, details) in enumerate(SAID, start=1):
        fields = {
            "seq": seq,
            "at": at,
            "actor": actor,
            "action": action,
            "subject": subject,
            "details": details,
            "previous": previous,
        }
        previous = digest_of(fields)
        lines.append({**fields, "hash": previous})
    text = json.dumps({"entries": lines}, indent=1, ensure_ascii=False) + "\n"
    (Path(__file__).parent / "audit.json").write_text(text)


if __name__ == "__main__":
    main()
