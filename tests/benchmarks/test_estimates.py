"""The benchmark of estimated speed-ups: its rows, from records that are known and from a job."""

import sys
from argparse import Namespace

import estimates
import pytest
from report_runs import line


@pytest.mark.parametrize(
    ("ratios", "inside"),
    [([1.8], True), ([1.66], True), ([1.6], False), ([1.5, 1.8], True), ([2.1, 2.11], False)],
)
def test_the_spread_of_the_pairs_counts(ratios, inside):
    assert estimates.holds(1.7, 2.0, ratios) is inside


def test_a_row_has_the_range_of_all_runs_and_the_median_of_the_pairs(monkeypatch, capsys):
    seconds = {"bsp": iter([0.3, 0.36, 0.32]), "lbbsp": iter([0.2, 0.2, 0.2])}
    most = iter([0.32, 0.34, 0.3])

    def run(name, policy, options):
        wall = next(seconds[policy])
        known = {}
        if policy == "lbbsp":
            known = {"even_seconds": 0.28, "even_seconds_at_most": next(most)}
        return [line(0, (8, 8), (wall, wall), wall, **known)] * 3

    monkeypatch.setattr(estimates, "run", run)
    assert estimates.compare("a job", Namespace(pairs=3))
    row = "| a job | 1.40 to 1.70 | 1.60 | 1.50 to 1.80 | inside |\n"
    assert capsys.readouterr().out == row


def test_a_job_of_gluon_has_a_row(monkeypatch, capsys):
    pytest.importorskip("lbbsp_mx")
    name = "gluon, three unequal workers"
    monkeypatch.setattr(sys, "argv", ["estimates.py", "--only", name, "--pairs=1", "--steps=15"])
    estimates.main()
    rows = capsys.readouterr().out.splitlines()
    assert rows[2].startswith(f"| {name} | ")
    assert rows[-1].startswith(("0 of 1 inside", "1 of 1 inside"))
