"""The coordinator of real workers against the simulator's engine: the same decisions."""

from __future__ import annotations

import heapq
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbbsp_core import (
    ASP,
    BSP,
    DSSP,
    SSP,
    Affine,
    ElasticBSP,
    EpochBalanced,
    Even,
    FixedShares,
    LeaderStraggler,
    Limits,
    LoadBalanced,
    Policy,
    ProportionalControl,
    Synchroniser,
)
from lbbsp_core.policy import BatchConstraints
from lbbsp_core.runtime.asynchronous.coordination import (
    CoordinatorService,
    Question,
    question_table,
    read_answer,
    read_report,
    report_integers,
)
from lbbsp_core.runtime.asynchronous.coordinator import Coordinator
from lbbsp_core.runtime.asynchronous.reserves import PartsReport, Reserves
from lbbsp_core.runtime.record.record import PushLine
from lbbsp_core.sim import schedule

SCHEMES = [BSP(), SSP(0), SSP(2), ASP(), DSSP(1, 4), ElasticBSP(4, warmup=1), ElasticBSP(1)]


@dataclass
class Server:
    """A model on a server and workers in virtual time, who do as `Coordinator` says.

    Each gradient is a number, its worker's; the model is the list of its updates.
    """

    synchroniser: Synchroniser
    seconds: np.ndarray

    def run(self) -> list[PushLine]:
        workers, iterations = self.seconds.shape
        self.now = 0.0
        cluster = BatchConstraints(8 * workers, (Limits(),) * workers)
        self.coordinator = Coordinator(self.synchroniser, cluster, Even(), lambda: self.now)
        self.coordinator._start = 0.0
        self.model: list[list[int]] = []
        self.sum: list[int] = []
        begun, seen = [1] * workers, [0] * workers
        events = [(float(self.seconds[worker, 0]), worker) for worker in range(workers)]
        heapq.heapify(events)
        while events:
            self.now, worker = heapq.heappop(events)
            self._push(worker, seen[worker])
            while released := [
                w for w in range(workers) if begun[w] < self.coordinator.released[w]
            ]:
                other = released[0]
                begun[other] += 1
                if begun[other] > iterations:
                    self._apply(self.coordinator.finish(other))
                    continue
                seen[other] = len(self.model)
                end = self.now + float(self.seconds[other, begun[other] - 1])
                heapq.heappush(events, (end, other))
        return self.coordinator.log(0, 10**6)

    def _push(self, worker: int, seen: int) -> None:
        if self.coordinator.push(worker, 8, 1.0, seen=seen):
            self.sum.append(worker)
        else:
            self.model.append([worker])
        self._apply(self.coordinator.entered(worker))

    def _apply(self, last: bool) -> None:
        if last:
            self.model.append(sorted(self.sum))
            self.sum = []
            self.coordinator.applied()


def duration_tables() -> st.SearchStrategy[np.ndarray]:
    """Seconds of 2 to 4 workers, 1 to 8 iterations each; hardly two ends at the same time."""

    def table(seed: int) -> np.ndarray:
        random = np.random.default_rng(seed)
        shape = random.integers(2, 5), random.integers(1, 9)
        return random.uniform(0.5, 1.5, shape) * random.choice([1.0, 3.0], (shape[0], 1))

    return st.integers(0, 10**6).map(table)


@pytest.mark.parametrize("synchroniser", SCHEMES, ids=repr)
@settings(max_examples=25)
@given(seconds=duration_tables())
def test_it_decides_as_the_simulator_does(synchroniser: Any, seconds: np.ndarray) -> None:
    server = Server(synchroniser, seconds)
    log = server.run()
    played = schedule(synchroniser, seconds)
    by_time = np.argsort(played.push, kind="stable")
    expected = [(int(played.worker[i]), int(played.iteration[i])) for i in by_time]
    assert [(line.worker, line.iteration) for line in log] == expected
    assert [line.seconds for line in log] == pytest.approx(played.push[by_time].tolist())
    groups: list[list[int]] = [[] for _ in range(played.updates)]
    for worker, update in zip(played.worker, played.update, strict=True):
        if update >= 0:
            groups[update].append(int(worker))
    assert server.model == [sorted(group) for group in groups]
    if not isinstance(synchroniser, BSP | ElasticBSP):
        assert [line.staleness for line in log] == played.staleness[by_time].tolist()


def test_leads_are_reached() -> None:
    seconds = np.array([[1.0] * 12, [3.1] * 12])
    leads = {
        repr(s): max(line.lead for line in Server(s, seconds).run())
        for s in (SSP(2), DSSP(1, 3), ElasticBSP(4, warmup=1), ASP())
    }
    assert list(leads.values()) == [2, 3, 2, 8]


def coordinator(synchroniser: Synchroniser, policy: Any = None, workers: int = 2) -> Coordinator:
    return Coordinator(synchroniser, BatchConstraints(16, (Limits(),) * workers), policy or Even())


def push(coordinator: Coordinator, worker: int, *arguments: Any, **options: Any) -> bool:
    """Pushes a gradient that enters at once; returns whether the worker must apply the sum."""
    coordinator.push(worker, *arguments, **options)
    return coordinator.entered(worker)


def test_samples_are_dealt_out_once_up_to_the_limit() -> None:
    dealing = coordinator(ASP())
    claims = [dealing.claim(worker, 37) for worker in (0, 1, 1, 0, 1, 0)]
    assert claims == [(0, 8), (8, 16), (16, 24), (24, 32), (32, 37), (37, 37)]
    assert dealing.claim(1, 74) == (37, 45), "the next epoch"


def test_the_sum_waits_for_the_gradient_that_is_still_on_its_way() -> None:
    """Worker 1 decides the barrier; worker 0's gradient arrives after that."""
    bsp = coordinator(BSP())
    assert bsp.push(0, 8, 1.0)
    assert bsp.push(1, 8, 1.0)
    assert not bsp.entered(1)
    assert bsp.released == [1, 1]
    assert bsp.entered(0)
    assert bsp.released == [1, 1], "the model is still to be updated"
    bsp.applied()
    assert bsp.released == [2, 2]
    with pytest.raises(ValueError, match="no sum was to be applied"):
        bsp.applied()


def test_a_push_alone_releases_when_it_is_in_the_model() -> None:
    ssp = coordinator(SSP(0))
    assert not ssp.push(0, 8, 1.0)
    assert not ssp.entered(0)
    assert not ssp.push(1, 8, 1.0)
    assert ssp.released == [1, 1]
    ssp.entered(1)
    assert ssp.released == [2, 2]


def test_who_leaves_holds_nobody_back_and_updates_for_those_who_wait() -> None:
    bsp = coordinator(BSP())
    assert bsp.push(0, 8, 1.0)
    assert not bsp.entered(0)
    assert bsp.finish(1), "worker 1 applies what worker 0 has pushed"
    bsp.applied()
    assert bsp.released == [2, 1]
    assert bsp.rounds.active == {0}
    assert not bsp.finish(1), "once is enough"


def test_the_log_forgets_what_has_been_read_and_has_nothing_without_a_reader() -> None:
    asp = coordinator(ASP())
    silent = Coordinator(ASP(), asp.constraints, Even(), logs=False)
    for number in range(5):
        for each in (asp, silent):
            push(each, number % 2, 8, 0.5, seen=each.updates)
    assert [line.iteration for line in asp.log(0, 2)] == [0, 0]
    assert [line.iteration for line in asp.log(3, 9)] == [1, 2]
    assert [line.iteration for line in asp.log(0, 9)] == [1, 2], "the first three are gone"
    assert silent.log(0, 9) == []
    assert asp.pushes == silent.pushes == 5


def test_batches_follow_the_predicted_speeds_once_all_have_pushed() -> None:
    balanced = coordinator(ASP(), LoadBalanced(min_gain=0.0))
    for _ in range(3):
        push(balanced, 0, 8, 0.08, Affine(0.0, 0.01))
    assert balanced.rounds.sizes == (8, 8), "worker 1 has said nothing yet"
    push(balanced, 1, 8, 0.24, Affine(0.0, 0.03))
    assert balanced.rounds.sizes == (12, 4)
    assert balanced.claim(0, 100) == (0, 12)


def test_it_says_that_balance_does_not_pay(caplog: Any) -> None:
    coordinator = Coordinator(ASP(), BatchConstraints(48, (Limits(),) * 2), LoadBalanced())
    for step in range(40):  # the prediction is always the other worker's speed
        for worker in (0, 1):
            begin, end = coordinator.claim(worker, 10**6)
            cost = Affine(0.0, 0.01 + 0.01 * ((step + worker) % 2))
            push(coordinator, worker, end - begin, cost(end - begin), cost)
    assert coordinator.rounds.sizes == (24, 24)
    assert len(caplog.messages) == 1
    assert "from round 11 on, batches are even" in caplog.text


def test_a_round_does_not_wait_for_those_who_have_left() -> None:
    balanced = coordinator(ASP(), LoadBalanced(min_gain=0.0), workers=3)
    costs = [Affine(0.0, 0.01), Affine(0.0, 0.03), Affine(0.0, 0.03)]
    for worker, cost in enumerate(costs):
        balanced.push(worker, 5, 1.0, cost)
    before = balanced.rounds.sizes
    balanced.finish(2)
    balanced.push(0, 5, 1.0, Affine(0.0, 0.04))
    assert balanced.rounds.sizes == before
    balanced.push(1, 5, 1.0, costs[1])
    assert balanced.rounds.sizes != before


def test_proportional_control_learns_from_batches_of_its_own_plan_only() -> None:
    """Worker 0 is three times as fast; while the plan changes, it has an older batch under way."""
    balanced = coordinator(ASP(), ProportionalControl(interval=1, smoothing=1.0))
    for worker, samples, seconds, excluded, sizes in [
        (0, 8, 9.0, True, (8, 8)),
        (1, 8, 3.0, False, (8, 8)),  # the first time of worker 0 was excluded
        (0, 8, 1.0, False, (8, 8)),  # worker 1 has not pushed once more
        (1, 8, 3.0, False, (12, 4)),
        (0, 8, 1.0, False, (12, 4)),
        (1, 4, 1.5, False, (12, 4)),  # worker 0 had drawn 8 samples by the even plan
        (0, 12, 1.5, False, (12, 4)),
        (1, 4, 0.5, False, (8, 8)),  # both take as long for 8 samples now
    ]:
        push(balanced, worker, samples, seconds, excluded=excluded)
        assert balanced.rounds.sizes == sizes


def test_a_worker_tells_the_coordinator_which_times_to_exclude() -> None:
    balanced = coordinator(ASP(), ProportionalControl(interval=1, smoothing=1.0))
    service = CoordinatorService(balanced, fingerprint=1)
    for number, excluded in enumerate((1, 0), start=1):
        for worker, nanoseconds in enumerate((10**9, 3 * 10**9)):
            values = [8, nanoseconds, 0, 0, 0, excluded]
            table = question_table(2, worker, Question.PUSH, number, *values)
            assert read_answer(service.answer(table)[worker]).pushes == 2 * number - 1 + worker
            balanced.entered(worker)
        assert balanced.rounds.sizes == ((8, 8) if excluded else (12, 4))


@pytest.mark.parametrize(
    "policy", [Even(), FixedShares([3, 1]), LoadBalanced(), ProportionalControl()]
)
@pytest.mark.parametrize("synchroniser", SCHEMES, ids=repr)
def test_it_travels_to_a_server(synchroniser: Synchroniser, policy: Any) -> None:
    """MXNet sends optimizers, and what they hold, in pickle's oldest protocol."""
    sent = pickle.loads(pickle.dumps(coordinator(synchroniser, policy), 0))
    assert sent.claim(0, 100) == coordinator(synchroniser, policy).claim(0, 100)


@pytest.mark.parametrize("policy", [EpochBalanced(), LeaderStraggler()])
def test_a_policy_that_needs_common_steps_is_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match="and this synchroniser cannot be combined"):
        coordinator(ASP(), policy)


def test_time_begins_with_the_first_iteration() -> None:
    """Else ElasticBSP takes the first interval of the first worker for nothing."""
    now = [5.0]
    cluster = BatchConstraints(16, (Limits(),) * 2)
    elastic = Coordinator(ElasticBSP(15, warmup=1), cluster, Even(), lambda: now[0])
    for worker in (0, 1):
        elastic.claim(worker, 1000)
    for worker, now[0] in (0, 15.0), (1, 16.0):
        if push(elastic, worker, 8, 10.0):
            elastic.applied()
    assert [line.seconds for line in elastic.log(0, 9)] == [10.0, 11.0]


def shared_iterations(mode: int | str, paces: Any, iterations: int, sizes: Any = None) -> Any:
    """Runs BSP with reserves in virtual time; yields positions by worker, and its pushes."""
    now = [0.0]
    policy = FixedShares(sizes) if sizes else Even()
    cluster = BatchConstraints(60, (Limits(),) * 3)
    dealing = Coordinator(
        BSP(), cluster, policy, lambda: now[0], reserves=Reserves(mode, granularity=1)
    )
    for number in range(iterations):
        begun, got = now[0], {worker: [dealing.claim(worker, 10**6)] for worker in range(3)}
        ends = [(now[0] + paces(number, w) * (b - a), w) for w, ((a, b),) in got.items()]
        heapq.heapify(ends)
        while ends:
            now[0], worker = heapq.heappop(ends)
            begin, end = dealing.claim_part(worker, 10**6)
            if begin < end:
                got[worker].append((begin, end))
                heapq.heappush(ends, (now[0] + paces(number, worker) * (end - begin), worker))
                continue
            samples = sum(b - a for a, b in got[worker])
            told = PartsReport(len(got[worker]) - 1, now[0] - begun, can_share=True)
            if push(dealing, worker, samples, paces(number, worker) * samples, shared=told):
                dealing.applied()
        yield got


def test_reserves_are_dealt_out_once_within_the_iteration() -> None:
    def paces(number: int, worker: int) -> float:
        return 0.03 if number % 3 == worker else 0.01

    found = [*shared_iterations(40, paces, 8, sizes=[3, 2, 1])]
    for number, got in enumerate(found):
        parts = sorted(part for each in got.values() for part in each)
        assert [position for part in parts for position in range(*part)] == [
            *range(60 * number, 60 * (number + 1))
        ]
    assert [len(each) for each in found[0].values()] == [1, 1, 1], "not known to be able to share"
    assert all(sum(map(len, got.values())) > 3 for got in found[1:])
    mains = [[end - begin for (begin, end), *_ in got.values()] for got in found[1:]]
    assert mains == [[18, 12, 6]] * 7


def test_reserves_are_used_only_where_they_pay() -> None:
    def parts(paces: Any) -> int:
        *_, last = shared_iterations("auto", paces, 30)
        return sum(map(len, last.values())) - 3

    assert parts(lambda number, worker: 0.03 if number % 3 == worker else 0.01)
    assert not parts(lambda number, worker: 0.01)


def test_the_policy_learns_the_time_of_the_planned_batch() -> None:
    policy = ProportionalControl(interval=1, smoothing=1.0)
    dealing = coordinator(BSP(), policy)
    dealing.reserves = Reserves(50, granularity=1)
    told = PartsReport(can_share=True)
    for worker in (0, 1):
        dealing.claim(worker, 100)
    for worker, samples in enumerate((12, 4)):  # worker 0 is three times as fast
        dealing.push(worker, samples, samples * 0.1 * (1 + 2 * worker), shared=told)
    assert dealing.rounds.sizes == (12, 4)


def test_a_worker_that_draws_ahead_ends_sharing() -> None:
    reserves = Reserves(50, granularity=1)
    for can_share in (True, True, False, True):
        mains = [reserves.main(worker, (8, 8), 0.0) for worker in (0, 1)]
        for worker in (0, 1):
            reserves.ran(worker, 8, 1.0, PartsReport(can_share=can_share or not worker))
    assert mains == [8, 8]
    assert (reserves.left, reserves.claim(0, 1.0, 100)) == (0, 0)


def test_claims_know_how_long_an_iteration_takes_also_at_a_fixed_fraction() -> None:
    def claimed(seconds: float) -> int:
        reserves = Reserves(50, granularity=1)
        for begun in (0.0, seconds, 2 * seconds):
            mains = [reserves.main(worker, (80, 80), begun) for worker in (0, 1)]
            for worker in (0, 1):
                told = PartsReport(seconds=seconds, claim_seconds=0.01 * seconds, can_share=True)
                reserves.ran(worker, 80, seconds, told)
        assert mains == [40, 40]
        reserves.main(0, (80, 80), 3 * seconds)
        return reserves.claim(0, 3.5 * seconds, 1000)

    assert claimed(0.1) == claimed(1.0) == claimed(10.0)


def test_what_is_told_of_sharing_arrives() -> None:
    told = PartsReport(3, 1.25, 0.5, 6.4, 0.0017, can_share=True)
    assert read_report(report_integers(told), 0.5) == told
