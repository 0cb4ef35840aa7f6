"""Workers that are not in step, on real parameter servers: all schemes, and one of the scripts.

The last worker is the slowest, in virtual time. In its first iteration it waits until the others
are as far ahead as the scheme lets them be in any case.
"""

import os
from collections import Counter
from functools import cache
from socket import gethostname
from typing import NamedTuple

import pytest
from jobs import SCRIPTS, campaign, needs_mxnet, run

from lbbsp_core import read_run
from lbbsp_core.validate import one_line

pytestmark = needs_mxnet
NEEDS_SKLEARN = True
X, SAMPLES, EPOCHS, PERIOD = 48, 10 * 48 + 13, 2, 2  # of mx_async


class Scheme(NamedTuple):
    """Arguments of a job, and leads that a worker reaches and never exceeds when it begins."""

    sync: str
    policy: str
    lead: int
    most: float
    servers: int = 1
    kind: str = ""


SCHEMES = {
    "bsp": Scheme("bsp", "even", 0, 0),
    "shares": Scheme("bsp", "lbbsp", 0, 0, kind="shares"),
    "ssp": Scheme("ssp", "lbbsp", 2, 2, servers=2),
    "asp": Scheme("asp", "even", 6, float("inf")),
    "dssp": Scheme("dssp", "proportional", 1, 4),
    "elastic": Scheme("elastic", "even", 0, 3, servers=2),
    "periodic": Scheme("periodic", "ranked", PERIOD - 1, PERIOD - 1),
}
TESTED = ["shares", "ssp", "elastic", *campaign("bsp", "asp", "dssp", "periodic")]


@pytest.fixture(autouse=True, scope="module")
def importable(fast_start):
    """The parameter servers import the synchroniser of the scripts, which they are sent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SCRIPTS), prepend=os.pathsep)
        yield


def job(folder, scheme):
    return run(
        "mx_async", scheme.sync, scheme.policy, str(folder), str(scheme.lead), scheme.kind,
        workers=3, servers=scheme.servers, framework="mxnet",
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns a function that returns results by rank and the record of a scheme."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run_of(name):
        done = job(folder / name, SCHEMES[name])
        assert done.status == 0
        return [done.results(rank) for rank in range(3)], read_run(folder / name)

    return run_of


@pytest.mark.parametrize("name", TESTED)
def test_every_sample_is_drawn_once_an_epoch_and_pushed(runs, name):
    results, record = runs(name)
    pushes = record.pushes
    drawn = Counter(sample for result in results for sample in result["drawn"])
    assert drawn == dict.fromkeys(range(SAMPLES), EPOCHS)
    for rank, result in enumerate(results):
        mine = [line for line in pushes if line.worker == rank]
        assert sum(line.samples for line in mine) == len(result["drawn"])
        steps = [line.iteration for line in mine if line.samples]  # others took part without any
        assert steps == list(range(result["ends"]))
    assert [line.push for line in pushes] == list(range(len(pushes)))
    times = [line.seconds for line in pushes]
    assert times == sorted(times)


@pytest.mark.parametrize("name", TESTED)
def test_all_workers_end_with_the_same_trained_model(runs, name):
    results, _ = runs(name)
    assert results[0]["weights"] == results[1]["weights"] == results[2]["weights"]
    assert results[0]["moved"] > 0.1
    assert results[0]["accuracy"] > 0.7


@pytest.mark.parametrize("name", ["ssp", "elastic", *campaign("asp", "dssp", "periodic")])
def test_the_gradient_of_each_sample_enters_the_model_as_often_as_it_was_drawn(runs, name):
    for result in runs(name)[0]:
        assert result["counts"] == pytest.approx([EPOCHS] * SAMPLES, abs=1e-4)


@pytest.mark.parametrize("name", TESTED)
def test_workers_get_as_far_ahead_as_the_scheme_allows(runs, name):
    pushes = runs(name)[1].pushes
    assert SCHEMES[name].lead <= max(line.lead for line in pushes) <= SCHEMES[name].most
    first = next(line for line in pushes if line.worker == 2)
    assert first.staleness >= 2 * SCHEMES[name].lead, "what the others pushed meanwhile"


@pytest.mark.parametrize("name", ["shares", *campaign("bsp")])
def test_bsp_by_kept_pushes_learns_what_one_process_learns(runs, name):
    results, record = runs(name)
    assert max(line.staleness for line in record.pushes) == 0
    assert results[0]["difference"] <= 2e-6


@pytest.mark.parametrize(
    ("name", "batches"), [("ssp", (26, 14, 8)), *campaign(("periodic", (28, 14, 6)))]
)
def test_batches_follow_speeds_while_workers_run_ahead(runs, name, batches):
    """Those of the last iterations of the second epoch may be cut."""
    pushes = runs(name)[1].pushes
    late = pushes[len(pushes) // 2 : -9]
    assert {(line.worker, line.samples) for line in late} == set(enumerate(batches))


def test_the_record_names_hosts_and_devices(runs):
    record = runs("ssp")[1]
    assert record.header.hosts == (one_line(gethostname()),) * 3
    assert {device.partition(",")[0] for device in record.header.devices} == {"cpu"}
    assert [each.event for each in record.events] == ["finished"]


def test_parts_of_an_iteration_are_left_to_who_is_done_early(runs):
    """Of half of each iteration, but the first."""
    parts = Counter()
    for line in runs("shares")[1].pushes:
        parts[line.iteration] += line.parts
    assert not parts[0]
    assert min(parts[number] for number in range(1, EPOCHS * SAMPLES // X)) > 0


@pytest.mark.campaign
def test_an_own_synchroniser_decides_when_workers_wait(runs):
    """All start a period together, and its last pushes enter the model at once."""
    pushes = runs("periodic")[1].pushes
    periods = [line.iteration // PERIOD for line in pushes]
    assert periods == sorted(periods)
    counts = Counter(zip(periods, (line.worker for line in pushes), strict=True))
    assert max(periods) >= 10
    complete = {counts[period, rank] for period in range(max(periods)) for rank in range(3)}
    assert complete == {PERIOD}
    assert max(line.staleness for line in pushes) <= 2 * (PERIOD - 1), "the others' first pushes"


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("sync", "policy", "kind", "status", "said"),
    [
        ("bsp", "lbbsp", "shares_and_dies", 128 + 9, "was ended by SIGKILL"),
        ("elastic", "even", "dies", 1, "a worker fails"),
        ("ssp", "even", "disagrees", 1, "workers disagree on sync, batches, policy, parameters"),
        ("ssp", "even", "seeds", 1, "workers disagree on sync, batches, policy, parameters"),
    ],
)
def test_a_worker_that_fails_ends_the_job(tmp_path, capfd, sync, policy, kind, status, said):
    done = job(tmp_path, Scheme(sync, policy, 0, 0, kind=kind))
    assert done.status == status
    assert said in done.text + capfd.readouterr().err


def test_a_process_has_one_asynchronous_trainer_and_no_other_keys(runs):
    first = runs("ssp")[0][0]
    assert "a process can have only one AsyncTrainer in a cluster" in first["second"]
    for call in ("keys", "optimizer", "compression"):
        assert "cannot be used beside an lbbsp_mx.AsyncTrainer" in first[call]
