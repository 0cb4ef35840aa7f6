r"""Measures the virtual time to an accuracy: gradient descent along simulated schedules.

    python benchmarks/time_to_accuracy.py omnilearn-4 --sync bsp,ssp:3,asp --policies bsp,lbbsp

A simulated schedule records from which version of the model each gradient is computed, and which
update applies it. This module trains accordingly, with real gradients::

    w_{u+1} = w_u - eta sum_{i in u} (x_i / X) g_i(w_{version_i})

where g_i is the mean gradient of the x_i samples of an iteration. If an update aggregates all
workers of a step, it is one of plain batch-X gradient descent; an update from a single push moves
the model in proportion to its samples. Every sample has the same weight under every synchroniser,
so that synchronisers differ in staleness and time only (ours; systems that apply each push with
the full eta need a different eta for each synchroniser).

The data are scikit-learn's digits, the models softmax regression and a multilayer perceptron.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lbbsp_core.order import SampleStream
from lbbsp_core.sim import AsyncRun, Schedule, Timeline, load_scenario
from lbbsp_core.sim.experiment import chosen_runs, experiment_of, run_experiments
from lbbsp_core.validate import require_positive

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Data(NamedTuple):
    """Samples of a classification task, and their classes.

    Args:
        x: Training samples, shape ``(samples, features)``.
        y: Classes of the training samples, integers from 0.
        test_x: Test samples, shape ``(test samples, features)``.
        test_y: Classes of the test samples.
    """

    x: Floats
    y: Ints
    test_x: Floats
    test_y: Ints


@lru_cache(maxsize=1)
def digits() -> Data:
    """Loads scikit-learn's 1,797 digits of 8 x 8 pixels; every fifth is a test sample."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = x / 16.0, y.astype(np.int64)
    test = np.arange(len(y)) % 5 == 4
    return Data(x[~test], y[~test], x[test], y[test])


class Model(Protocol):
    """Classifier with all its weights in one array."""

    def init(self, features: int, classes: int, seed: int) -> Floats:
        """Returns the initial weights."""
        ...

    def logits(self, w: Floats, x: Floats, classes: int) -> Floats:
        """Returns the logits, shape ``(samples, classes)``."""
        ...

    def gradient(self, w: Floats, x: Floats, y: Ints, classes: int) -> Floats:
        """Returns the gradient of the mean cross-entropy, of the same shape as `w`."""
        ...


@dataclass(frozen=True, slots=True)
class Softmax:
    """Multinomial logistic regression: a convex problem, fast to train."""

    def init(self, features: int, classes: int, seed: int) -> Floats:
        """Returns zeros."""
        return np.zeros((features + 1) * classes)

    def logits(self, w: Floats, x: Floats, classes: int) -> Floats:
        """Returns ``x W + b``."""
        return _affine(w.reshape(-1, classes), x)

    def gradient(self, w: Floats, x: Floats, y: Ints, classes: int) -> Floats:
        """Returns ``x^T (p - y) / samples``, with p the softmax of the logits."""
        return _layer_gradient(x, _logit_gradient(self.logits(w, x, classes), y)).ravel()


@dataclass(frozen=True, slots=True)
class Mlp:
    """Multilayer perceptron with one hidden layer of rectified linear units.

    Args:
        hidden: Number of hidden units, >= 1.
    """

    hidden: int = 32

    def init(self, features: int, classes: int, seed: int) -> Floats:
        """Draws He's normal weights; the biases are zero."""
        rng = np.random.default_rng(seed)
        first, second = np.zeros((features + 1, self.hidden)), np.zeros((self.hidden + 1, classes))
        first[:-1] = rng.normal(0, (2 / features) ** 0.5, first[:-1].shape)
        second[:-1] = rng.normal(0, (2 / self.hidden) ** 0.5, second[:-1].shape)
        return np.concatenate([first.ravel(), second.ravel()])

    def logits(self, w: Floats, x: Floats, classes: int) -> Floats:
        """Returns ``max(x W + b, 0) V + c``."""
        first, second = self._layers(w, x, classes)
        return _affine(second, np.maximum(_affine(first, x), 0.0))

    def gradient(self, w: Floats, x: Floats, y: Ints, classes: int) -> Floats:
        """Computes the gradient by backpropagation through both layers."""
        first, second = self._layers(w, x, classes)
        active = np.maximum(_affine(first, x), 0.0)
        error = _logit_gradient(_affine(second, active), y)
        hidden_error = np.where(active > 0, error @ second[:-1].T, 0.0)
        return np.concatenate(
            [_layer_gradient(x, hidden_error).ravel(), _layer_gradient(active, error).ravel()]
        )

    def _layers(self, w: Floats, x: Floats, classes: int) -> tuple[Floats, Floats]:
        split = (x.shape[1] + 1) * self.hidden
        return w[:split].reshape(-1, self.hidden), w[split:].reshape(-1, classes)


def _affine(layer: Floats, x: Floats) -> Floats:
    output: Floats = x @ layer[:-1] + layer[-1]
    return output


def _logit_gradient(logits: Floats, y: Ints) -> Floats:
    """Returns the gradient of the mean cross-entropy with respect to the logits."""
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1.0
    error: Floats = p / len(y)
    return error


def _layer_gradient(x: Floats, error: Floats) -> Floats:
    """Returns the gradient of a layer's weights and biases, from the error at its output."""
    return np.vstack([x.T @ error, error.sum(axis=0)])


MODELS: dict[str, Callable[[], Model]] = {"softmax": Softmax, "mlp": Mlp}
"""Models by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Learning task: data, model and hyper-parameters; hashed by identity.

    Args:
        data: Training and test samples.
        model: Classifier to train.
        learning_rate: Learning rate eta of an update from X samples, > 0.
        seed: Seed of the initial weights and of the order of samples, >= 0.

    Raises:
        ValueError: An option is out of range.
    """

    data: Data
    model: Model = Softmax()
    learning_rate: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive("learning_rate", self.learning_rate)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.data.y.max()) + 1

    def init(self) -> Floats:
        """Returns the initial weights."""
        return self.model.init(self.data.x.shape[1], self.classes, self.seed)

    def gradient(self, w: Floats, samples: Ints) -> Floats:
        """Returns the mean gradient of the training samples with these indices."""
        return self.model.gradient(w, self.data.x[samples], self.data.y[samples], self.classes)

    def accuracy(self, w: Floats) -> float:
        """Returns the fraction of test samples that are classified correctly."""
        predicted = self.model.logits(w, self.data.test_x, self.classes).argmax(axis=1)
        return float((predicted == self.data.test_y).mean())

    def stream(self) -> Callable[[int, int], Ints]:
        """Returns a function that gives the sample indices between two positions in the run."""
        return SampleStream(len(self.data.y), self.seed).take


class Curve(NamedTuple):
    """Test accuracy over time, with about one point per X samples.

    Args:
        seconds: Virtual seconds, ascending; the first value is 0.
        accuracy: Accuracy at these times, a fraction, of the same shape.
    """

    seconds: Floats
    accuracy: Floats

    def time_to(self, target: float) -> float | None:
        """Returns the seconds until the accuracy first reaches `target`; None if it never does."""
        reached = np.flatnonzero(self.accuracy >= target)
        return float(self.seconds[reached[0]]) if len(reached) else None


def learn(task: Task, run: Timeline | AsyncRun, global_batch_size: int) -> Curve:
    """Trains along a simulated run of X samples a step; returns the accuracy over virtual time."""
    if isinstance(run, Timeline):
        return lockstep(learned_in_step(task, global_batch_size, len(run.sizes)), run)
    return learn_schedule(task, run.schedule, run.sizes, global_batch_size)


@lru_cache(maxsize=1)
def learned_in_step(task: Task, global_batch_size: int, steps: int) -> Floats:
    """Returns the accuracies before the first and after each step of synchronous training.

    They are the same for every policy that conserves the global batch: weighted by ``x_i / X``,
    the workers' gradients sum to that of the global batch, however it is divided.
    """
    w, take = task.init(), task.stream()
    accuracies = [task.accuracy(w)]
    for step in range(steps):
        samples = take(step * global_batch_size, (step + 1) * global_batch_size)
        w = w - task.learning_rate * task.gradient(w, samples)
        accuracies.append(task.accuracy(w))
    return np.array(accuracies)


def lockstep(accuracies: Floats, run: Timeline) -> Curve:
    """Returns the curve of a synchronous run: its accuracies at the times of its updates."""
    return Curve(np.concatenate([[0.0], np.cumsum(run.wall_seconds)]), accuracies)


def learn_schedule(task: Task, run: Schedule, sizes: Ints, global_batch_size: int) -> Curve:
    """Trains in the order and with the staleness of a schedule.

    Samples are assigned in the order in which iterations start. Gradients that were never
    applied are left out, together with their samples. `sizes` has the samples of each iteration.
    """
    take = task.stream()
    first_sample = _first_samples(run, sizes)
    remaining_uses = Counter(run.version[run.update >= 0].tolist())
    w, versions = task.init(), {}
    seconds, accuracy, samples_done, batches_scored = [0.0], [task.accuracy(w)], 0, 0
    for update, iterations in enumerate(_updates(run)):
        if update in remaining_uses:
            versions[update] = w
        gradient = np.zeros_like(w)
        for iteration in iterations:
            x, version = int(sizes[iteration]), int(run.version[iteration])
            samples = take(int(first_sample[iteration]), int(first_sample[iteration]) + x)
            gradient += x / global_batch_size * task.gradient(versions[version], samples)
            samples_done += x
            remaining_uses[version] -= 1
            if not remaining_uses[version] and version < update:
                del versions[version]
        w = w - task.learning_rate * gradient
        if samples_done // global_batch_size > batches_scored:
            batches_scored = samples_done // global_batch_size
            seconds.append(float(run.push[iterations].max()))
            accuracy.append(task.accuracy(w))
    return Curve(np.array(seconds), np.array(accuracy))


def _first_samples(run: Schedule, sizes: Ints) -> Ints:
    """Returns the position in the sample stream of each iteration's first sample."""
    applied = np.where(run.update >= 0, sizes, 0)
    order = np.lexsort((run.worker, run.start))
    ends = np.empty(len(order), np.int64)
    ends[order] = np.cumsum(applied[order])
    first: Ints = ends - applied
    return first


def _updates(run: Schedule) -> Iterator[Ints]:
    """Returns, for each update in order, the iterations whose gradients it applies, by rank."""
    applied = np.flatnonzero(run.update >= 0)
    applied = applied[np.argsort(run.update[applied], kind="stable")]
    return iter(np.split(applied, np.flatnonzero(np.diff(run.update[applied])) + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", help="name of a built-in scenario, or a TOML file")
    parser.add_argument("--sync", default="bsp", metavar="A,B")
    parser.add_argument("--policies", default="bsp,lbbsp", metavar="A,B")
    parser.add_argument("--target", type=float, default=0.95, help="accuracy to reach, in (0, 1]")
    parser.add_argument("--model", choices=MODELS, default="softmax")
    parser.add_argument("--learning-rate", type=float, default=0.5, help="of X samples")
    options = parser.parse_args()
    scenario = load_scenario(options.scenario)
    task = Task(digits(), MODELS[options.model](), options.learning_rate)
    runs = chosen_runs(options.policies.split(","), ["ema0.5"], 1, options.sync.split(","))
    print("| run | total, s | efficiency | to the accuracy, s |\n|---|---|---|---|")
    for row, run in run_experiments([experiment_of(scenario)], runs):
        reached = learn(task, run, scenario.total).time_to(options.target)
        shown = "never" if reached is None else f"{reached:.1f}"
        print(f"| {row.title} | {row.total_seconds:.1f} | {row.efficiency:.4f} | {shown} |")


if __name__ == "__main__":
    main()
