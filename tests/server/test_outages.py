"""What an operator mends is said when it begins and when it is over, and nothing else of it."""

import errno
import logging
from pathlib import Path

import pytest

from fedpress_protocols.errors import StorageFull, Unavailable
from fedpress_server.observing import outages
from fedpress_server.observing.outages import Outage
from tests.server.in_process import Clock

log = logging.getLogger("fedpress_server.test")


def test_an_outage_is_two_lines_however_often_it_is_met(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    outage = Outage(log, "it is out: %s", "it is back", quiet=10.0, clock=clock)
    outage.worked()
    for number in range(5):
        outage.failed(f"reason {number}")
        clock.advance(4)
        outage.worked()  # something small went through, as on a full disk
    assert caplog.messages == ["it is out: reason 0"]
    clock.advance(6)
    outage.worked()
    outage.worked()
    assert caplog.messages == ["it is out: reason 0", "it is back"]
    outage.failed("again")
    assert caplog.messages[2:] == ["it is out: again"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_a_failure_is_recent_for_a_while_also_once_the_outage_is_over(clock: Clock) -> None:
    outage = Outage(log, "it is out: %s", "it is back", quiet=10.0, clock=clock)
    assert not outage.has_failed_within(60.0)
    outage.failed("reason")
    clock.advance(50)
    outage.worked()
    assert outage.has_failed_within(60.0)
    clock.advance(11)
    assert not outage.has_failed_within(60.0)


def test_the_page_on_a_full_disk_quotes_what_is_printed() -> None:
    page = Path(__file__).parents[2] / "docs" / "operations" / "disk-full.md"
    text = " ".join(page.read_text().split())
    assert outages.MAKE_ROOM % "no space is left on the server (/var/lib/fedpress)" in text
    assert "/var/lib/fedpress has disk space again" in text
    assert "the database has disk space again" in text


@pytest.mark.parametrize(
    ("exc", "level", "has_traceback"),
    [
        (Unavailable("the database does not answer", retry_after=5), "DEBUG", False),
        (StorageFull("no space is left on the server", retry_after=60), "DEBUG", False),
        (OSError(errno.ENOSPC, "No space left on device"), "WARNING", False),
        (OSError(errno.EIO, "Input/output error"), "ERROR", True),
        (KeyError("round"), "ERROR", True),
    ],
)
def test_what_is_no_outage_keeps_its_traceback(
    caplog: pytest.LogCaptureFixture, exc: Exception, level: str, has_traceback: bool
) -> None:
    caplog.set_level(logging.DEBUG, log.name)
    outages.tell(log, exc, "task %s cannot be %s", "digits", "followed")
    [record] = caplog.records
    assert record.levelname == level
    assert (record.exc_info is not None) is has_traceback
    assert record.getMessage().startswith("task digits cannot be followed")
    assert has_traceback or str(exc) in record.getMessage()
