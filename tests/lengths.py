"""How long tests take: short under `make test`, longer under `make test-slow` and `make soak`."""

import os

SLOW = os.environ.get("FEDPRESS_SLOW") == "1"
SOAK = os.environ.get("FEDPRESS_SOAK") == "1"


def examples(short: int, long: int) -> int:
    """How many examples hypothesis draws of a test that has a number of its own."""
    return long if SLOW or SOAK else short
