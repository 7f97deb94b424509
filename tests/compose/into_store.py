"""Put the files of a server's data folder into the store that its settings name.

python into_store.py FOLDER       with FEDPRESS_STORE_* in the environment
"""

import sys
from pathlib import Path

from fedpress_server import Settings
from fedpress_server.storage.bucket import opened_payloads


def main(folder: Path) -> None:
    store = opened_payloads(Settings.load())
    for kind in ("models", "optimizers", "uploads"):
        for file in sorted(each for each in (folder / kind).rglob("*") if each.is_file()):
            store.put(file.relative_to(folder).as_posix(), file.read_bytes())


main(Path(sys.argv[1]))
