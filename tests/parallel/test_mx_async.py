"""Workers that are not in step, on real parameter servers: every scheme, one worker 3x slower."""

import signal
from collections import Counter
from functools import cache
from importlib.util import find_spec
from socket import gethostname
from statistics import median

import pytest
from jobs import campaign, run

from lbbsp_core import read_run
from lbbsp_core.validate import one_line

pytestmark = pytest.mark.skipif(
    find_spec("mxnet") is None, reason="needs mxnet: pip install 'lbbsp[mx]'"
)
NEEDS_SKLEARN = True
SCHEMES = ["bsp", *campaign("ssp", "asp", "dssp", "elastic")]
SAMPLES, EPOCHS = 20 * 48 + 13, 2  # of mx_async
MOST = {"bsp": 0, "ssp": 2, "dssp": 4, "elastic": 3}
"""How many iterations a worker may be ahead when it begins one."""


def job(folder, *args, **options):
    return run(
        "mx_async", *args[:2], str(folder), *args[2:], workers=3, framework="mxnet", **options
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns a function that returns results by rank and the pushes of a scheme."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run_of(scheme):
        # Two servers for one of the schemes with a sum.
        done = job(folder / scheme, scheme, "even", servers=2 if scheme == "elastic" else 1)
        assert done.status == 0
        return [done.results(rank) for rank in range(3)], read_run(folder / scheme).pushes

    return run_of


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_sample_is_drawn_once_an_epoch_and_pushed(runs, scheme):
    results, pushes = runs(scheme)
    drawn = Counter(sample for result in results for sample in result["drawn"])
    assert sum(drawn.values()) == EPOCHS * SAMPLES
    assert set(drawn.values()) == {EPOCHS}
    for rank, result in enumerate(results):
        mine = [line for line in pushes if line.worker == rank]
        assert sum(line.samples for line in mine) == len(result["drawn"])
        assert [line.iteration for line in mine] == list(range(len(mine)))
    assert [line.push for line in pushes] == list(range(len(pushes)))
    times = [line.seconds for line in pushes]
    assert times == sorted(times)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_workers_end_with_the_same_trained_model(runs, scheme):
    results, _ = runs(scheme)
    assert results[0]["weights"] == results[1]["weights"] == results[2]["weights"]
    assert results[0]["moved"] > 0.1
    assert results[0]["accuracy"] > 0.7


@pytest.mark.parametrize("scheme", ["bsp", *campaign("ssp", "dssp", "elastic")])
def test_nobody_gets_further_ahead_than_the_scheme_allows(runs, scheme):
    _, pushes = runs(scheme)
    assert max(line.lead for line in pushes) <= MOST[scheme]


@pytest.mark.campaign
@pytest.mark.alone
def test_only_bsp_holds_the_fast_workers_back_all_the_time(runs):
    """The fast workers do about three iterations for each of the slow one, where they may."""
    pushes = {scheme: runs(scheme)[1] for scheme in ("ssp", "asp", "dssp", "elastic")}
    leads = {scheme: max(line.lead for line in lines) for scheme, lines in pushes.items()}
    assert leads["asp"] > MOST["dssp"]
    assert leads["ssp"] == MOST["ssp"]
    assert leads["dssp"] > 1, "more than its lower bound"
    assert leads["elastic"] > 0
    for scheme, more in ("asp", 1.3), ("elastic", 1.2):
        done = Counter(line.worker for line in pushes[scheme])
        assert min(done[0], done[1]) > more * done[2]


@pytest.mark.campaign
@pytest.mark.alone
def test_staleness_is_what_the_others_did_meanwhile(runs):
    for scheme in ("ssp", "asp", "dssp", "elastic"):
        assert max(line.staleness for line in runs(scheme)[1]) > 0
    slow = [line.staleness for line in runs("asp")[1] if line.worker == 2]
    fast = [line.staleness for line in runs("asp")[1] if line.worker != 2]
    assert sum(slow) / len(slow) > sum(fast) / len(fast)


def test_bsp_by_kept_pushes_learns_what_one_process_learns(runs):
    results, pushes = runs("bsp")
    assert max(line.staleness for line in pushes) == 0
    assert results[0]["difference"] <= 2e-6


@pytest.mark.alone
@pytest.mark.parametrize("policy", ["lbbsp", *campaign("proportional")])
def test_batches_follow_speeds_while_workers_run_ahead(tmp_path, policy):
    done = job(tmp_path, "ssp", policy, servers=2)
    assert done.status == 0
    header, pushes = read_run(tmp_path).header, read_run(tmp_path).pushes
    assert header.hosts == (one_line(gethostname()),) * 3
    assert {device.partition(",")[0] for device in header.devices} == {"cpu"}
    assert [each.event for each in read_run(tmp_path).events] == ["finished"]
    late = pushes[len(pushes) // 2 :]
    typical = [median(p.samples for p in late if p.worker == rank) for rank in range(3)]
    assert typical[2] < 0.6 * min(typical[:2])
    assert max(line.lead for line in pushes) <= MOST["ssp"]
    drawn = Counter(sample for rank in range(3) for sample in done.results(rank)["drawn"])
    assert set(drawn.values()) == {EPOCHS}


@pytest.mark.parametrize("policy", ["lbbsp", *campaign("even", "proportional")])
def test_parts_of_an_iteration_are_learned_as_one(tmp_path, policy):
    """The third worker is slow, and half of each iteration is left to who is done early."""
    done = job(tmp_path, "bsp", policy, "shares")
    assert done.status == 0
    results, pushes = [done.results(rank) for rank in range(3)], read_run(tmp_path).pushes
    assert results[0]["difference"] <= 2e-6
    drawn = Counter(sample for result in results for sample in result["drawn"])
    assert set(drawn.values()) == {EPOCHS}
    for rank, result in enumerate(results):
        mine = [line for line in pushes if line.worker == rank]
        assert result["ends"] == len(mine)
        assert sum(line.samples for line in mine) == len(result["drawn"])
    by_iteration = Counter()
    for line in pushes:
        by_iteration[line.iteration] += line.parts
    assert not by_iteration[0]
    assert min(by_iteration[number] for number in range(1, EPOCHS * SAMPLES // 48)) > 0


@pytest.mark.campaign
def test_a_worker_that_dies_with_a_part_of_an_iteration_ends_the_job(tmp_path, capfd):
    done = job(tmp_path, "bsp", "lbbsp", "shares_and_dies")
    assert done.status == 128 + signal.SIGKILL
    assert "worker 1 was ended by SIGKILL" in capfd.readouterr().err


@pytest.mark.campaign
def test_a_worker_that_fails_ends_the_job(tmp_path):
    done = job(tmp_path, "elastic", "even", "dies")
    assert done.status == 1
    assert "a worker fails" in done.text


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["disagrees", "seeds"])
def test_workers_that_disagree_are_told(tmp_path, kind):
    done = job(tmp_path, "ssp", "even", kind)
    assert done.status == 1
    assert "workers disagree on sync, batches, policy, parameters or samples" in done.text


def test_a_process_has_one_asynchronous_trainer_and_no_other_keys(runs):
    (first, *_), _ = runs("bsp")
    assert "a process can have only one AsyncTrainer in a cluster" in first["second"]
    for call in ("keys", "optimizer", "compression"):
        assert "cannot be used beside an lbbsp_mx.AsyncTrainer" in first[call]
