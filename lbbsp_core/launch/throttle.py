"""Emulated slowness: holds each worker to its share of a core, by the best means there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

from lbbsp_core.launch import cgroup
from lbbsp_core.launch.cpu_shares import LONG_PERIOD_US
from lbbsp_core.launch.dutycycle import CYCLE_SECONDS, DutyCycle

Emulation = Literal["auto", "cgroup", "duty-cycle"]
EMULATIONS: Final = ("auto", "cgroup", "duty-cycle")


class Throttle(Protocol):
    """Holds workers back; the launcher calls it in the order of the methods below."""

    def cgroups(self) -> Sequence[Path]:
        """The cgroup of each worker, to be removed at the end; empty where there are none."""

    def attach(self, rank: int, pid: int) -> None:
        """Worker ``rank`` runs as the leader of process group ``pid``."""

    def apply(self, shares: Sequence[float]) -> None:
        """Hold the workers to these shares of a core from now on."""

    def release(self, rank: int) -> None:
        """Let a worker run free, so that it can end quickly; it is never held back again."""

    def close(self) -> None:
        """Leave nothing behind. The workers have ended."""


class Unthrottled:
    """Every worker as fast as the machine makes it."""

    def cgroups(self) -> Sequence[Path]:
        """None."""
        return ()

    def attach(self, rank: int, pid: int) -> None:
        """Nothing to remember."""

    def apply(self, shares: Sequence[float]) -> None:
        """Nothing to hold back."""

    def release(self, rank: int) -> None:
        """It runs free already."""

    def close(self) -> None:
        """Nothing to leave behind."""


def choose(
    emulation: Emulation, shares: Sequence[float], period_us: int, say: Callable[[str], None]
) -> Throttle:
    """Quotas of the kernel where we may set them, else stopping and continuing the workers.

    Args:
        emulation: "auto", or the one means to use.
        shares: the first shares of a core, one per worker.
        period_us: of the quotas.
        say: told what the user should know about how the slowness comes about.

    Raises:
        ValueError: an unknown emulation, or "cgroup" where cgroups are not writable.
    """
    if emulation not in EMULATIONS:
        raise ValueError(f"emulation must be one of {', '.join(EMULATIONS)}, got {emulation!r}")
    quotas = None if emulation == "duty-cycle" else cgroup.open_groups(shares, period_us)
    if quotas is not None:
        if period_us > LONG_PERIOD_US:
            say(f"quota period {period_us / 1000:g} ms: the slowest worker's quota must reach 1 ms")
        return quotas
    if emulation == "cgroup":
        raise ValueError(
            "emulation must not be 'cgroup' where the cpu controller is not writable: "
            "run as root, have a cgroup delegated to you, or use 'duty-cycle'"
        )
    say(
        "emulating speeds by stopping and continuing the workers every "
        f"{CYCLE_SECONDS * 1000:g} ms: coarser than CPU quotas"
        + ("" if emulation == "duty-cycle" else ", but cgroups are not writable here")
    )
    return DutyCycle(shares).start()


def available_cores() -> float:
    """Cores that this process may use: its affinity, or less where its cgroup has a quota."""
    affinity = float(len(os.sched_getaffinity(0)))
    return min([affinity, *cgroup.own_quotas()])
