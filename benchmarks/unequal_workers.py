"""Compares a balanced run of three unequal workers with the ideal one, and with plain BSP.

Three worker processes with CPU quotas in the proportion 0.7 : 0.7 : 0.3 train a network of a few
CPU milliseconds per sample with X = 192. In the middle of the run, worker 0 and the slow worker 2
swap speeds. Prints, from the run records:

- ideal_busy_share before and after the swap: the smallest possible busy time of
  the slowest worker, under the costs measured in the run, over the achieved step (the all-reduce
  counts as loss);
- the same for plain BSP, which waits for its slowest worker;
- the number of steps after the swap until every worker's batch is within 10 % of the new balance.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import TYPE_CHECKING

from recorded import run_recorded

if TYPE_CHECKING:
    from lbbsp_core.runtime.record.record import Run, StepLine

SPEEDS, SWAPPED = (0.7, 0.7, 0.3), (0.3, 0.7, 0.7)
X = 192
START_SECONDS = 10.0
"""Approximate time from the launch to the first step."""


def train(policy: str, steps: int, channels: int) -> None:
    """Trains as one of the workers."""
    import tensorflow as tf
    from networks import SAMPLES, convolutional, data

    import lbbsp_core
    import lbbsp_tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    chosen = lbbsp_core.Even() if policy == "even" else None
    balancer = lbbsp_tf.LoadBalancer(strategy, X, policy=chosen)
    x, y = data()
    repeats = -(-steps * X // SAMPLES)  # one long epoch
    feed = balancer.dataset(x.repeat(repeats, 0)[: steps * X], y.repeat(repeats)[: steps * X])
    convolutional(strategy, channels).fit(
        feed, steps_per_epoch=balancer.steps_per_epoch, callbacks=[balancer], verbose=0
    )


def run(policy: str, options: argparse.Namespace, swap: float | None) -> Run:
    """Launches the workers and returns their record."""
    given = ["--worker", policy, "--steps", str(options.steps)]
    return run_recorded(
        [__file__, *given, "--channels", str(options.channels)],
        3,
        verbose=options.verbose,
        speeds=SPEEDS,
        speeds_at=[(swap, SWAPPED)] if swap else [],
        timeout=600,
    )


def swap_step(steps: list[StepLine]) -> int:
    """Returns the first step after the swap, when the slow worker's cost per sample falls."""
    costs = [step.busy_seconds[2] / step.sizes[2] for step in steps]
    slow, fast = median(costs[5:15]), median(costs[-15:])
    if fast > 0.7 * slow:
        sys.exit("the swap happened before or after the steps: choose another --swap-at")
    border = (slow * fast) ** 0.5
    return next(k for k in range(5, len(costs)) if all(c < border for c in costs[k : k + 3]))


def steps_to_adapt(steps: list[StepLine], swap: int) -> int:
    """Returns the steps from the swap until each batch is within 10 % of the new balance."""
    goal = [median(step.sizes[rank] for step in steps[-20:]) for rank in range(3)]

    def near(step: StepLine) -> bool:
        return all(abs(x - g) <= 0.1 * g for x, g in zip(step.sizes, goal, strict=True))

    return next(k for k, step in enumerate(steps[swap:]) if near(step))


def main() -> None:
    """Runs both policies and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--channels", type=int, default=48)
    parser.add_argument(
        "--swap-at", type=float, help="seconds after the launch (default: in mid-run)"
    )
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.worker:
        train(options.worker, options.steps, options.channels)
        return

    from lbbsp_core.report.summary import summarise
    from lbbsp_core.runtime.record.record import Run

    steps, options.steps = options.steps, options.steps // 2
    even = summarise(run("even", options, None))
    options.steps = steps
    balanced_step = even.step_seconds * 3 * min(SPEEDS) / sum(SPEEDS)
    mid_run = START_SECONDS + 0.5 * steps * balanced_step
    balanced = run("lbbsp", options, options.swap_at or mid_run)
    swap = swap_step(balanced.steps)
    before = summarise(Run(balanced.header, balanced.steps[5:swap]))
    after = summarise(Run(balanced.header, balanced.steps[swap + 10 :]))
    ideal = before.ideal_busy_seconds
    work = sum(b / x for b, x in zip(even.busy_seconds, [X / 3] * 3, strict=True))
    print(f"quotas {SPEEDS}, X = {X}, swap at step {swap}")
    print("plans around the swap", [s.sizes for s in balanced.steps[swap - 1 : swap + 8]])
    answers = {
        "seconds per sample, summed over workers": f"{work:.5f}",
        "step, balanced": f"{before.step_seconds:.3f} s",
        "step, plain BSP": f"{even.step_seconds:.3f} s",
        "communication (last arrival to release)": f"{before.communication_seconds * 1e3:.1f} ms",
        "ideal_busy_share": f"{before.ideal_busy_share:.3f}",
        "  after the swap": f"{after.ideal_busy_share:.3f}",
        "  of plain BSP, by the costs of the balanced run": f"{ideal / even.step_seconds:.3f}",
        "efficiency": f"{before.efficiency:.3f}",
        "steps to adapt after the swap": steps_to_adapt(balanced.steps, swap),
    }
    for question, answer in answers.items():
        print(f"{question:<48} {answer}")


if __name__ == "__main__":
    main()
