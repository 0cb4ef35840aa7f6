"""Compares steps with and without the second exchange of messages (`fresh_drivers`) in one job.

    python benchmarks/driver_exchange.py [--steps 900] [--workers 3] [--channels 40]

The job of `contention.py`, with the default predictor: Keras workers, beside whom neighbours start
and stop. Three workers have CPU quotas; as many workers as cores have cores of their own. In turns
of ten steps the messages are exchanged once, with the gradients, or twice. Each kind of turn has a
predictor of its own; both learn from all steps, one with the driving factors from where the
barriers were reached, the other one with those from where they were left. Prints means of the steps
whose plan was decided in the same turn:

- error: root mean square of predicted / measured busy seconds - 1;
- efficiency: the time in which the workers would have finished together, over that of the slowest;
- gap: from the end of the slowest worker to the next step;
- step / ideal: wall time over the time in which the workers would have finished together.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import contention
import numpy as np

if TYPE_CHECKING:
    from lbbsp_core.predict import Predictor
    from lbbsp_core.types import Measurement

TURN, WARM_UP = 10, 100


def is_second(step: int) -> bool:
    """Returns whether messages are exchanged twice at the end of a step."""
    return step // TURN % 2 == 1


@dataclass
class Both:
    """Forecasts from the driving factors of a reached barrier, and then from those of a left one.

    Args:
        once: Predictor for the former.
        twice: Predictor for the latter.
    """

    once: Predictor
    twice: Predictor
    is_left: bool = field(default=False, repr=False)
    reached: tuple[float, ...] = field(default=(), repr=False)
    left: tuple[float, ...] = field(default=(), repr=False)

    def init(self) -> tuple[Any, Any]:
        """Returns the states of both predictors."""
        return self.once.init(), self.twice.init()

    def update(self, state: tuple[Any, Any], measurement: Measurement) -> tuple[Any, Any]:
        """Lets each predictor learn with its own driving factors of the last barrier."""
        return (
            self.once.update(state[0], replace(measurement, drivers=self.reached)),
            self.twice.update(state[1], replace(measurement, drivers=self.left)),
        )

    def predict(
        self, state: tuple[Any, Any], drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> float:
        """Returns the forecast of the predictor that these driving factors are for."""
        if self.is_left:
            self.left = drivers
            return self.twice.predict(state[1], drivers, horizon)
        self.reached = drivers
        return self.once.predict(state[0], drivers, horizon)


def train(options: argparse.Namespace) -> None:
    """Trains as one of the workers."""
    import lbbsp_core
    from lbbsp_core.runtime.loop.session import WorkerSession

    both = Both(lbbsp_core.Mixture(), lbbsp_core.Mixture())
    allowed, report, leave = (
        getattr(WorkerSession, name)
        for name in ("_may_exchange_again", "_report", "_leave_barrier")
    )

    def at_reached_barrier(session: WorkerSession, *flags: Any) -> Any:
        both.is_left = False
        return report(session, *flags)

    def at_left_barrier(session: WorkerSession) -> float:
        seconds = leave(session)
        both.is_left, both.left = True, session._meter.sample()  # in all turns, for `twice`
        return seconds

    WorkerSession._may_exchange_again = lambda self: (
        allowed(self) and is_second(self._balancer.step)
    )
    WorkerSession._report, WorkerSession._leave_barrier = at_reached_barrier, at_left_barrier
    options.fresh_drivers = True
    contention.train(options, both)


def main() -> None:
    """Runs the job and prints the table."""
    parser = contention.job_parser(__doc__, steps=900)
    parser.add_argument("--workers", type=int, default=3)
    options = parser.parse_args()
    if options.worker:
        train(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        run = contention.run(options, Path(folder), __file__)
    print("| exchanges | steps | error | efficiency | gap | step | step / ideal |")
    print("|---|---|---|---|---|---|---|")
    for second in (False, True):
        lines = [
            line
            for line in run.steps[WARM_UP:]
            if line.is_regular and second == is_second(line.step) == is_second(line.step - 1)
        ]
        busy = np.array([line.busy_seconds for line in lines])
        walls = np.array([line.wall_seconds for line in lines])
        ratios = np.array([line.predicted_seconds for line in lines], float) / busy
        error = np.sqrt(np.nanmean((ratios - 1) ** 2))
        ideal = np.mean([contention.ideal_seconds(line) for line in lines])
        slowest, wall = busy.max(axis=1).mean(), walls.mean()
        cells = [f"{error:.3f}", f"{ideal / slowest:.3f}", f"{1000 * (wall - slowest):.0f} ms",
                 f"{wall:.3f} s", f"{wall / ideal:.3f}"]  # fmt: skip
        print(f"| {'two' if second else 'one'} | {len(lines)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
