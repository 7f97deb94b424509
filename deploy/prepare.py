"""Before anything starts: refuse secrets that are none, and give the store its bucket.

Run in the server's image, with the server's settings. PostgreSQL keeps the password that it was
first started with, so that a placeholder has to be refused before.
"""

import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fedpress_protocols.errors import ConfigurationError
from fedpress_server import Settings

STORE = Path("/data")
PASSWORD = Path("/run/secrets/database-password")


def main() -> None:
    try:
        settings = Settings.load()
        in_url = unquote(urlsplit(settings.database_url).password or "")
        if settings.admin_token is None:
            raise ConfigurationError("secrets/admin-token is missing")
        if in_url != PASSWORD.read_text().strip():
            raise ConfigurationError(
                "secrets/database-url has another password than secrets/database-password",
                hint="write the same in both; deploy/make-secrets does",
            )
    except ConfigurationError as exc:
        sys.exit(f"fedpress: {exc}")
    (STORE / urlsplit(settings.store_url).netloc).mkdir(exist_ok=True)
    print("the secrets are in order and the store has its bucket")


main()
