"""Reproduces the papers' experiments in virtual time, to compare their reported gains with ours.

python benchmarks/reproduction.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from lbbsp_core.sim import Mlp, Task, digits, read_scenario
from lbbsp_core.sim.experiment import (
    LearningTarget,
    Row,
    chosen_runs,
    experiment_of,
    run_experiments,
)

SEEDS = 9  # of slowdowns, initial weights and order of samples


def rows(table: dict, policies: Sequence[str] | None, **options: object) -> list[Row]:
    """Simulates a scenario, given as a TOML table, under the named policies."""
    scenario = read_scenario({"steps": 1000, **table}, "paper")
    runs = chosen_runs(policies, ["ema0.5"], syncs=options.pop("syncs", ("bsp",)))
    return [result.row for result in run_experiments([experiment_of(scenario)], runs, **options)]


def gains(title: str, table: dict, policies: Sequence[str]) -> None:
    """Prints the gain of each policy over plain BSP, and that of the oracle."""
    plain, *others = rows(table, ["bsp", *policies])
    figures = "  ".join(f"{row.policy} {plain.total_seconds / row.total_seconds:.2f}x"
                        for row in others)  # fmt: skip
    bound = 1 / plain.efficiency
    print(f"{title:<42}{figures}  (oracle {bound:.2f}x)")


def main() -> None:
    policies = ["fixed", "proportional", "lbbsp"]
    print("Tyagi and Sharma, time of BSP / time")
    noise = {"kind": "lognormal", "sigma": 0.1}
    for layout in ("9/12/18", "2/17/20", "12/12/12/12", "12/12/8/16", "9/9/6/24", "6/6/4/32"):
        for serial in (0.0, 0.05, 0.14):
            table = {"cores": layout, "samples_per_second": 5.0, "serial_share": serial,
                     "noise": noise}  # fmt: skip
            gains(f"  {layout}, serial share {serial}", table, policies)

    print("LB-BSP, time of BSP / time")
    markov = {"kind": "markov", "slow": 3.0, "to_slow": 0.02, "to_fast": 0.1}
    gains("  CPU: 8 workers, Markov slow/fast 3x", {"workers": 8, "noise": markov}, ["lbbsp"])
    mixed = {"speeds": [1, 1, 0.5, 0.5], "noise": {"kind": "lognormal", "sigma": 0.1}}
    gains("  two generations of machines, 2x", mixed, ["lbbsp", "leader-straggler"])
    shared = {"workers": 8, "noise": {"kind": "lognormal", "sigma": 0.3, "memory": 0.95}}
    gains("  CPU: 8 equal workers, slowly changing by 30 %", shared, ["lbbsp"])

    print("DBS's disturbance, 4 workers, 100 epochs of 50 steps, time of BSP / time")
    for seconds in (20, 50, 100):
        table = {"steps": 5000, "noise": {"kind": "dbs"},
                 "samples_per_second": 64 * 50 / seconds}  # fmt: skip
        gains(f"  healthy epoch of {seconds} s", table, ["dbs", "proportional", "lbbsp"])

    print(f"ElasticBSP's four workers: time of BSP / time, and to 95 %, medians of {SEEDS} seeds")
    syncs = ("bsp", "ssp:3", "asp", "dssp:3:15", "elasticbsp:15", "elasticbsp:150")
    for name, table in {
        "equal, noise 10 %": {"noise": noise},
        "equal, Pareto 2.5": {"noise": {"kind": "pareto", "alpha": 2.5}},
        "one twice as slow": {"speeds": [1, 1, 1, 0.5], "noise": noise},
    }.items():
        print(f"  {name}")
        for sync, _, _, gain, _, reached in medians(table, ["bsp"], syncs):
            print(f"    {sync:<16}{gain:.2f}x  {reached:.1f} s")

    print(f"Time to 95 % accuracy, four workers of 6/6/4/32 cores, medians of {SEEDS} seeds")
    table = {"cores": "6/6/4/32", "samples_per_second": 64 / 12, "noise": noise}
    for sync, policy, total, _, efficiency, reached in medians(table, None, syncs[:-1]):
        print(f"| {sync} | {policy} | {total:.0f} | {efficiency:.3f} | {reached:.1f} |")


def medians(
    table: dict, policies: Sequence[str] | None, syncs: Sequence[str]
) -> Iterator[tuple[str, str, float, float, float, float]]:
    """Yields medians of total seconds, gain over BSP, efficiency and seconds to 95 %, by row."""
    runs = []
    for seed in range(SEEDS):
        goal = LearningTarget(Task(digits(), Mlp(), 1.0, seed), 0.95)
        seeded = {"steps": 300, "seed": seed, **table}
        runs.append(rows(seeded, policies, syncs=syncs, goal=goal))
    for same in zip(*runs, strict=True):
        reached = [row.time_to_accuracy_seconds or float("inf") for row in same]
        gain = [
            run[0].total_seconds / row.total_seconds for run, row in zip(runs, same, strict=True)
        ]
        totals = [row.total_seconds for row in same]
        efficiencies = [row.efficiency for row in same]
        yield (
            same[0].sync, same[0].policy, median(totals), median(gain), median(efficiencies),
            median(reached),
        )  # fmt: skip


if __name__ == "__main__":
    main()
