"""`Client.model`: the newest published model as this device uses it, from any thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from fedpress_client.client_terms import personalised
from fedpress_client.enrolment import Enrolment
from fedpress_client.joined_task import only_task
from fedpress_client.ledger import Ledger
from fedpress_client.published import PublishedModel
from fedpress_client.settings import Services
from fedpress_client.transport import Transport
from fedpress_protocols.errors import ConfigurationError, UnknownDevice
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey

Connect = Callable[[DeviceKey], AbstractContextManager[Transport]]
"""Opens a connection, signed by a key, that only the caller uses."""


class ModelReader:
    """Reads published models over connections of its own, beside the thread that trains."""

    def __init__(self, services: Services, enrolment: Enrolment, connect: Connect) -> None:
        settings = services.settings
        self._directory, self._enrolment, self._connect = services.directory, enrolment, connect
        self._prefers_masked = settings.masking_rules.required
        self._key = enrolment.key
        self._published = PublishedModel(
            services.directory, self._open, settings.clock, settings.max_model_bytes
        )
        self._peeked: tuple[tuple[int, int] | None, Ledger] | None = None

    def read(self, task: str | None, account: Ledger, max_age: float) -> Model:
        """See `Client.model`; `account` is the one in memory, unnamed before the task is joined."""
        if not max_age >= 0:
            raise ConfigurationError(f"max_age must be 0 seconds or more, not {max_age}")
        if self._directory.identity() is None or task is None:
            with self._open() as transport:
                self._enrolment.identify(transport)
                if task is None:
                    task = only_task(transport.tasks(), prefers_masked=self._prefers_masked)
        try:
            model = self._published.get(task, max_age)
        except UnknownDevice:
            key = self._directory.key()
            if key.key_id == self._key.key_id:
                raise
            self._key = key  # this process or another one has changed it
            model = self._published.get(task, max_age)
        if not account.client_id:
            account = self._account(task)
        return personalised(model, account)

    def _account(self, task: str) -> Ledger:
        """As the process that trains saved it last."""
        stamp = self._directory.account_stamp(task)
        if self._peeked is None or self._peeked[0] != stamp or self._peeked[1].task != task:
            self._peeked = stamp, self._directory.peek(task) or Ledger(task, "")
        return self._peeked[1]

    def _open(self) -> AbstractContextManager[Transport]:
        return self._connect(self._key)
