"""An archive of tests/golden into a folder, as if it had been left behind a minute ago.

    python3 golden_state.py ARCHIVE FOLDER

Times of the archive's clock become this machine's, but for those in signed receipts.
"""

import re
import sys
import time
import zipfile
from pathlib import Path

THEN = 1_800_000_000


def main(archive: str, folder: Path) -> None:
    with zipfile.ZipFile(archive) as golden:
        golden.extractall(folder)
    for key in folder.glob("data/*-key.pem"):
        key.chmod(0o600)
    later = int(time.time()) - 60 - THEN
    dump = folder / "database.sql"
    unsigned = re.compile(r'(?<!issued_at":)\b18000\d{5}\b')
    dump.write_text(unsigned.sub(lambda found: str(int(found[0]) + later), dump.read_text()))


main(sys.argv[1], Path(sys.argv[2]))
