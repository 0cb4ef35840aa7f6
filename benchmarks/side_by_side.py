"""Launcher and report of the overhead benchmarks, which alternate between two ways to train."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

RESULT = "RESULT "


def report(name: str, stock: list[float], balanced: list[float], other: str = "balanced") -> None:
    """Prints step times, and their median ratio with its interval.

    Args:
        name: Name of what the other side is compared with, such as the stock framework.
        stock: Its seconds per step of each block.
        balanced: Seconds per step of each block of the other side.
        other: Name of the other side.
    """
    import numpy as np

    theirs, ours = np.array(stock), np.array(balanced)
    ratios = ours / theirs
    draws = np.random.default_rng(0).integers(0, len(ratios), (4000, len(ratios)))
    low, high = np.quantile(np.median(ratios[draws], axis=1), (0.025, 0.975))
    print(f"{RESULT}step, {name} {np.median(theirs) * 1e3:.1f} ms")
    print(f"{RESULT}step, {other} {np.median(ours) * 1e3:.1f} ms")
    print(
        f"{RESULT}ratio of medians {np.median(ratios):.4f}, 95 % interval {low:.4f} to {high:.4f}"
    )


def main(
    script: str,
    question: str,
    train: Callable[[int, int, int], None],
    *,
    framework: str,
    blocks: int,
    channels: int,
) -> None:
    """Launches the workers, each of which calls `train`, and prints their reports."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, default=blocks)
    parser.add_argument("--steps", type=int, default=12, help="steps in a block, a multiple of 6")
    parser.add_argument("--channels", type=int, default=channels)
    options = parser.parse_args()
    if options.worker:
        train(options.blocks, options.steps, options.channels)
        return

    from lbbsp_core.launch import cluster, launch

    names = ("blocks", "steps", "channels")
    numbers = [f"--{name}={getattr(options, name)}" for name in names]
    lines: list[str] = []
    # One thread each, as with emulated speeds, but without CPU quotas, whose periods add noise.
    os.environ.update(cluster.emulation_defaults())
    status = launch([script, "--worker", *numbers], workers=2, timeout=900, framework=framework,
                    output=lambda rank, line: lines.append(line))  # fmt: skip
    if status:
        sys.exit("\n".join(lines[-40:]))
    print("\n".join(line.removeprefix(RESULT) for line in lines if line.startswith(RESULT)))
