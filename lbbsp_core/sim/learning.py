r"""Real stochastic gradient descent in virtual time: what a schedule is worth in accuracy.

A simulated schedule says from which version of the model each gradient was computed, and by
which update it entered. Here that is done, with real gradients::

    w_{u+1} = w_u - eta sum_{i in u} (x_i / X) g_i(w_{version_i})

where g_i is the mean gradient of the x_i samples of an iteration. With all of a step's workers
in one update that is plain batch-X descent, and a push on its own moves the model by its share:
every sample weighs the same under every scheme, so that schemes differ in staleness and in time
alone (ours; systems that apply each push with the whole eta need another eta for each scheme).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lbbsp_core.order import SampleStream
from lbbsp_core.sim.asynchronous import AsyncRun
from lbbsp_core.sim.engine import Timeline
from lbbsp_core.sim.events import Schedule
from lbbsp_core.validate import require_positive

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Data(NamedTuple):
    """Samples as rows, and their classes.

    Args:
        x: To learn from, shape ``(samples, features)``.
        y: Their classes, from 0.
        test_x: To score with.
        test_y: Their classes.
    """

    x: Floats
    y: Ints
    test_x: Floats
    test_y: Ints


@lru_cache(maxsize=1)
def digits() -> Data:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; every fifth is for the test.

    Raises:
        ModuleNotFoundError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "learning needs scikit-learn's digits, which are not installed: pip install "
            "'lbbsp[demo]'"
        ) from error
    x, y = load_digits(return_X_y=True)
    x, y = x / 16.0, y.astype(np.int64)
    test = np.arange(len(y)) % 5 == 4
    return Data(x[~test], y[~test], x[test], y[test])


class Model(Protocol):
    """A classifier with all its weights in one array."""

    def init(self, features: int, classes: int, seed: int) -> Floats:
        """Weights to begin with."""
        ...

    def logits(self, w: Floats, x: Floats, classes: int) -> Floats:
        """Scores, shape ``(samples, classes)``."""
        ...

    def gradient(self, w: Floats, x: Floats, y: Ints, classes: int) -> Floats:
        """Of the mean cross-entropy, in the shape of `w`."""
        ...


@dataclass(frozen=True, slots=True)
class Softmax:
    """Multinomial logistic regression: convex, and quick."""

    def init(self, features: int, classes: int, seed: int) -> Floats:
        """Zeros."""
        return np.zeros((features + 1) * classes)

    def logits(self, w: Floats, x: Floats, classes: int) -> Floats:
        """``x W + b``."""
        return _affine(w.reshape(-1, classes), x)

    def gradient(self, w: Floats, x: Floats, y: Ints, classes: int) -> Floats:
        """``x^T (p - y)``."""
        return _back(x, _error(self.logits(w, x, classes), y)).ravel()


@dataclass(frozen=True, slots=True)
class Mlp:
    """One hidden layer of rectified units.

    Args:
        hidden: Its width, >= 1.
    """

    hidden: int = 32

    def init(self, features: int, classes: int, seed: int) -> Floats:
        """He's normal weights, no biases."""
        rng = np.random.default_rng(seed)
        first, second = np.zeros((features + 1, self.hidden)), np.zeros((self.hidden + 1, classes))
        first[:-1] = rng.normal(0, (2 / features) ** 0.5, first[:-1].shape)
        second[:-1] = rng.normal(0, (2 / self.hidden) ** 0.5, second[:-1].shape)
        return np.concatenate([first.ravel(), second.ravel()])

    def logits(self, w: Floats, x: Floats, classes: int) -> Floats:
        """``max(x W + b, 0) V + c``."""
        first, second = self._layers(w, x, classes)
        return _affine(second, np.maximum(_affine(first, x), 0.0))

    def gradient(self, w: Floats, x: Floats, y: Ints, classes: int) -> Floats:
        """Backward through both layers."""
        first, second = self._layers(w, x, classes)
        active = np.maximum(_affine(first, x), 0.0)
        error = _error(_affine(second, active), y)
        below = np.where(active > 0, error @ second[:-1].T, 0.0)
        return np.concatenate([_back(x, below).ravel(), _back(active, error).ravel()])

    def _layers(self, w: Floats, x: Floats, classes: int) -> tuple[Floats, Floats]:
        cut = (x.shape[1] + 1) * self.hidden
        return w[:cut].reshape(-1, self.hidden), w[cut:].reshape(-1, classes)


def _affine(layer: Floats, x: Floats) -> Floats:
    scores: Floats = x @ layer[:-1] + layer[-1]
    return scores


def _error(logits: Floats, y: Ints) -> Floats:
    """Of the mean cross-entropy by the logits."""
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1.0
    error: Floats = p / len(y)
    return error


def _back(x: Floats, error: Floats) -> Floats:
    return np.vstack([x.T @ error, error.sum(axis=0)])


MODELS: dict[str, Callable[[], Model]] = {"softmax": Softmax, "mlp": Mlp}


@dataclass(frozen=True, slots=True)
class Task:
    """What is learned, and how.

    Args:
        data: Samples.
        model: Classifier.
        learning_rate: eta, > 0, of an update from X samples.
        seed: Of the first weights and of the order of samples, >= 0.

    Raises:
        ValueError: An option out of range.
    """

    data: Data
    model: Model = Softmax()
    learning_rate: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive("learning_rate", self.learning_rate)

    @property
    def classes(self) -> int:
        """How many."""
        return int(self.data.y.max()) + 1

    def init(self) -> Floats:
        """The first weights."""
        return self.model.init(self.data.x.shape[1], self.classes, self.seed)

    def gradient(self, w: Floats, samples: Ints) -> Floats:
        """The mean gradient of these samples."""
        return self.model.gradient(w, self.data.x[samples], self.data.y[samples], self.classes)

    def accuracy(self, w: Floats) -> float:
        """Share of the test set that is classified rightly."""
        guessed = self.model.logits(w, self.data.test_x, self.classes).argmax(axis=1)
        return float((guessed == self.data.test_y).mean())

    def stream(self) -> Callable[[int, int], Ints]:
        """The samples from one position to another, counted over the whole run."""
        return SampleStream(len(self.data.y), self.seed).take


class Curve(NamedTuple):
    """Accuracy on the test set as time goes by; one point about every X samples.

    Args:
        seconds: Virtual, ascending; the first is 0.
        accuracy: At these times.
    """

    seconds: Floats
    accuracy: Floats

    def time_to(self, target: float) -> float | None:
        """Seconds until the accuracy is first `target` or more; None if it never is."""
        reached = np.flatnonzero(self.accuracy >= target)
        return float(self.seconds[reached[0]]) if len(reached) else None


def learn(task: Task, run: Timeline | AsyncRun, global_batch_size: int) -> Curve:
    """Trains along a simulated run.

    Args:
        task: What to learn.
        run: In step, or with its own schedule.
        global_batch_size: X.
    """
    if isinstance(run, Timeline):
        return lockstep(learned_in_step(task, global_batch_size, len(run.sizes)), run)
    return learn_schedule(task, run.schedule, run.sizes, global_batch_size)


def learned_in_step(task: Task, global_batch_size: int, steps: int) -> Floats:
    """Accuracies before the first and after each step of batch-X descent.

    The same for every policy that conserves the batch: weighted by ``x_i / X``, the workers'
    gradients sum to that of the whole batch, however it is cut.
    """
    w, take = task.init(), task.stream()
    accuracies = [task.accuracy(w)]
    for step in range(steps):
        samples = take(step * global_batch_size, (step + 1) * global_batch_size)
        w = w - task.learning_rate * task.gradient(w, samples)
        accuracies.append(task.accuracy(w))
    return np.array(accuracies)


def lockstep(accuracies: Floats, run: Timeline) -> Curve:
    """The curve of a run in step: when each of its updates is made."""
    return Curve(np.concatenate([[0.0], np.cumsum(run.wall_seconds)]), accuracies)


def learn_schedule(task: Task, run: Schedule, sizes: Ints, global_batch_size: int) -> Curve:
    """Trains in the order and with the staleness of a schedule.

    Samples are dealt out in the order in which iterations begin. What never entered the model is
    left out, its samples too.
    """
    take = task.stream()
    dealt = _dealt(run, sizes)
    needed = Counter(run.version[run.update >= 0].tolist())
    w, kept = task.init(), {}
    seconds, accuracy, done, scored = [0.0], [task.accuracy(w)], 0, 0
    for number, members in enumerate(_updates(run)):
        if number in needed:
            kept[number] = w
        change = np.zeros_like(w)
        for one in members:
            x, version = int(sizes[one]), int(run.version[one])
            samples = take(int(dealt[one]), int(dealt[one]) + x)
            change += x / global_batch_size * task.gradient(kept[version], samples)
            done += x
            needed[version] -= 1
            if not needed[version] and version < number:
                del kept[version]
        w = w - task.learning_rate * change
        if done // global_batch_size > scored:
            scored = done // global_batch_size
            seconds.append(float(run.push[members].max()))
            accuracy.append(task.accuracy(w))
    return Curve(np.array(seconds), np.array(accuracy))


def _dealt(run: Schedule, sizes: Ints) -> Ints:
    """The position in the stream at which each iteration's samples begin."""
    counted = np.where(run.update >= 0, sizes, 0)
    order = np.lexsort((run.worker, run.start))
    ends = np.empty(len(order), np.int64)
    ends[order] = np.cumsum(counted[order])
    begins: Ints = ends - counted
    return begins


def _updates(run: Schedule) -> Iterator[Ints]:
    """The iterations that enter by each update, by rank."""
    entered = np.flatnonzero(run.update >= 0)
    entered = entered[np.argsort(run.update[entered], kind="stable")]
    return iter(np.split(entered, np.flatnonzero(np.diff(run.update[entered])) + 1))
