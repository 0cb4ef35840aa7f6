"""Compares steps with and without the second exchange of messages (`fresh_drivers`) in one job.

    python benchmarks/driver_exchange.py [--steps 900] [--workers 3] [--channels 40]

The job of `contention.py`, with the default predictor: Keras workers, beside whom neighbours start
and stop. Three workers have CPU quotas; as many workers as cores have cores of their own. In turns
of ten steps the messages are exchanged once, with the gradients, or twice. Prints means of the
steps whose plan was decided in the same turn:

- error: root mean square of predicted / measured busy seconds - 1;
- efficiency: the time in which the workers would have finished together, over that of the slowest;
- gap: from the end of the slowest worker to the next step;
- step / ideal: wall time over the time in which the workers would have finished together.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import contention
import numpy as np

TURN, WARM_UP = 10, 100


def is_second(step: int) -> bool:
    """Returns whether messages are exchanged twice at the end of a step."""
    return step // TURN % 2 == 1


def train(options: argparse.Namespace) -> None:
    """Trains as one of the workers."""
    import lbbsp_core
    from lbbsp_core.runtime.session import WorkerSession

    allowed = WorkerSession._may_exchange_again
    WorkerSession._may_exchange_again = lambda self: (
        allowed(self) and is_second(self._balancer.step)
    )
    options.fresh_drivers = True
    contention.train(options, lbbsp_core.Mixture())


def main() -> None:
    """Runs the job and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--channels", type=int, default=40)
    parser.add_argument("--policy", choices=("lbbsp", "bsp"), default="lbbsp")
    parser.add_argument("--contention", default="bursty:1")
    parser.add_argument("--verbose", action="store_true")
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
        sizes = np.array([line.sizes for line in lines])
        walls = np.array([line.wall_seconds for line in lines])
        ratios = np.array([line.predicted_seconds for line in lines], float) / busy
        error = np.sqrt(np.nanmean((ratios - 1) ** 2))
        ideal = (sizes.sum(axis=1) / (sizes / busy).sum(axis=1)).mean()
        slowest, wall = busy.max(axis=1).mean(), walls.mean()
        cells = [f"{error:.3f}", f"{ideal / slowest:.3f}", f"{1000 * (wall - slowest):.0f} ms",
                 f"{wall:.3f} s", f"{wall / ideal:.3f}"]  # fmt: skip
        print(f"| {'two' if second else 'one'} | {len(lines)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
