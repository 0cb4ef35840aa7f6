"""Where the workers listen, and the environment each of them starts with."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

HOST: Final = "127.0.0.1"


class Helper(NamedTuple):
    """A process that a framework needs beside its workers, such as a parameter server.

    Args:
        name: what it is called in messages.
        command: Python's arguments.
        environment: all of it; of a `Cluster` as made, what is its own.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


class Cluster(NamedTuple):
    """The environment of each worker, by rank, and the processes to start beside them.

    Args:
        workers: an environment each. Every worker runs the script, unless there is a coordinator.
        helpers: what runs beside them; it is not held back when speeds are emulated.
        coordinator: the environment of the one process that runs the script where the workers
            only serve it, in which case `serve` is what they run: Python's arguments.
        serve: see there.
    """

    workers: list[dict[str, str]]
    helpers: list[Helper]
    coordinator: dict[str, str] | None = None
    serve: tuple[str, ...] = ()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; all are held until all are found, so none comes twice."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def environments(
    framework: str,
    workers: int,
    *,
    emulated: bool,
    run_dir: Path | None,
    servers: int | None = None,
) -> Cluster:
    """The environment of each worker, by rank, and of the processes beside them.

    What the user has set already is kept, except for what says who the workers are.

    Args:
        framework: whose way of describing a cluster to follow.
        workers: how many workers there are.
        emulated: True where the workers' speeds are emulated, by holding back their CPU time.
        run_dir: where the run's files go, handed on as LBBSP_RUN_DIR.
        servers: parameter servers; None for what the framework does by default.
    """
    own = cluster_variables(framework, workers, servers)
    shared = {"LBBSP_RUN_DIR": str(run_dir.absolute())} if run_dir is not None else {}
    emulation = emulation_defaults() if emulated else {}
    common = {**quiet_defaults(), **emulation, **os.environ, **shared}
    return own._replace(
        workers=[{**common, **variables} for variables in own.workers],
        helpers=[h._replace(environment={**common, **h.environment}) for h in own.helpers],
        coordinator=None if own.coordinator is None else {**common, **own.coordinator},
    )


def cluster_variables(framework: str, workers: int, servers: int | None = None) -> Cluster:
    """What tells each process its place and its peers, in the words of its framework."""
    if framework not in FRAMEWORKS:
        raise ValueError(
            f"framework must be one of {', '.join(sorted(FRAMEWORKS))}, got {framework!r}: "
            "choose one of these, or leave it out"
        )
    return FRAMEWORKS[framework](workers, servers)


def tensorflow_cluster(workers: int, servers: int | None) -> Cluster:
    """One TF_CONFIG per process, as the strategies of tf.distribute read it.

    Workers alone are for MultiWorkerMirroredStrategy. With servers it is ParameterServerStrategy's
    cluster: a chief, which runs the script, has the workers and the servers at its command.
    """
    counts = {"worker": workers}
    if servers is not None:
        _check_servers(servers, ", or leave it out to train in step, without any")
        counts |= {"ps": servers, "chief": 1}
    ports = iter(free_ports(sum(counts.values())))
    cluster = {kind: [f"{HOST}:{next(ports)}" for _ in range(n)] for kind, n in counts.items()}

    def configs(kind: str) -> list[dict[str, str]]:
        tasks = [{"type": kind, "index": index} for index in range(counts[kind])]
        return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]

    if servers is None:
        return Cluster(configs("worker"), [])
    serve = ("-m", "lbbsp_tf.server")
    helpers = [Helper(f"server {i}", serve, config) for i, config in enumerate(configs("ps"))]
    (chief,) = configs("chief")
    return Cluster(configs("worker"), helpers, chief, serve)


def mxnet_cluster(workers: int, servers: int | None) -> Cluster:
    """The DMLC_* variables of a scheduler, of parameter servers and of workers.

    MXNet's scheduler counts workers in the order of their ports: PORT makes that ours.
    """
    servers = 1 if servers is None else servers
    _check_servers(servers)
    root, *ports = free_ports(1 + workers)
    common = {
        "DMLC_PS_ROOT_URI": HOST,
        "DMLC_PS_ROOT_PORT": str(root),
        "DMLC_NODE_HOST": HOST,
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
    }
    roles = [("scheduler", "scheduler"), *((f"server {i}", "server") for i in range(servers))]
    command = ("-m", "lbbsp_mx.server")
    return Cluster(
        [{**common, "DMLC_ROLE": "worker", "PORT": str(port)} for port in sorted(ports)],
        [Helper(name, command, {**common, "DMLC_ROLE": role}) for name, role in roles],
    )


def _check_servers(servers: int, or_else: str = "") -> None:
    if servers != int(servers) or servers < 1:
        raise ValueError(
            f"servers must be an integer >= 1, got {servers!r}: start at least one{or_else}"
        )


FRAMEWORKS: Final[Mapping[str, Callable[[int, int | None], Cluster]]] = MappingProxyType(
    {"tensorflow": tensorflow_cluster, "mxnet": mxnet_cluster}
)


def quiet_defaults() -> dict[str, str]:
    """Keep the frameworks' start-up chatter out of the workers' output."""
    return {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"}


def emulation_defaults() -> dict[str, str]:
    """One computing thread per worker, no GPU: a CPU quota can slow nothing else down.

    Two inter-op threads, not one: a collective that waits must not keep its own peer from running.
    """
    one_thread = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    threads = {name: "1" for name in (*one_thread, "MKL_NUM_THREADS", "MXNET_CPU_WORKER_NTHREADS")}
    return {**threads, "TF_NUM_INTEROP_THREADS": "2", "CUDA_VISIBLE_DEVICES": "-1"}
