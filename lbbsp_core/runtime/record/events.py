"""Events of a run between its steps: how many are planned, and how the run ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

PLANNED: Final = "planned"
"""The training that begins has a known number of steps."""

FINISHED: Final = "finished"
"""The script of rank 0 ended well."""

FAILED: Final = "failed"
"""The process of rank 0 ended with an error, also because it had lost another worker."""

INTERRUPTED: Final = "interrupted"
"""The process of rank 0 ended at SIGINT or SIGTERM, or because all workers had to leave."""

ENDS: Final = (FINISHED, FAILED, INTERRUPTED)
"""Events that end a run. A process that is killed leaves none."""


@dataclass(frozen=True, kw_only=True)
class EventLine:
    """Event of a run between its steps.

    Args:
        event: ``"planned"``, or how the run ended: ``"finished"``, ``"failed"`` or
            ``"interrupted"``.
        steps: Of ``"planned"``: the number of global steps, counted over the whole run, after
            which the training ends, unless something stops it before.
        time: Unix time of the event, by the clock of rank 0.
    """

    event: str
    steps: int | None = None
    time: float


class Stop(NamedTuple):
    """End of an attempt at a run.

    Args:
        step: Last step of the attempt that was recorded.
        reason: Why all workers stopped together; None if it ended otherwise, as by a failure.
    """

    step: int
    reason: str | None
