"""The part that the demos' screens share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live


class LiveScreen(ABC):
    """A display that `update` renews in place in a terminal; elsewhere it prints lines."""

    def __init__(self, console: Console) -> None:
        self._console, self._printed = console, 0
        self._live = Live(console=console, refresh_per_second=8) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
            self.update()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self.update()
            self._live.stop()

    @abstractmethod
    def update(self) -> None:
        """Show what is known by now."""
