"""Run record of a session, written by worker 0."""

from __future__ import annotations

from collections.abc import Callable

from lbbsp_core.runtime.extensions.base import StepExtension
from lbbsp_core.runtime.record.record import RunHeader
from lbbsp_core.runtime.record.writer import RunRecord, open_record


class Recording(StepExtension):
    """Opens the run record in the first training, if one is wanted."""

    _record: RunRecord | None = None

    def started(self, header: Callable[[], RunHeader]) -> None:
        """Opens the record."""
        path = self.session.options.record_path()
        if path is not None and self.session.rank == 0 and self._record is None:
            self._record = open_record(path, header())
            self.session.observers.append(self._record.write)
