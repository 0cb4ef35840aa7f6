"""Sessions of several workers in one process: threads that exchange real rows."""

import logging
import threading
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import pytest
from waits import HANG_SECONDS, until
from worker_threads import Meeting, Threads, X, run, step

from lbbsp_core import (
    Collectives,
    DisagreementError,
    FixedShares,
    LastValue,
    Limits,
    ResourceSampler,
    SessionOptions,
    SingleWorker,
    WorkerSession,
    read_run,
)
from lbbsp_core.measure import BusyTimer
from lbbsp_core.runtime.exchange.digest import Digest, check_samples
from lbbsp_core.runtime.exchange.handshake import Devices
from lbbsp_core.runtime.extensions.record_file import Recording
from lbbsp_core.runtime.extensions.settings import SettingsComparison
from lbbsp_core.runtime.extensions.stopping import Stopping
from lbbsp_core.runtime.extensions.weights import WeightComparison
from lbbsp_core.runtime.loop import pipelined
from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_core.runtime.loop.session_state import check_states
from lbbsp_core.runtime.planning import running_step
from lbbsp_core.runtime.planning.running_step import Reading, StepMeter
from lbbsp_core.runtime.reliability.activity import Activity
from lbbsp_core.runtime.reliability.liveness import BackgroundThread, training_thread

pytestmark = pytest.mark.usefixtures("patient")
own = threading.local()


def own_thread() -> BackgroundThread:
    """Stands for the shared thread, in which the workers here would wait for each other."""
    if not hasattr(own, "thread"):
        own.thread = BackgroundThread(threading.current_thread().name)
    return own.thread


@pytest.fixture
def own_threads(monkeypatch):
    monkeypatch.setattr(pipelined, "background_thread", own_thread)


def done() -> None:
    """Nothing to wait for: gradients and sums are there."""


def fixed(rank):
    return SessionOptions(policy=FixedShares((2.0, 1.0)))


def test_collectives_are_what_a_session_asks_for():
    assert isinstance(SingleWorker(), Collectives)
    assert isinstance(Threads(0, 2, None), Collectives)


@pytest.mark.parametrize("preempted", [False, True])
def test_a_stop_that_one_worker_requests_reaches_all_after_the_same_step(preempted):
    def worker(session, collectives):
        stopping, seen = session.extensions[Stopping], []
        session.use_order(session.make_order(8 * X))
        session.start({})
        for number in range(4):
            if session.rank == 1 and number == 2:
                stopping.request_preemption() if preempted else session.request_stop()
                assert preempted or stopping.requested
            step(session, collectives)
            seen.append((session.stopping, stopping.preempted))
            if session.stopping:
                assert not stopping.requested
        return seen

    later = [(False, True)] * 2 if preempted else [(True, False), (False, False)]
    assert run(worker) == [[(False, False)] * 2 + later] * 2


@dataclass(frozen=True)
class SlowLearner(LastValue):
    """Predictor that learns only once the step has been exchanged."""

    exchanged = threading.Event()

    def train(self, state):
        assert self.exchanged.wait(HANG_SECONDS)
        raise ArithmeticError("cannot learn")


def test_a_predictor_learns_beside_the_exchange_and_what_it_raises_is_raised():
    def worker(session, collectives):
        session.start({})
        step(session, collectives)
        SlowLearner.exchanged.set()
        with pytest.raises(ArithmeticError, match="cannot learn"):
            session.before_allreduce()
        session.balancer.train(training_thread().start)
        with pytest.raises(ArithmeticError, match="cannot learn"):
            session.close()
        assert not session.meter.names, "it is closed all the same"

    run(worker, options=lambda _: SessionOptions(predictor=SlowLearner(), drivers=("runnable",)))


def test_another_lag_keeps_the_position_and_the_plan():
    def worker(session, collectives):
        session.use_order(session.make_order(3 * X, seed=1, steps_per_epoch=2))
        session.start({})
        step(session, collectives)
        expected = session.local_indices(1).tolist()
        session.use_lag(3)
        assert (session.step, session.balancer.schedule.lag) == (1, 3)
        assert session.local_indices(1).tolist() == expected
        session.begin_epoch(0)
        assert session.step == 2, "an epoch has two steps, a pass three"
        drawn = [session.local_indices(ahead).tolist() for ahead in (2, 3, 4)]
        step(session, collectives)
        session.use_lag(1)
        assert session.local_indices(3).tolist() == drawn[1]
        with pytest.raises(LookupError, match="plans are known for steps 3 to 3"):
            session.local_indices(4)

    run(worker, options=fixed)


def test_an_epoch_that_one_worker_ends_early_is_named():
    """Plans are equal, but gradients of different steps would be summed."""

    def worker(session, collectives):
        session.use_order(session.make_order(4 * X))
        session.start({})
        for epoch in range(2):
            session.begin_epoch(epoch)
            for _ in range(2 if session.rank else 4):
                step(session, collectives)

    with pytest.raises(DisagreementError, match=r"at step [24] worker 1 .*, or is at another step"):
        run(worker, options=fixed)


def test_busy_seconds_are_those_of_included_steps(monkeypatch):
    tick(monkeypatch, 1.0)

    def worker(session, collectives):
        session.start({})
        totals = []
        for _ in range(3):
            step(session, collectives)
            totals.append(session.busy_seconds)
        session.start({})
        return [*totals, session.busy_seconds]

    for totals in run(worker):
        assert totals == [0.0, 1.0, 2.0, 0.0]


@pytest.mark.parametrize(
    "options",
    [
        {"limits": 4},
        {"limits": [Limits(1, 4), Limits(1, 8), Limits()]},
        {"policy": "fixed:9/12/18"},
        {"policy": "proportional:ratings=9/12/18"},
        {"policy": "bsp", "limits": Limits(2, 4)},
        {"policy": "lbbsp:min_gain=0", "limits": 4},
    ],
)
def test_options_of_several_workers_do_not_disturb_a_single_one(options):
    session = WorkerSession(SingleWorker(), X, SessionOptions(**options), framework="none")
    session.use_order(session.make_order(2 * X))
    session.start({})
    step(session, session.collectives)
    assert session.sizes == (X,)
    with pytest.raises(ValueError, match="limits must be >= 1"):
        SessionOptions(limits=0)


def test_the_gpu_that_is_sampled_is_that_of_the_process(monkeypatch):
    sampled = []

    def sampler(names, gpu):
        sampled.append(gpu)
        return ResourceSampler(names)

    monkeypatch.setattr(running_step, "ResourceSampler", sampler)
    for devices in (None, Devices(("a GPU",), are_gpus=True, number=3)):
        session = WorkerSession(
            SingleWorker(), 8, SessionOptions(), framework="none", devices=devices
        )
        session.start({})
        session.close()
    assert sampled == [0, 3]


def test_a_fit_that_ended_forgets_its_request_to_stop():
    session = WorkerSession(SingleWorker(), X, SessionOptions(), framework="none")
    session.request_stop()
    session.close()
    assert not session.extensions[Stopping].requested


def test_a_session_notes_what_its_worker_does():
    session = WorkerSession(SingleWorker(), X, SessionOptions(), framework="none")
    doing = lambda: session.activity.read()[:2]  # noqa: E731
    assert doing() == (Activity.STARTING, 0)
    session.start({})
    assert doing() == (Activity.OUTSIDE, 0)
    session.begin_step()
    assert doing() == (Activity.COMPUTING, 0)
    with session.excluded_wait():
        assert doing() == (Activity.WAITING, 0)
    assert doing() == (Activity.COMPUTING, 0)
    row = session.before_allreduce()
    assert doing() == (Activity.WAITING, 0)
    session.after_allreduce([row])
    assert doing() == (Activity.COMPUTING, 1)
    session.close()
    assert doing() == (Activity.OUTSIDE, 1)


def test_a_pipelined_session_notes_that_its_worker_waits(own_threads):
    def worker(session, collectives):
        doing = lambda: session.activity.read()[:2]  # noqa: E731
        seen = []
        for _ in range(2):
            session.end_step(lambda: None, lambda: seen.append(doing()))
            session.finish_barrier()
            seen.append(doing())
        return seen

    waits = [(Activity.WAITING, 0), (Activity.COMPUTING, 1)]
    waits += [(Activity.WAITING, 1), (Activity.COMPUTING, 2)]
    assert run(worker, make=PipelinedSession) == [waits, waits]


def test_facts_that_differ_are_named():
    def worker(session, collectives):
        session.start({"epochs": 3 + session.rank})

    with pytest.raises(DisagreementError, match="disagree on epochs: worker 0 has 3, worker 1 has"):
        run(worker)


def diverging(session, collectives, offers=8, at=3):
    """A model whose weights differ from step `at` on; returns the steps in which they were read."""
    order = session.make_order(60, seed=1)
    session.use_order(order)
    session.start({})
    read = []
    for number in range(offers):
        value = 1.0 + (collectives.rank == 1 and number >= at)
        session.extensions[WeightComparison].compare(
            lambda v=value: read.append(session.step) or [np.full(9, v)]
        )
        step(session, collectives)
    session.extensions[WeightComparison].check()
    return read


def test_weights_that_diverge_are_named_within_so_many_steps():
    options = lambda rank: SessionOptions(compare_weights=4)  # noqa: E731
    message = "different weights at step 4, .* every 4 steps: those of worker 0 have norm 3 .*"
    with pytest.raises(DisagreementError, match=message + "of worker 1 6 "):
        run(diverging, options=options)
    with pytest.raises(DisagreementError, match="different weights at step 0"):
        run(lambda *args: diverging(*args, at=0), options=options)
    with pytest.raises(DisagreementError, match=r"step 1, .* optimizer draws other noise there"):
        run(lambda *args: diverging(*args, at=1))


def test_weights_are_read_only_where_they_are_compared():
    def equal(session, collectives):
        return diverging(session, collectives, at=99)

    read = lambda every: run(equal, options=lambda rank: SessionOptions(compare_weights=every))  # noqa: E731
    assert read(4) == [[0, 1, 4]] * 2
    assert read(1) == [[*range(8)]] * 2
    assert read(None) == [[], []]
    assert read(50) == [[0, 1]] * 2
    assert run(equal, workers=1, options=lambda rank: SessionOptions(compare_weights=1)) == [[]]


def rates(session, collectives, own=0.1, steps=6, at=3):
    """Worker 1 sets another rate in step `at`; returns the step in which the error came."""
    session.use_order(session.make_order(60, seed=1))
    session.start({})
    for number in range(steps):
        rate = own if collectives.rank == 1 and number >= at else 0.1
        try:
            session.extensions[SettingsComparison].compare(
                lambda r=rate: {"learning rate": r}, "set it on all workers"
            )
        except DisagreementError as error:
            return session.step, str(error)
        step(session, collectives)
    return session.step, ""


def test_settings_that_differ_are_named_in_the_next_step_if_weights_are_compared():
    differ = lambda *args: rates(*args, own=0.2)  # noqa: E731
    message = (
        "workers disagree on the learning rate (0.1 on worker 0, 0.2 on worker 1); this is so "
        "since step 3, and makes their models different: set it on all workers"
    )
    assert run(differ) == [(4, message)] * 2
    assert run(rates) == [(6, "")] * 2
    options = lambda rank: SessionOptions(compare_weights=None)  # noqa: E731
    assert run(differ, options=options) == [(6, "")] * 2


def test_samples_that_differ_are_named():
    def worker(session, collectives, changed=0.0):
        rows = np.arange(12.0).reshape(4, 3) + 1
        rows[2] += changed * collectives.rank
        check_samples(session.collectives, [Digest.of([row]) for row in rows])

    run(lambda *args: worker(*args, changed=1e-6))
    with pytest.raises(DisagreementError, match="on the data: samples of worker 1 differ from"):
        run(lambda *args: worker(*args, changed=0.5))


def test_a_flag_is_shared():
    def worker(session, collectives):
        return [session.any_worker(session.rank == 1), session.any_worker(False)]

    assert run(worker) == [[True, False]] * 2


def test_rank_0_records_a_header_and_which_steps_are_not_learned_from(tmp_path, monkeypatch):
    """The first step of an epoch, and one that is excluded."""
    tick(monkeypatch, 0.001)

    def worker(session, collectives):
        session.use_order(session.make_order(4 * X, seed=9))
        session.start({})
        for number in range(4):
            if number == 2:
                session.exclude_step()
            session.begin_step()
            step(session, collectives)

    run(worker, options=lambda rank: SessionOptions(record=tmp_path / str(rank)))
    found = read_run(tmp_path / "0")
    assert (found.header.framework, found.header.workers, found.header.seed) == ("threads", 2, 9)
    excluded = [(0, 1), (), (0, 1), ()]
    assert [(line.step, line.excluded) for line in found.steps] == [*enumerate(excluded)]
    assert not (tmp_path / "1").exists()


def test_the_record_has_the_steps_that_each_training_plans(tmp_path):
    def worker(session, collectives):
        for first, epochs, steps, done in ((0, 2, None, 4), (1, 3, 5, 5), (0, None, 2, 1)):
            session.use_order(session.make_order(2 * X))
            session.extensions[Recording].plan(epochs=epochs, steps=steps)
            session.start({})
            session.begin_epoch(first)
            for _ in range(done):
                step(session, collectives)
            session.close()

    run(worker, options=lambda rank: SessionOptions(record=tmp_path))
    planned = [(each.event, each.steps) for each in read_run(tmp_path).events]
    # The second one begins at step 4, the third one at step 10: an epoch has 2 steps.
    assert planned == [("planned", 4), ("planned", 9), ("planned", 12)]


@pytest.mark.parametrize("policy", ["lbbsp", "observe"])
def test_the_record_has_what_each_worker_knew_before_a_step(tmp_path, monkeypatch, policy):
    class Sampler:
        """Samples the rank, which is a name of the thread, and the number of samples so far."""

        def __init__(self, names, gpu):
            self.names, self.taken = names, 0

        def sample(self):
            self.taken += 1
            own = float(threading.current_thread().name)
            return (own, 10.0 * self.taken)[: len(self.names)]

        def close(self):
            pass

    monkeypatch.setattr(StepMeter, "sampling_seconds", 0.0)
    monkeypatch.setattr(running_step, "ResourceSampler", Sampler)

    def worker(session, collectives):
        threading.current_thread().name = str(session.rank)
        session.start({})
        for _ in range(3):
            step(session, collectives)

    names = [("memory_percent",), ("memory_percent", "runnable")]
    run(
        worker,
        options=lambda rank: SessionOptions(
            record=tmp_path / str(rank), drivers=names[rank], policy=policy
        ),
    )
    lines = read_run(tmp_path / "0").steps
    known = [line.drivers for line in lines]
    assert None not in lines[-1].predicted_seconds
    assert known == [
        {},
        {"runnable": (None, 10.0), "memory_percent": (0.0, 1.0)},
        {"runnable": (None, 20.0), "memory_percent": (0.0, 1.0)},
    ]


def test_the_record_has_the_communication_that_the_slowest_worker_has_hidden(tmp_path, monkeypatch):
    def worker(session, collectives):
        session.start({})
        for hidden in (0.5, 0.25):
            factors = (0.0,) * len(session.meter.names)
            reading = Reading(1.0 + session.rank, factors, hidden + 1 - session.rank)
            monkeypatch.setattr(session.meter, "reach", lambda reading=reading: reading)
            step(session, collectives)

    run(worker, options=lambda rank: SessionOptions(record=tmp_path))
    assert [line.hidden_seconds for line in read_run(tmp_path).steps] == [0.5, 0.25]


def tick(monkeypatch, seconds):
    """Lets each reading of a clock of busy time be `seconds` later than the last one."""

    def ticking():
        return BusyTimer(clock=count(0, round(seconds * 1e9)).__next__)

    monkeypatch.setattr(running_step, "BusyTimer", ticking)


def test_at_debug_level_each_step_says_who_waited_for_whom(caplog):
    def worker(session, collectives):
        session.start({})
        step(session, collectives)

    with caplog.at_level(logging.DEBUG, logger="lbbsp"):
        run(worker)
    lines = [record.getMessage() for record in caplog.records if record.name == "lbbsp.session"]
    assert len(lines) == 2  # one a worker, who are all in this process
    assert all(line.startswith("step 0 took ") and "waited for worker" in line for line in lines)


def test_waits_inside_a_step_are_not_busy_time():
    """Of the two workers one waits inside its steps; both are busy for about nothing."""
    released = threading.Event()

    def worker(session, collectives):
        session.use_order(session.make_order(4 * X))
        session.start({})
        step(session, collectives)
        if session.rank == 0:
            with session.excluded_wait():
                released.wait(HANG_SECONDS)
        else:
            released.set()
        row = session.before_allreduce()
        assert row.shape == (session.width,)
        session.after_allreduce(collectives.all_gather([int(limb) for limb in row]))
        return session.step

    assert run(worker) == [2, 2]


def test_a_session_continues_from_what_all_workers_have_saved():
    def worker(session, collectives):
        session.use_order(session.make_order(6 * X, seed=2))
        session.start({})
        check_states(session.balancer)
        for _ in range(3):
            step(session, collectives)
        state, arrays = session.save_state()
        second = WorkerSession(collectives, X, session.options, framework="threads")
        second.use_order(second.make_order(6 * X, seed=2))
        session.extensions[Stopping].stopping = True
        session.load_state(state, arrays)
        assert not session.stopping
        second.load_state(state, arrays)
        second.start({})
        drawn = [second.local_indices(3).tolist(), session.local_indices(3).tolist()]
        return second.facts() == session.facts(), drawn[0] == drawn[1]

    assert run(worker, options=fixed) == [(True, True)] * 2


# --- the pipelined mode ---------------------------------------------------------------------------


def train(session, collectives, ahead=0, steps=6):
    """Draws as a loader that fetches `ahead` batches ahead; returns the samples of each step."""
    order = session.make_order(steps * X, seed=3)
    drawn, numbers = [], session.epoch_steps(order)
    waiting = [session.local_indices(next(numbers)).tolist() for _ in range(ahead)]
    for _ in range(steps):
        number = next(numbers, None)
        if number is not None:
            waiting.append(session.local_indices(number).tolist())
        drawn.append(waiting.pop(0))
        session.end_step(done, done)
    session.finish_barrier()
    return drawn


@pytest.mark.parametrize(("ahead", "lag"), [(0, 1), (1, 3), (2, 4)])
def test_the_lag_grows_with_what_is_drawn_ahead_and_no_sample_is_lost(own_threads, ahead, lag):
    def worker(session, collectives):
        return train(session, collectives, ahead), session.balancer.schedule.lag

    results = run(worker, make=PipelinedSession)
    drawn = [sample for parts, _ in results for part in parts for sample in part]
    assert sorted(drawn) == list(range(6 * X))
    assert [found for _, found in results] == [lag, lag]


class NotedLock:
    """A lock that notes which threads have come to it."""

    def __init__(self, lock):
        self.lock, self.asked = lock, set()

    def __enter__(self):
        self.asked.add(threading.current_thread())
        return self.lock.__enter__()

    def __exit__(self, *error):
        return self.lock.__exit__(*error)


def test_another_thread_sees_a_step_that_is_over_only_after_its_barrier(own_threads):
    reached, let_go = threading.Event(), threading.Event()
    session = PipelinedSession(Threads(0, 1, Meeting(1)), X, SessionOptions(), framework="one")
    lock = session._finishing = NotedLock(session._finishing)
    order = session.make_order(4 * X)
    next(session.epoch_steps(order))

    def summed():
        reached.set()
        let_go.wait(HANG_SECONDS)

    session.end_step(done, summed)
    own = threading.Thread(target=session.finish_barrier)
    own.start()
    assert reached.wait(HANG_SECONDS)
    seen = []
    other = threading.Thread(target=lambda: seen.append(session.step))
    other.start()
    until(lambda: other in lock.asked or not other.is_alive())
    let_go.set()
    for thread in (own, other):
        thread.join(HANG_SECONDS)
    assert seen == [1]


def test_the_pending_step_is_written_by_a_flush(own_threads, tmp_path):
    path = tmp_path / "job.prom"
    options = SessionOptions(metrics_file=path, record=tmp_path)
    session = PipelinedSession(Threads(0, 1, Meeting(1)), X, options, framework="one")
    for _ in session.epoch_steps(session.make_order(4 * X)):
        session.end_step(done, done)
    session.flush()
    assert 'lbbsp_step{run="job"} 3\n' in path.read_text()
    assert [line.step for line in read_run(tmp_path).steps] == [0, 1, 2, 3]


def test_a_stop_requested_before_the_first_step_is_not_lost(own_threads):
    def worker(session, collectives):
        if session.rank == 0:
            session.request_stop()
        train(session, collectives, steps=1)
        return session.stopping

    assert run(worker, make=PipelinedSession) == [True, True]


def test_workers_that_part_ways_are_named(own_threads):
    def worker(session, collectives):
        train(session, collectives, steps=2)
        session.use_order(session.make_order((3 + session.rank) * X))
        session.end_step(done, done)
        session.finish_barrier()

    with pytest.raises(DisagreementError, match="worker 1 is at another step or in another order"):
        run(worker, make=PipelinedSession)


def test_workers_at_different_inner_barriers_are_named(own_threads):
    def worker(session, collectives):
        train(session, collectives, steps=2)
        if session.rank == 0:
            session.pass_inner(1, done, done, 3)
        else:
            session.end_step(done, partial(pytest.fail, "sums that no other worker begins"))
            session.finish_barrier()

    with pytest.raises(DisagreementError, match="use each of several trainers at the same step"):
        run(worker, make=PipelinedSession)


def test_an_inner_barrier_gathers_weights_and_leaves_the_step_as_it_is(own_threads):
    def worker(session, collectives):
        # also before the first step
        sizes = session.pass_inner(1, done, done, 5 - session.rank, 2.0 + session.rank)
        first = session.weights
        train(session, collectives, steps=2)
        session.pass_inner(1, done, done, 3)
        return sizes, first, session.weights, session.step

    assert run(worker, make=PipelinedSession) == [((5, 4), (2.0, 3.0), None, 2)] * 2


def test_batches_drawn_before_a_restore_belong_to_no_step():
    session = PipelinedSession(Threads(0, 1, Meeting(1)), X, SessionOptions(), framework="one")
    numbers = session.epoch_steps(session.make_order(4 * X))
    next(numbers)
    session.restore(session.balancer.state())
    with pytest.raises(RuntimeError, match="iterate the loader again"):
        next(numbers)


def test_the_order_of_an_elastic_job_stays_that_of_its_first_workers(monkeypatch):
    def order(workers, elastic):
        monkeypatch.setenv("LBBSP_ELASTIC", elastic)
        alone = Threads(0, workers, Meeting(workers))
        session = WorkerSession(alone, X, SessionOptions(), framework="threads")
        return session.make_order(5 * X + 2)

    assert order(3, "3/3").drop_last
    assert order(2, "3/2") == order(3, "3/3") != order(2, "2/2")
    assert order(4, "3/2").drop_last, "two replicas on each worker"
    for wrong in ("3/0", "3-2", "/"):
        with pytest.raises(ValueError, match=f"LBBSP_ELASTIC must be .* got '{wrong}'"):
            order(2, wrong)
