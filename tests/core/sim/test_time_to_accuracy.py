"""Learning in virtual time: gradients by differences, updates by hand, equivalence of cuts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from time_to_accuracy import (
    Data,
    Mlp,
    Softmax,
    Task,
    digits,
    learn,
    learn_schedule,
    learned_in_step,
)

from lbbsp_core import ASP, BSP, SSP, ElasticBSP, Even, LastValue, LoadBalanced, Synchroniser
from lbbsp_core.sim import (
    Lognormal,
    SimConfig,
    Timeline,
    cores,
    run_async,
    run_bsp,
    schedule,
    synthetic_cluster,
)


def blobs(samples: int = 120) -> Data:
    """Returns three clusters of points in four dimensions."""
    random = np.random.default_rng(0)
    y = np.arange(samples) % 3
    x = random.normal(0, 0.6, (samples, 4)) + np.eye(4)[y] * 2
    return Data(x[: samples // 2], y[: samples // 2], x[samples // 2 :], y[samples // 2 :])


@pytest.mark.parametrize("model", [Softmax(), Mlp(5)])
def test_gradients_are_those_of_the_loss(model: Any) -> None:
    x, y, *_ = blobs(20)
    random = np.random.default_rng(1)
    w = model.init(4, 3, seed=2) + random.normal(0, 0.3, model.init(4, 3, 2).shape)

    def loss(weights: Any) -> float:
        logits = model.logits(weights, x, 3)
        log_sum = np.log(np.exp(logits).sum(axis=1))
        return float((log_sum - logits[np.arange(len(y)), y]).mean())

    h = 1e-6
    numeric = [(loss(w + h * e) - loss(w - h * e)) / (2 * h) for e in np.eye(len(w))]
    assert model.gradient(w, x, y, 3) == pytest.approx(np.array(numeric), abs=1e-7)


class Recorder:
    """Model of one weight that records the weight and samples of each gradient."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, list[float]]] = []

    def init(self, features: int, classes: int, seed: int) -> Any:
        return np.zeros(1)

    def logits(self, w: Any, x: Any, classes: int) -> Any:
        return np.zeros((len(x), classes))

    def gradient(self, w: Any, x: Any, y: Any, classes: int) -> Any:
        self.seen.append((float(w[0]), sorted(x[:, 0].tolist())))
        return np.array([-1.0])


def numbered(samples: int) -> Data:
    x = np.arange(float(samples))[:, None]
    return Data(x, np.zeros(samples, np.int64), x[:1], np.zeros(1, np.int64))


def test_asynchronous_gradients_by_hand() -> None:
    """Worker 0 pushes at 2, 4, 6, worker 1 at 3, 7; weights 1/4 and 3/4 of a batch of 4."""
    model = Recorder()
    run = schedule(ASP(), [[2.0, 2.0, 2.0], [3.0, 4.0, 9.0]])
    sizes = np.where(run.worker == 0, 1, 3)
    learn_schedule(Task(numbered(12), model, learning_rate=1.0), run, sizes, 4)
    assert run.update.tolist() == [0, 2, 3, 1, 4, 5]
    weights = [w for w, _ in model.seen]
    # by update: versions 0, 0, 1, 3, 2, 5 of a model at 0, .25, 1, 1.25, 1.5, 2.25
    assert weights == [0.0, 0.0, 0.25, 1.25, 1.0, 2.25]
    drawn = [sample for _, samples in model.seen for sample in samples]
    assert sorted(drawn) == list(range(12)), "each sample once an epoch"


def test_gradients_that_never_enter_take_no_samples() -> None:
    """Gradients of update -1 are left out; the others use every sample once."""
    model = Recorder()
    run = schedule(ASP(), [[2.0, 2.0], [3.0, 3.0]])
    lost = run._replace(update=np.array([0, 1, -1, 2]))
    learn_schedule(Task(numbered(9), model, 1.0), lost, np.full(4, 3), 6)
    assert sorted(s for _, samples in model.seen for s in samples) == list(range(9))


@pytest.mark.parametrize("policy", [Even(), LoadBalanced()])
@pytest.mark.parametrize("model", [Softmax(), Mlp(6)])
def test_uneven_weighted_gradients_are_those_of_the_whole_batch(policy: Any, model: Any) -> None:
    """BSP with changing batch sizes learns what one process with the global batch learns."""
    cluster = synthetic_cluster(cores([1, 2, 5]), 40, noise=Lognormal(0.4))
    task = Task(blobs(), model, 0.3, seed=7)
    run = run_async(cluster, SimConfig(31), BSP(), policy, LastValue())
    assert len(set(run.sizes.tolist())) > 1
    pieces = learn(task, run, 31)
    whole = learn(task, run_bsp(cluster, SimConfig(31), policy, LastValue()), 31)
    assert pieces.accuracy.tolist() == whole.accuracy.tolist()
    assert pieces.seconds == pytest.approx(whole.seconds)
    assert whole.accuracy[-1] > 0.9


@pytest.mark.parametrize("sync", [SSP(2), ASP(), ElasticBSP(5)])
def test_learning_is_deterministic_and_works(sync: Synchroniser) -> None:
    cluster = synthetic_cluster(cores([1, 2, 5]), 40, noise=Lognormal(0.4))
    task = Task(blobs(), Mlp(6), 0.3)
    one, two = (learn(task, run_async(cluster, SimConfig(30), sync), 30) for _ in range(2))
    assert one.accuracy.tolist() == two.accuracy.tolist()
    assert one.accuracy.max() > 0.9
    assert len(one.seconds) == 41
    assert (np.diff(one.seconds) > 0).all()


def test_time_to_accuracy_is_the_first_time_it_is_reached() -> None:
    walls = np.array([[1.0], [2.0], [3.0]])
    run = Timeline(np.full((3, 1), 20), walls)
    curve = learn(Task(blobs(), Softmax(), 0.5), run, 20)
    assert curve.seconds.tolist() == [0.0, 1.0, 3.0, 6.0]
    at = int(np.argmax(curve.accuracy >= 0.8))
    assert at > 0
    assert curve.time_to(0.8) == curve.seconds[at]
    assert curve.time_to(1.01) is None


def test_the_stream_goes_through_every_epoch() -> None:
    take = Task(numbered(10)).stream()
    epochs = [sorted(take(10 * k, 10 * k + 10).tolist()) for k in range(3)]
    assert epochs == [list(range(10))] * 3
    assert take(0, 10).tolist() != take(10, 20).tolist()
    assert take(7, 23).tolist() == [*take(7, 10), *take(10, 20), *take(20, 23)]


def test_digits_are_learned() -> None:
    pytest.importorskip("sklearn")
    data = digits()
    assert (len(data.y), len(data.test_y)) == (1438, 359)
    accuracies = learned_in_step(Task(data, Softmax(), 0.5), 256, 40)
    assert accuracies[0] < 0.2
    assert accuracies[-1] > 0.9


def test_a_rate_out_of_range() -> None:
    with pytest.raises(ValueError, match="learning_rate must be finite and > 0"):
        Task(blobs(), Softmax(), 0.0)
