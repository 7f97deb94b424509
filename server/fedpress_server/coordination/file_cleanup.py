"""Files that nothing leads to any more: removed at once where that is safe, or left to a sweep."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.background import Background
from fedpress_server.coordination.live import LiveTask, Memory
from fedpress_server.registry.sweeping import sweep, sweep_bases
from fedpress_server.storage.database import Database
from fedpress_server.storage.payloads import Payloads

SWEEP_SECONDS = 3600.0

_log = logging.getLogger(__name__)


class FileCleanup:
    """Removes files that nothing leads to.

    Other servers' tasks may come to lead to the very same file, and no step waits for a network:
    there, and while a backup is under way, files are left to the sweep."""

    def __init__(
        self,
        memory: Memory,
        database: Database,
        payloads: Payloads,
        background: Background,
        clock: Callable[[], float],
        *,
        is_shared: bool,
    ) -> None:
        self._tasks = memory.tasks
        self._database = database
        self._payloads = payloads
        self._background = background
        self._clock = clock
        self._is_shared = is_shared
        self._swept_at = clock()
        self._left_at: float | None = None
        """When the first of the files were left that wait for a sweep."""

    @property
    def _drops_at_once(self) -> bool:
        return not self._is_shared and self._payloads.is_local

    def leave(self) -> None:
        """To the sweep."""
        if self._left_at is None:
            self._left_at = self._clock()

    def drop(self, task: LiveTask, files: set[str], *, keeps: bool) -> None:
        """Remove what `task` led to and has replaced, unless another may lead to it; left to the
        sweep if a backup under way `keeps` it, see restores.py.

        An aggregation in progress may be making the very same: what stays for it is swept later.
        Nothing else may come in between, so this is not left to a thread.
        """
        if keeps or not self._drops_at_once:
            if files:
                self.leave()
            return
        others = [other for other in self._tasks.values() if other is not task]
        if any(each.attempt and each.attempt.round.phase == "folding" for each in others):
            if files:
                self.leave()
            return
        for name in files.difference(*(other.files for other in others)):
            try:
                self._payloads.drop(name)
            except OSError:  # the step is on the disk already
                _log.exception("%s could not be removed", name)
                self.leave()

    def end(self, previous: Attempt, follows: Attempt | None, *, keeps: bool) -> None:
        """Remove the bodies of an attempt that is over: its rows stay, and with them the answers to
        repeated requests; the bytes have done their work."""
        if "own" in previous.terms.plan.needs:
            if keeps or not self._drops_at_once:
                self.leave()
            else:
                # Nor is this left to a thread: the next aggregation may be writing there.
                bases: Mapping[str, str] = {} if follows is None else follows.terms.bases
                try:
                    sweep_bases(self._payloads, previous.key[0], bases)
                except OSError:  # the step is on the disk already
                    _log.exception("bases of task %s could not be removed", previous.key[0])
                    self.leave()
        if keeps:
            self.leave()
            return
        self._background.finish(self._drop_spent(previous.spent(follows)))

    async def _drop_spent(self, names: Iterable[str]) -> None:
        """Remove files beside the round that follows; what fails is left to the sweep."""
        try:
            for name in names:
                await self._background.in_thread(self._payloads.drop, name)
        except Exception as exc:
            _log.warning("uploads of a round that is over could not be removed yet: %s", exc)
            self.leave()

    async def sweep_if_due(self) -> None:
        """Remove what has lain there for a while, now and then; of one server only where files
        were left."""
        now = self._clock()
        if self._is_shared:
            if now >= self._swept_at + SWEEP_SECONDS:
                self._swept_at = now
                await self.sweep()
        elif self._left_at is not None and now > self._left_at + SWEEP_SECONDS:
            self._left_at = None
            is_swept = False
            try:
                is_swept = await self.sweep()
            finally:
                if not is_swept:
                    self._left_at = now

    async def sweep(self) -> bool:
        """Sweep beside what is being written, see `registry.sweeping`."""
        return await sweep(self._database, self._payloads, self._clock(), SWEEP_SECONDS)
