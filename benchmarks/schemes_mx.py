"""Measures real training times under each synchroniser, and compares them with the simulator's.

Three workers, the third three times slower, train on scikit-learn's digits with
`lbbsp_mx.AsyncTrainer` and one parameter server, until the same number of samples has entered the
model. A sample takes 1 ms of sleep (3 ms on the slow worker), so that other load on the machine has
little effect. Each real time is compared with that of `lbbsp_core.sim`, given the workers' median
speeds in the plain ASP run and their median gap between iterations. Each round runs all schemes in
turn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from lbbsp_core import ASP, BSP, DSSP, SSP, ElasticBSP, Even, LastValue, LoadBalanced, read_run
from lbbsp_core.runtime.record.record import PushLine

X, STEPS = 48, 60
SECONDS = 0.001, 0.001, 0.003  # per sample, by worker
SCHEMES = {
    "asp": (ASP(), Even()),
    "bsp": (BSP(), Even()),
    "ssp:2": (SSP(2), Even()),
    "dssp:1:4": (DSSP(1, 4), Even()),
    "elasticbsp:4": (ElasticBSP(4), Even()),
    "lbbsp + ssp:2": (SSP(2), LoadBalanced()),
    "lbbsp + asp": (ASP(), LoadBalanced()),
}


def train(scheme: str) -> None:
    """Trains as one of the workers."""
    import lbbsp_mx

    import mxnet as mx  # isort: skip
    from mxnet import autograd, gluon

    from lbbsp_core.demo import digits

    data, held_out = digits.digits()
    pixels, labels = data.x.reshape(len(data.y), -1), data.y.astype("f4")
    mx.random.seed(0)
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(32, in_units=64, activation="tanh"), gluon.nn.Dense(10, in_units=32))
    net.initialize(mx.init.Xavier())
    sync, policy = SCHEMES[scheme]
    trainer = lbbsp_mx.AsyncTrainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": 0.3},
        sync=sync,
        policy=policy,
        predictor=LastValue(),
        global_batch_size=X,
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for samples in trainer.batch_sampler(X * STEPS):
        drawn = np.array(samples) % len(labels)
        with autograd.record():
            loss = loss_of(net(mx.nd.array(pixels[drawn])), mx.nd.array(labels[drawn]))
        loss.backward()
        time.sleep(SECONDS[trainer.rank] * len(samples))
        trainer.step(len(samples))
    trainer.finish()
    if trainer.rank == 0:
        read = net(mx.nd.array(held_out.x.reshape(len(held_out.y), -1))).asnumpy().argmax(axis=1)
        print(f"ACCURACY {np.mean(read == held_out.y):.4f}")


def real(scheme: str) -> tuple[float, float, list[PushLine]]:
    """Returns seconds, accuracy and pushes of a real run."""
    from lbbsp_core.launch import launch

    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        status = launch(
            [__file__, "--worker", scheme],
            workers=3,
            framework="mxnet",
            timeout=120,
            run_dir=Path(folder),
            output=lambda rank, line: lines.append(line),
        )
        if status:
            sys.exit("\n".join(lines[-40:]))
        pushes = read_run(folder).pushes
    (accuracy,) = (line.split()[1] for line in lines if line.startswith("ACCURACY"))
    return pushes[-1].seconds, float(accuracy), pushes


def simulated(scheme: str, pushes: list[PushLine]) -> float:
    """Returns the virtual seconds of a scheme, with the speeds of a real run under ASP."""
    from lbbsp_core.sim import ReplayedCluster, SimConfig, run_async

    mine = [[line for line in pushes if line.worker == rank] for rank in range(3)]
    gaps = [
        new.seconds - old.seconds - new.busy_seconds for own in mine for old, new in pairwise(own)
    ]
    speeds = [median(line.samples / line.busy_seconds for line in own) for own in mine]
    cluster = ReplayedCluster(np.tile(speeds, (STEPS, 1)), (((),) * 3,) * STEPS, X)
    config = SimConfig(X, communication_seconds=max(median(gaps), 0.0))
    sync, policy = SCHEMES[scheme]
    return run_async(cluster, config, sync, policy, LastValue()).total_seconds


def main() -> None:
    """Runs all schemes in each round, and prints medians over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.worker:
        train(options.worker)
        return
    rounds = [{scheme: real(scheme) for scheme in SCHEMES} for _ in range(options.rounds)]
    virtual = {
        scheme: median(simulated(scheme, each["asp"][2]) for each in rounds) for scheme in SCHEMES
    }
    print("scheme           real simulated  ratio accuracy  lead stale")
    for scheme in SCHEMES:
        seconds = median(each[scheme][0] for each in rounds)
        accuracy = median(each[scheme][1] for each in rounds)
        pushes = [line for each in rounds for line in each[scheme][2]]
        lead = max(line.lead for line in pushes)
        stale = max(line.staleness for line in pushes)
        print(
            f"{scheme:14} {seconds:6.2f}s {virtual[scheme]:8.2f}s {seconds / virtual[scheme]:6.3f} "
            f"{accuracy:8.4f} {lead:5d} {stale:5d}"
        )


if __name__ == "__main__":
    main()
