"""Sections of `reproduction.py` that measure CPU time: searches of ZipLine, large simulations."""

from __future__ import annotations

from collections.abc import Iterator

from reproduction_tables import Table
from simulate import event_microseconds, policy_seconds
from zipline import METHODS, PAPER, microseconds, pushes

POLICIES = ("bsp", "fixed", "dbs", "proportional", "leader-straggler", "lbbsp", "lbbsp-every")
REPORTED = {
    "zipline": "ZipLine",
    "optbs": "ZipLineOptBS",
    "fullgrid": "FullGridScan",
    "grid": "GridScan",
}
SYNCS = ("bsp", "ssp:3", "asp", "dssp:3:15", "elasticbsp:15")
WORKERS = (10, 100, 1_000, 10_000)


def zipline_searches() -> Iterator[Table]:
    """Yields microseconds of a search by method, with the authors' figures."""
    table = []
    for workers in (10, 100, 1_000):
        for lookahead in (15, 150):
            times = pushes(workers, lookahead, seed=0)
            found = [f"{microseconds(times, method, 1.0)[0]:,.0f}" for method in METHODS]
            paper = [PAPER.get((method, workers, lookahead)) for method in REPORTED]
            known = [f"{value:,}" if value else "" for value in paper]
            table.append((f"{workers:,}", str(lookahead), *found, *known))
    header = ("n", "R", *METHODS, *(f"paper, {name}" for name in REPORTED.values()))
    yield Table("zipline", header, table, labels=2)


def large_clusters() -> Iterator[Table]:
    """Yields seconds of 1,000 steps by policy, and microseconds of an iteration by synchroniser."""
    table = []
    for workers in WORKERS:
        found = policy_seconds("markov", workers, 1_000, POLICIES)
        table.append((f"{workers:,}", *(f"{took:.2f}" for took in found)))
    yield Table("large-clusters", ("workers", "draw", "oracle", *POLICIES), table, labels=1)
    table = []
    for workers in WORKERS:
        found = event_microseconds("markov", workers, SYNCS)
        table.append((f"{workers:,}", *(f"{took:.0f}" for took in found)))
    yield Table("large-clusters-events", ("workers", *SYNCS), table, labels=1)
