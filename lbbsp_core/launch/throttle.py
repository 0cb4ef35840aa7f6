"""Emulated slowness: limits each worker to its share of a core, by quotas or by a duty cycle."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias

from lbbsp_core.launch import cgroup
from lbbsp_core.launch.cpu_shares import LONG_PERIOD_US
from lbbsp_core.launch.dutycycle import CYCLE_SECONDS, DutyCycle

Emulation: TypeAlias = Literal["auto", "cgroup", "duty-cycle"]
EMULATIONS: Final = ("auto", "cgroup", "duty-cycle")


class Throttle(Protocol):
    """Slows workers down; the launcher calls its methods in the order below."""

    def cgroups(self) -> Sequence[Path]:
        """Returns the cgroups of all workers, to be removed at the end; empty if there are none."""

    def cgroups_of(self, rank: int) -> Sequence[Path]:
        """Returns the cgroups that worker ``rank`` enters, one of each hierarchy."""

    def attach(self, rank: int, pid: int) -> None:
        """Adds worker ``rank``, which leads process group ``pid``."""

    def apply(self, shares: Sequence[float]) -> None:
        """Limits the workers to these shares of a core from now on."""

    def release(self, rank: int) -> None:
        """Lifts the limit of a worker for good, so that it can exit quickly."""

    def close(self) -> None:
        """Releases all resources, after the workers have ended."""


class Unthrottled:
    """Runs every worker at full speed."""

    def cgroups(self) -> Sequence[Path]:
        """Returns an empty sequence."""
        return ()

    def cgroups_of(self, rank: int) -> Sequence[Path]:
        """Returns an empty sequence."""
        return ()

    def attach(self, rank: int, pid: int) -> None:
        """Does nothing."""

    def apply(self, shares: Sequence[float]) -> None:
        """Does nothing."""

    def release(self, rank: int) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def create_throttle(
    emulation: Emulation, shares: Sequence[float], period_us: int, notify: Callable[[str], None]
) -> Throttle:
    """Creates CPU quotas where this process may set them, and a duty cycle elsewhere."""
    if emulation not in EMULATIONS:
        raise ValueError(f"emulation must be one of {', '.join(EMULATIONS)}, got {emulation!r}")
    quotas = None if emulation == "duty-cycle" else cgroup.open_groups(shares, period_us)
    if quotas is not None:
        if period_us > LONG_PERIOD_US:
            notify(
                f"the quota period is {period_us / 1000:g} ms, "
                "because the slowest worker's quota must be at least 1 ms"
            )
        return quotas
    if emulation == "cgroup":
        raise ValueError(
            "emulation must not be 'cgroup' where the cpu controller is not writable: "
            "run as root, have a cgroup delegated to you, or use 'duty-cycle'"
        )
    notify(
        "emulating speeds by stopping and continuing the workers every "
        f"{CYCLE_SECONDS * 1000:g} ms, which is coarser than CPU quotas"
        + ("" if emulation == "duty-cycle" else ", because cgroups are not writable here")
    )
    return DutyCycle(shares).start()


def available_cores() -> float:
    """Returns the number of cores that this process may use, by its affinity and CPU quotas."""
    affinity = float(len(os.sched_getaffinity(0)))
    return min([affinity, *cgroup.own_quotas()])
