"""Sections of `reproduction.py` in virtual time, without learning: gains over plain BSP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reproduction_tables import Table

from lbbsp_core.sim.experiment import Result, Row, chosen_runs, experiment_of, run_experiments
from lbbsp_core.sim.scenario import read_scenario

FAST, DEFAULT = "ema0.5", "mixture"  # predictors
NOISE = {"kind": "lognormal", "sigma": 0.1}
VGG16_BYTES = 138_357_544 * 4  # float32: 528 MiB
POLICIES = ("bsp", "fixed", "proportional", "lbbsp")
ELASTIC_SYNCS = ("bsp", "ssp:3", "asp", "dssp:3:15", "elasticbsp:15", "elasticbsp:150")


def rows(
    table: dict[str, object],
    policies: Sequence[str],
    *,
    predictors: Sequence[str] = (FAST,),
    syncs: Sequence[str] = ("bsp",),
) -> list[Row]:
    """Simulates 1,000 steps of a scenario, given as a TOML table, under the named policies."""
    return [row for row, _ in results({"steps": 1000, **table}, policies, predictors, syncs)]


def results(
    table: dict[str, object],
    policies: Sequence[str],
    predictors: Sequence[str],
    syncs: Sequence[str],
) -> Iterator[Result]:
    """Simulates a scenario, given as a TOML table."""
    experiment = experiment_of(read_scenario(table, "paper"))
    return run_experiments([experiment], chosen_runs(policies, predictors, syncs=syncs))


def gains(found: Sequence[Row]) -> tuple[str, ...]:
    """Returns the gain of each row but the first over the first, and that of the oracle."""
    plain, *others = found
    ratios = [plain.total_seconds / row.total_seconds for row in others]
    return tuple(f"{ratio:.2f}x" for ratio in (*ratios, 1 / plain.efficiency))


def load_balanced() -> Iterator[Table]:
    """Yields LB-BSP's gains with the default predictor, and their range over the noise."""
    reported = "up to 2x (2018)", "up to 54 % on GPUs (2020)", "up to 38.7 % on CPUs (2020)"
    clusters = {
        "8 equal workers, each fast or 3x slower at random (Markov)": markov(3.0),
        "two of four machines half as fast, noise 10 %": {
            "speeds": [1, 1, 0.5, 0.5],
            "noise": NOISE,
        },
        "8 equal workers, speed drifts by 30 % (lognormal, correlation 0.95)": drift(0.3),
    }
    found = [
        (title, *gains(rows(table, ["bsp", "lbbsp", "leader-straggler"], predictors=[DEFAULT])))
        for title, table in clusters.items()
    ]
    yield Table(
        "lb-bsp",
        ("cluster", "lbbsp", "leader-straggler", "oracle", "reported"),
        [(*row, paper) for row, paper in zip(found, reported, strict=True)],
    )
    cases = {f"slow state {slow:.0f}x slower": markov(slow) for slow in (2.0, 3.0, 5.0)}
    cases |= {f"drift by {100 * sigma:.0f} %": drift(sigma) for sigma in (0.2, 0.3, 0.4)}
    yield Table(
        "lb-bsp-noise",
        ("noise of 8 equal workers", f"lbbsp, {DEFAULT}", f"lbbsp, {FAST}", "oracle"),
        [
            (name, *gains(rows(table, ["bsp", "lbbsp"], predictors=[DEFAULT, FAST])))
            for name, table in cases.items()
        ],
    )


def markov(slow: float) -> dict[str, object]:
    """Returns a scenario of equal workers that become slow and fast again at random."""
    return {"workers": 8, "noise": {"kind": "markov", "slow": slow}}


def drift(sigma: float) -> dict[str, object]:
    """Returns a scenario of equal workers whose speeds change slowly."""
    return {"workers": 8, "noise": {"kind": "lognormal", "sigma": sigma, "memory": 0.95}}


def dynamic_batching() -> Iterator[Table]:
    """Yields the gains on Tyagi and Sharma's numbers of cores, and on their GPUs."""
    settings = [  # cores, title, serial share, seconds of communication, reported
        ("9/12/18", "9/12/18 (H = 2)", 0.0, 0.0, "2x"),
        ("9/12/18", "", 0.05, 0.0, ""),
        ("9/12/18", "", 0.0, 2.8, ""),
        ("2/17/20", "2/17/20 (H = 10)", 0.0, 0.0, "2.4x"),
        ("2/17/20", "", 0.14, 0.0, ""),
        ("2/17/20", "", 0.0, 2.8, ""),
        *((cores, cores, 0.0, 0.0, "") for cores in ("12/12/12/12", "12/12/8/16", "9/9/6/24")),
        ("6/6/4/32", "6/6/4/32", 0.0, 0.0, ""),
    ]
    table = []
    for cores, title, serial, seconds, reported in settings:
        scenario = {
            "cores": cores,
            "samples_per_second": 5.0,
            "serial_share": serial,
            "noise": NOISE,
            "communication": {"kind": "fixed", "fixed_seconds": seconds},
        }
        found = gains(rows(scenario, POLICIES))
        table.append((title, f"{serial:g}", f"{seconds:g} s", *found, reported))
    header = ("cores", "serial share", "communication", "fixed", "proportional", "lbbsp", "oracle")
    yield Table("dynamic-batching", (*header, "reported"), table)
    peaks = {"single precision, 8.1 and 5.5": 8.1, "the T4's tensor cores, 65 and 5.5": 65.0}
    yield Table(
        "dynamic-batching-gpus",
        ("2 T4 + 2 P4, by TFLOP/s", *POLICIES[1:], "oracle", "reported"),
        [
            (
                title,
                *gains(rows({"speeds": [1, 1, 5.5 / t4, 5.5 / t4], "noise": NOISE}, POLICIES)),
                "4.5x",
            )
            for title, t4 in peaks.items()
        ],
    )


def disturbance() -> Iterator[Table]:
    """Yields the gains under DBS's disturbance."""
    table = []
    for seconds in (20, 50, 100):
        scenario = {
            "steps": 5000,
            "noise": {"kind": "dbs"},
            "samples_per_second": 64 * 50 / seconds,
        }
        found = gains(rows(scenario, ["bsp", "dbs", "proportional", "lbbsp"]))
        table.append((f"{seconds} s", *found))
    yield Table("dbs", ("healthy epoch", "dbs", "proportional", "lbbsp", "oracle"), table)


def elastic_links() -> Iterator[Table]:
    """Yields the gains of synchronisers whose pushes and pulls queue at a server's link."""
    table = []
    for gbit, servers in ((10, 1), (25, 1), (56, 1), (100, 1), (25, 4)):
        scenario = {
            "workers": 4,
            "global_batch_size": 512,
            "samples_per_second": 500.0,
            "noise": NOISE,
            "communication": {
                "kind": "parameter-server",
                "bytes": VGG16_BYTES,
                "bytes_per_second": gbit * 1e9 / 8,
                "servers": servers,
            },
        }
        plain, *others = rows(scenario, ["bsp"], syncs=ELASTIC_SYNCS)
        ratios = [f"{plain.total_seconds / row.total_seconds:.2f}x" for row in others]
        step = f"{plain.total_seconds / 1000:.2f} s"
        table.append((f"{gbit} Gbit/s", str(servers), step, *ratios))
    yield Table("elasticbsp-links", ("link", "servers", *ELASTIC_SYNCS), table)
