"""Checks of TensorFlow and Keras for `lbbsp doctor`, which runs ``python -m lbbsp_tf.doctor``.

The process must not train: it applies all patches.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from lbbsp_core.runtime.finding import Finding, note, ok, print_findings, problem
from lbbsp_tf import env
from lbbsp_tf.compat.inventory import State, inventory


def findings() -> list[Finding]:
    """Returns all findings of this process."""
    states = list(inventory())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    versions = f"TensorFlow {tf.__version__}, Keras {keras.__version__}"
    return [
        ok("import lbbsp_tf", f"{versions}; {peak:.0f} MB of memory"),
        _devices(),
        *map(_patch, states),
        *_slurm(),
    ]


def _devices() -> Finding:
    gpus = tf.config.list_physical_devices("GPU")
    text = f"{len(gpus)} GPUs" if gpus else "no GPU: it trains on the CPU"
    return ok("devices of TensorFlow", text)


def _patch(state: State) -> Finding:
    check = f"patch: {state.purpose}"
    if state.is_right:
        return ok(check, state.text)
    return problem(check, state.text, "install versions that lbbsp knows: pip install 'lbbsp[tf]'")


def _slurm() -> Iterator[Finding]:
    """Yields the cluster that TensorFlow's resolver reads from the variables of Slurm, if any."""
    if not env.in_slurm_step():
        return
    check, kind = "SlurmClusterResolver", tf.distribute.cluster_resolver.SlurmClusterResolver
    remedy = "set TF_CONFIG, or do as examples/cluster/keras_slurm.py (docs/clusters.md)"
    try:
        resolver = kind(auto_set_gpu=False)
        yield ok(check, _described(resolver))
    except Exception as error:  # without GPUs it asks nvidia-smi, or counts in steps of zero
        try:
            resolver = kind(gpus_per_node=1 << 16, gpus_per_task=1, auto_set_gpu=False)
            text = _described(resolver)
        except Exception as second:
            yield note(check, f"cannot read the variables of Slurm: {second}", remedy)
            return
        yield note(check, f"its defaults fail here ({error}); with GPUs, {text}", remedy)
    address = resolver.cluster_spec().task_address(resolver.task_type, resolver.task_id)
    node = env.slurm_node()
    if node and address.rpartition(":")[0] != node:
        text = f"gives this task the address {address}, but it runs on {node}: it sorts names as "
        yield note(check, text + "text, and takes ranks from Slurm", remedy)


def _described(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> str:
    cluster: dict[str, Sequence[str]] = resolver.cluster_spec().as_dict()
    if resolver.task_type is None:
        raise ValueError("the number of this task is none of the cluster's")
    tasks = "; ".join(f"{kind} {', '.join(each)}" for kind, each in cluster.items())
    return f"this is {resolver.task_type} {resolver.task_id} of {tasks}"


if __name__ == "__main__":
    print_findings(findings())
