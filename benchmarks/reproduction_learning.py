"""Sections of `reproduction.py` in virtual time, with the time to an accuracy on the digits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from reproduction_tables import Table
from reproduction_virtual import ELASTIC_SYNCS, FAST, NOISE, results
from time_to_accuracy import Mlp, Task, digits, learn

from lbbsp_core import ASP, BSP, DSSP, SSP, Synchroniser
from lbbsp_core.sim import run_async
from lbbsp_core.sim.experiment import Row, experiment_of
from lbbsp_core.sim.scenario import read_scenario
from lbbsp_core.sync.dssp import DSSPState

SEEDS = 9  # of slowdowns, initial weights and order of samples
TARGET = 0.95
RESNET110_BYTES = 1.73e6 * 4


class Medians(NamedTuple):
    """Medians over the seeds: seconds, gain over the first row, efficiency, seconds to target."""

    sync: str
    policy: str
    total: float
    gain: float
    efficiency: float
    reached: float


def task(seed: int) -> Task:
    """Returns the learning task: a multilayer perceptron, learning rate 1."""
    return Task(digits(), Mlp(), 1.0, seed)


def medians(
    table: dict[str, object], runs: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> Iterator[Medians]:
    """Yields the medians of each run, given as synchronisers and policies."""
    by_seed: list[list[tuple[Row, float]]] = []
    for seed in range(SEEDS):
        seeded = {"steps": 300, "seed": seed, **table}
        x, own = read_scenario(seeded, "paper").total, task(seed)
        by_seed.append(
            [
                (row, learn(own, run, x).time_to(TARGET) or float("inf"))
                for syncs, policies in runs
                for row, run in results(seeded, policies, [FAST], syncs)
            ]
        )
    plain = [own[0][0].total_seconds for own in by_seed]
    for pairs in zip(*by_seed, strict=True):
        same = [row for row, _ in pairs]
        totals = [row.total_seconds for row in same]
        gain = median(first / total for first, total in zip(plain, totals, strict=True))
        efficiency = median(row.efficiency for row in same)
        reached = median(seconds for _, seconds in pairs)
        yield Medians(same[0].sync, same[0].policy, median(totals), gain, efficiency, reached)


def elastic() -> Iterator[Table]:
    """Yields ElasticBSP and others on four workers, whose pushes and pulls take no time."""
    clusters: dict[str, dict[str, object]] = {
        "equal, noise 10 %": {"noise": NOISE},
        "equal, Pareto 2.5": {"noise": {"kind": "pareto", "alpha": 2.5}},
        "one half as fast": {"speeds": [1, 1, 1, 0.5], "noise": NOISE},
    }
    table = []
    for name, cluster in clusters.items():
        plain, *others = medians(cluster, [(ELASTIC_SYNCS, ["bsp"])])
        shown = [f"{one.gain:.2f}x, {one.reached:.0f} s" for one in others]
        table.append((name, f"{plain.reached:.0f} s", *shown))
    yield Table("elasticbsp", ("four workers", *ELASTIC_SYNCS), table)


def time_to_accuracy() -> Iterator[Table]:
    """Yields the time to accuracy of all synchronisers and policies."""
    cluster = {"cores": "6/6/4/32", "samples_per_second": 64 / 12, "noise": NOISE}
    synchronous = ["bsp", "fixed", "dbs", "proportional", "leader-straggler", "lbbsp"]
    others = ["bsp", "fixed", "proportional", "lbbsp"]
    runs = [(["bsp"], synchronous), (ELASTIC_SYNCS[1:-1], others)]
    yield Table(
        "accuracy",
        ("sync", "policy", "total, s", "efficiency", f"to {100 * TARGET:.0f} %, s"),
        [
            (
                one.sync,
                one.policy,
                f"{one.total:.0f}",
                f"{one.efficiency:.3f}",
                f"{one.reached:.1f}",
            )
            for one in medians(cluster, runs)
        ],
    )


class UnboundedDSSP(DSSP):
    """DSSP as printed: a grant does not depend on the lead, so that the lead has no bound."""

    def _grant(self, state: DSSPState, worker: int) -> int:
        lead = state.clocks.lead(worker)
        upper = max(self.lower, lead - 1 + self.upper - self.lower)
        return DSSP(self.lower, upper)._grant(state, worker)


def dssp() -> Iterator[Table]:
    """Yields DSSP's Table I, and what the simulator finds on two unequal workers."""
    syncs: dict[str, list[Synchroniser]] = {
        "bsp": [BSP()],
        "ssp, s = 3 to 15": [SSP(3), SSP(15)],
        "dssp:3:15": [DSSP(3, 15)],
        "dssp as printed": [UnboundedDSSP(3, 15)],
        "asp": [ASP()],
    }
    table = [
        ("paper, to 67 %", "6,159 s", "5,565 to 5,704 s", "3,016 s", "", "2,993 s"),
        ("paper, gain", "1.00x", "1.08x to 1.11x", "2.04x", "", "2.06x"),
    ]
    for noise in (0.02, 0.1):
        found = [_both_medians(noise, same) for same in syncs.values()]
        plain = found[0][0]
        for number, what in enumerate(("time", "to 95 %")):
            ratios = [[plain[number] / one[number] for one in same] for same in found]
            shown = [_interval([f"{ratio:.2f}x" for ratio in same]) for same in ratios]
            table.append((f"ours, noise {100 * noise:.0f} %, {what}", *shown))
    yield Table("dssp", ("", *syncs), table)


def _interval(values: list[str]) -> str:
    return " to ".join(dict.fromkeys(sorted(values)))


def _both_medians(noise: float, syncs: list[Synchroniser]) -> list[tuple[float, float]]:
    """Returns the medians of total seconds and seconds to the accuracy, by synchroniser."""
    medians_of = []
    for sync in syncs:
        found = [_gpu_run(noise, sync, seed) for seed in range(SEEDS)]
        medians_of.append((median(one[0] for one in found), median(one[1] for one in found)))
    return medians_of


def _gpu_run(noise: float, sync: Synchroniser, seed: int) -> tuple[float, float]:
    """Returns total seconds and seconds to the accuracy of a GTX 1080 Ti and a GTX 1060."""
    scenario = read_scenario(
        {
            "steps": 300,
            "seed": seed,
            "speeds": [11.3, 4.4],  # TFLOP/s in single precision
            "samples_per_second": 640 / 11.3,
            "global_batch_size": 256,
            "noise": {"kind": "lognormal", "sigma": noise},
            "communication": {
                "kind": "parameter-server",
                "bytes": RESNET110_BYTES,
                "bytes_per_second": 1e9 / 8,
            },
        },
        "dssp",
    )
    experiment = experiment_of(scenario)
    run = run_async(experiment.cluster, experiment.alone, sync)
    reached = learn(task(seed), run, scenario.total).time_to(TARGET)
    return run.total_seconds, reached or float("inf")
