"""Compares the plans of a DCGAN and of `Module.fit` on three unequal workers with the balance.

Three worker processes with CPU quotas in the proportion 0.7 : 0.7 : 0.3, and a parameter server,
train with X = 192: a DCGAN whose two trainers share a plan, and a convolutional network by the
legacy `Module.fit`. Prints, from the last half of each run's record:

- the plan: median batch sizes;
- the balance: the batch sizes with which all workers would have taken equally long, under the
  costs per sample measured in these steps, and the largest relative distance of the plan from it;
- the efficiency: the step of the balance over the achieved one, and the same for plain BSP under
  the costs of the balanced run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from recorded import run_recorded

if TYPE_CHECKING:
    from lbbsp_core.policy import Policy
    from lbbsp_core.runtime.record.record import Run

SPEEDS = (0.7, 0.7, 0.3)
X, SIDE, NOISE, SAMPLES = 192, 16, 16, 384
TRAININGS = ("dcgan", "module")


def train_dcgan(policy: Policy, steps: int) -> None:
    """Trains a generator and a discriminator as one of the workers."""
    import lbbsp_mx

    import mxnet as mx  # isort: skip
    from mxnet import autograd, gluon, nd

    nn = gluon.nn
    generator, discriminator = nn.HybridSequential(), nn.HybridSequential()
    for channels, stride, padding in ((128, 1, 0), (64, 2, 1), (32, 2, 1)):
        generator.add(
            nn.Conv2DTranspose(channels, 4, stride, padding, use_bias=False),
            lbbsp_mx.SyncBatchNorm(in_channels=channels),
            nn.Activation("relu"),
        )
    generator.add(nn.Conv2D(1, 3, padding=1, activation="tanh"))
    for channels in (32, 64, 128):
        discriminator.add(nn.Conv2D(channels, 4, 2, 1), nn.LeakyReLU(0.2))
    discriminator.add(nn.Dense(1))
    for net in (generator, discriminator):
        net.initialize(mx.init.Normal(0.02))
        net.hybridize()
    adam = {"learning_rate": 2e-4, "beta1": 0.5}
    generating = lbbsp_mx.Trainer(
        generator.collect_params(), "adam", adam, global_batch_size=X, policy=policy
    )
    discriminating = lbbsp_mx.Trainer(
        discriminator.collect_params(), "adam", adam, beside=generating
    )
    loss_of = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    rng = np.random.default_rng(generating.kvstore.rank)
    images, _ = data()
    sampler = generating.batch_sampler(steps * X, seed=0)  # one long epoch
    for indices in sampler:
        count = len(indices)
        real = nd.array(images[np.asarray(indices) % SAMPLES])
        noise = nd.array(rng.normal(size=(count, NOISE, 1, 1)))
        with autograd.record():
            fake = generator(noise)
            loss = loss_of(discriminator(real), nd.ones(count))
            loss = loss + loss_of(discriminator(fake.detach()), nd.zeros(count))
        loss.backward()
        discriminating.step(count)
        with autograd.record():
            loss = loss_of(discriminator(fake), nd.ones(count))
        loss.backward()
        generating.step(count)


def train_module(policy: Policy, steps: int) -> None:
    """Trains a symbol by `Module.fit` as one of the workers."""
    import lbbsp_mx

    import mxnet as mx  # isort: skip

    values = mx.sym.var("data")
    for number in range(3):
        values = mx.sym.Convolution(values, kernel=(3, 3), num_filter=128, name=f"conv{number}")
        values = mx.sym.Activation(values, act_type="relu")
    values = mx.sym.FullyConnected(mx.sym.Flatten(values), num_hidden=10, name="dense")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(values, name="softmax"))
    store = lbbsp_mx.KVStore("dist_sync")
    images, labels = data()
    drawn = np.arange(steps * X) % SAMPLES
    train = store.balance(images[drawn], labels[drawn], global_batch_size=X, policy=policy, seed=0)
    module.fit(train, kvstore=store, num_epoch=1, optimizer_params={"learning_rate": 0.01})


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns seeded noise images, shape ``(SAMPLES, 1, SIDE, SIDE)``, and labels."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(SAMPLES, 1, SIDE, SIDE)).astype("f4")
    return images, rng.integers(0, 10, SAMPLES).astype("f4")


def run(training: str, policy: str, steps: int, *, verbose: bool) -> Run:
    """Launches the workers and returns their record."""
    return run_recorded(
        [__file__, "--worker", policy, "--training", training, "--steps", str(steps)],
        len(SPEEDS),
        verbose=verbose,
        speeds=SPEEDS,
        framework="mxnet",
        timeout=900,
    )


def balance(run: Run) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the median plan, and the balance under the costs at that plan."""
    from lbbsp_core.allocation import allocate
    from lbbsp_core.cost import Proportional

    steady = run.last_half()
    sizes = np.array([step.sizes for step in steady])
    busy = np.array([step.busy_seconds for step in steady])
    costs = np.median(busy / sizes, axis=0)
    plan = np.median(sizes, axis=0).astype(int).tolist()
    return plan, allocate([Proportional(1 / cost) for cost in costs], total=X)


def compare(training: str, steps: int, *, verbose: bool) -> None:
    """Runs one training as plain BSP and balanced, and prints the figures."""
    from lbbsp_core.report.summary import summarise

    even = summarise(run(training, "bsp", steps // 2, verbose=verbose))
    record = run(training, "lbbsp", steps, verbose=verbose)
    balanced = summarise(record)
    plan, goal = balance(record)
    distance = max(abs(x - g) / g for x, g in zip(plan, goal, strict=True))
    ideal = balanced.ideal_busy_seconds
    print(f"{training}: quotas {SPEEDS}, X = {X}")
    answers = {
        "plan": plan,
        "balance": list(goal),
        "distance of the plan from the balance": f"{distance:.3f}",
        "step, balanced": f"{balanced.step_seconds:.3f} s",
        "step, plain BSP": f"{even.step_seconds:.3f} s",
        "communication (last arrival to release)": f"{balanced.communication_seconds * 1e3:.1f} ms",
        "efficiency": f"{balanced.efficiency:.3f}",
        "ideal_busy_share": f"{balanced.ideal_busy_share:.3f}",
        "  of plain BSP, by the costs of the balanced run": f"{ideal / even.step_seconds:.3f}",
    }
    for question, answer in answers.items():
        print(f"  {question:<50} {answer}", flush=True)


def main() -> None:
    """Runs both trainings, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--training", choices=TRAININGS)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.worker:
        train = train_dcgan if options.training == "dcgan" else train_module
        from lbbsp_core import registry

        train(registry.POLICIES.build(options.worker), options.steps)
        return
    for training in [options.training] if options.training else TRAININGS:
        compare(training, options.steps, verbose=options.verbose)


if __name__ == "__main__":
    main()
