"""Checks of TensorFlow and Keras for `lbbsp doctor`, which runs ``python -m lbbsp_tf.doctor``.

The process must not train: it applies all patches.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from lbbsp_core.doctor.finding import Finding, note, ok, print_findings, problem
from lbbsp_core.installation import extra
from lbbsp_core.resources.gpu import count_gpus, hides_gpus
from lbbsp_core.resources.host import Host
from lbbsp_tf import env
from lbbsp_tf.compat.inventory import State, inventory


def findings() -> list[Finding]:
    """Returns all findings of this process."""
    states = list(inventory())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    versions = f"TensorFlow {tf.__version__}, Keras {keras.__version__}"
    return [
        ok("import lbbsp_tf", f"{versions}; {peak:.0f} MB of memory"),
        *_devices(),
        *map(_patch, states),
        *_slurm(),
    ]


def _devices() -> list[Finding]:
    """Returns which GPUs TensorFlow sees, and for each model whether it has code for it."""
    build = tf.sysconfig.get_build_info()
    gpus = tf.config.list_physical_devices("GPU")
    by_driver = 0 if hides_gpus(Host().environ) else count_gpus()
    results = [check_count(len(gpus), by_driver, is_cuda_build=build.get("is_cuda_build", False))]
    for gpu in map(tf.config.experimental.get_device_details, gpus):
        capability, built = gpu.get("compute_capability"), build.get("cuda_compute_capabilities")
        if capability and built:  # else it is no GPU of NVIDIA
            results.append(check_capability(gpu.get("device_name", "GPU"), capability, built))
    return list(dict.fromkeys(results))


def check_count(gpus: int, by_driver: int, *, is_cuda_build: bool) -> Finding:
    """Compares the GPUs that TensorFlow sees with those of the driver."""
    check = "devices of TensorFlow"
    if gpus:
        return ok(check, f"{gpus} GPU{'s' * (gpus != 1)}")
    if not by_driver:
        return ok(check, "no GPU: it trains on the CPU")
    text = f"no GPU, but the driver has {by_driver}: it trains on the CPU, because "
    remedy = f"pip install {extra('tf')}, or export CUDA_VISIBLE_DEVICES=-1 if that is intended"
    if not is_cuda_build:
        text += "this TensorFlow is built without CUDA"
        return note(check, text, f"pip uninstall tensorflow-cpu, and then {remedy}")
    return note(check, f"{text}it cannot load CUDA's libraries, or they do not fit the driver",
                f"see what `python -c 'import lbbsp_tf'` prints; {remedy}")  # fmt: skip


def check_capability(name: str, capability: tuple[int, int], built: Sequence[str]) -> Finding:
    """Compares the compute capability of a GPU with those that TensorFlow is built for.

    Code for a capability runs on the same major version with the same or a later minor one. A
    build for "compute_90" contains the code of "sm_90", and PTX besides, which the driver can
    compile for any later capability.
    """
    check, version = f"GPU: {name}", ".".join(map(str, capability))
    fields = [re.fullmatch(r"(sm_|compute_)?(\d+)\.?(\d)([af]?)", label) for label in built]
    targets = [((int(match[2]), int(match[3])), match[1], match[4]) for match in fields if match]
    # Code of "sm_90a" runs on 9.0 alone.
    runs = (target == capability or suffix != "a" for target, _, suffix in targets
            if target[0] == capability[0] and target <= capability)  # fmt: skip
    if any(runs):
        return ok(check, f"compute capability {version}, for which TensorFlow has code")
    text = f"TensorFlow has no code for its compute capability {version}, only {', '.join(built)}"
    remedy = (
        f"use a TensorFlow that is built for {version} (as in NVIDIA's container "
        "nvcr.io/nvidia/tensorflow), or hide the GPU: export CUDA_VISIBLE_DEVICES=-1"
    )
    if all(kind == "sm_" or suffix or target > capability for target, kind, suffix in targets):
        return problem(check, text, remedy)
    if capability >= (12, 0):  # CUDA_ERROR_INVALID_PTX
        return problem(check, f"{text}, whose PTX fails on such GPUs", remedy)
    return note(
        check,
        f"{text}: the driver compiles PTX at the first use, which can take half an hour",
        f"export CUDA_CACHE_MAXSIZE=4294967296, so that it does so only once; or {remedy}",
    )


def _patch(state: State) -> Finding:
    check = f"patch: {state.purpose}"
    if state.is_right:
        return ok(check, state.text)
    remedy = f"install versions that lbbsp knows: pip install {extra('tf')}"
    return problem(check, state.text, remedy)


def _slurm() -> Iterator[Finding]:
    """Yields the cluster that TensorFlow's resolver reads from the variables of Slurm, if any."""
    if not env.in_slurm_step():
        return
    check = "SlurmClusterResolver"
    remedy = "start the script with `srun lbbsp launch` (docs/clusters.md), or set TF_CONFIG"
    try:  # its own count of the GPUs fails on nodes without
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            gpus_per_node=1 << 16, gpus_per_task=1, auto_set_gpu=False
        )
        cluster = resolver.cluster_spec()
        address = cluster.task_address(resolver.task_type, resolver.task_id)
    except Exception as error:
        yield note(check, f"cannot read the variables of Slurm: {error}", remedy)
        return
    tasks = "; ".join(f"{kind} {', '.join(hosts)}" for kind, hosts in cluster.as_dict().items())
    text = f"this is {resolver.task_type} {resolver.task_id} of {tasks}"
    yield ok(check, f"{text}; on nodes without GPUs, pass it gpus_per_node and gpus_per_task")
    node = env.slurm_node()
    if node and address.rpartition(":")[0] != node:
        text = f"gives this task the address {address}, but it runs on {node}: it sorts names as "
        yield note(check, text + "text, and takes ranks from Slurm", remedy)


if __name__ == "__main__":
    print_findings(findings())
