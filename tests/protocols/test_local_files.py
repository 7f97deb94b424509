"""A secret that everybody can read is refused, and one that an orchestrator gives is not."""

import errno
import os
import threading
from pathlib import Path

import pytest

from fedpress_protocols import local_files
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.local_files import check_private, is_exposed, remove_file, replace_file
from tests.systems import posix_only


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Readable by everybody, in folders that let everybody through."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    file = tmp_path / "secret"
    file.write_text("secret")
    file.chmod(0o644)
    return file


@posix_only
def test_a_file_is_exposed_if_others_can_read_and_reach_it(secret: Path, tmp_path: Path) -> None:
    assert is_exposed(secret)
    with pytest.raises(ConfigurationError, match=r"admin_token.*mode is 0644.*chmod 0600"):
        check_private(secret, "admin_token")
    tmp_path.chmod(0o700)
    assert not is_exposed(secret)
    tmp_path.chmod(0o711)
    for mode in (0o600, 0o640):
        secret.chmod(mode)
        check_private(secret, "admin_token")


@posix_only
def test_a_link_is_as_exposed_as_what_it_leads_to(secret: Path, tmp_path: Path) -> None:
    link, private = tmp_path / "link", tmp_path / "private"
    link.symlink_to(secret)
    assert is_exposed(link)
    private.mkdir(mode=0o700)
    secret.rename(private / "secret")
    link.unlink()
    link.symlink_to(private / "secret")
    assert not is_exposed(link)


def test_what_is_no_file_or_is_not_there_is_for_others_to_say(tmp_path: Path) -> None:
    check_private(tmp_path / "none", "a key")
    check_private(tmp_path, "a key")


@posix_only
def test_a_read_only_mount_holds_what_an_orchestrator_gave(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.statvfs(secret)
    fields = list(found)
    fields[8] = found.f_flag | os.ST_RDONLY
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    assert not is_exposed(secret)


def test_a_lock_that_cannot_wait_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, where no call waits for as long as it takes."""
    answers = iter((False, False, True))
    monkeypatch.setattr(local_files, "try_lock", lambda descriptor, wait: next(answers))
    descriptor = local_files.open_lock(tmp_path / "lock")
    with local_files.locked(descriptor):
        assert next(answers, None) is None
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the text is the system's
        os.fstat(descriptor)
    assert caught.value.errno == errno.EBADF


def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    first, second = (local_files.open_lock(tmp_path / "lock") for _ in range(2))
    with local_files.locked(first):
        assert not local_files.try_lock(second)
    with local_files.locked(second):
        pass


@pytest.mark.parametrize("change", ["replace", "remove"])
def test_a_file_that_somebody_reads_is_replaced_and_removed(change: str, tmp_path: Path) -> None:
    """On Windows once they have closed it."""
    file, new = tmp_path / "file", tmp_path / "new"
    file.write_text("old")
    new.write_text("new")
    reader = file.open("rb")
    closing = threading.Timer(0.1, reader.close)
    closing.start()
    if change == "replace":
        replace_file(new, file)
        assert file.read_text() == "new"
    else:
        remove_file(file)
        assert not file.exists()
    closing.join()


def test_windows_is_asked_again_while_a_file_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, real, refusals = tmp_path / "new", os.replace, 3

    def busy(source: Path, target: Path) -> None:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise PermissionError(13, "The process cannot access the file")
        real(source, target)

    monkeypatch.setattr("fedpress_protocols.local_files.sys.platform", "win32")
    monkeypatch.setattr(os, "replace", busy)
    new.write_text("new")
    replace_file(new, tmp_path / "old")
    assert (tmp_path / "old").read_text() == "new"
    refusals = 10**9
    monkeypatch.setattr(local_files, "_PATIENCE", 0.05)
    new.write_text("newer")
    with pytest.raises(PermissionError):
        replace_file(new, tmp_path / "old")
    assert (tmp_path / "old").read_text() == "new"
